"""``plimsoll formats``: the catalogue as a table, or one format on a page."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.options import Json, Quiet, format_names
from plimsoll.cli.screens.format_page import Axis, Reach, fields, print_page
from plimsoll.cli.terminal import Glyphs, console, glyphs
from plimsoll.formats import ALIASES, BLOCKS, ELEMENTS, FP32, BlockFormat, Format, get
from plimsoll.text import number

_NUMBERS = (
    "bits", "exponent_bits", "mantissa_bits", "bias", "specials", "signed", "max", "smallest_normal",
    "smallest_subnormal", "epsilon", "binades", "min_exponent", "max_exponent", "has_inf", "has_nan",
    "has_subnormals", "has_negative_zero",
)  # fmt: skip


def formats(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="FORMAT",
            autocompletion=format_names,
            help="One format to show in full: a name of the table, or any eXmY.",
        ),
    ] = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """List number formats, or show one in full.

    In full: all its limits, and a drawing of its bits and range.
    """
    chosen = None if name is None else get(name)
    if as_json:
        result = facts(chosen) if chosen is not None else [facts(fmt) for fmt in (*ELEMENTS, *BLOCKS)]
        messages.write_json(result)
    elif chosen is not None:
        print_page(chosen, aliases(chosen), console())
    else:
        _print_tables(console())


def aliases(fmt: Format | BlockFormat) -> list[str]:
    """Return the other names by which `plimsoll.formats.get` finds it."""
    return [name for name, known in ALIASES.items() if known == fmt]


def facts(fmt: Format | BlockFormat) -> dict[str, object]:
    """Everything the catalogue knows of one format, as plain values."""
    if isinstance(fmt, BlockFormat):
        parts: dict[str, object] = {"element": facts(fmt.element), "block": fmt.block, "scale": facts(fmt.scale)}
        return {"name": fmt.name, "kind": "block", "bits": fmt.bits, **parts, "tensor_scale": fmt.tensor_scale}
    values = {field: getattr(fmt, field) for field in _NUMBERS}
    return {"name": fmt.name, "kind": "element", **values, "aliases": aliases(fmt)}


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the formats' table; the highest `rank` is dropped first."""

    head: str
    width: int
    cell: Callable[[Format], str | Text]
    rank: int = 0
    left: bool = False


def _print_tables(target: Console) -> None:
    draw = glyphs(target)
    columns, left_out = _fit(_columns(draw), target.width)
    gap = 2 if sum(column.width + 2 for column in columns) - 2 <= target.width else 1
    table = _frame("Element formats", gap)
    for column in columns:
        table.add_column(column.head, justify="left" if column.left else "right", no_wrap=True, min_width=column.width)
    for fmt, following in zip(ELEMENTS, (*ELEMENTS[1:], None), strict=True):
        ends = following is not None and _section(following) != _section(fmt)
        table.add_row(*(column.cell(fmt) for column in columns), end_section=ends)
    notes = [f"s{draw.dot}e{draw.dot}m: sign, exponent and mantissa bits. eps: from 1 to the next value."]
    if left_out:
        notes.append(f"Left out at this width: {', '.join(left_out)}.")
    notes.append("Any eXmY (such as e5m7) is a format too. plimsoll formats e4m3 shows one in full.")
    target.print(table)
    target.print()
    target.print(_blocks(2 if target.width >= 62 else 1))
    target.print()
    for note in notes:
        target.print(Text(note, style="dim"))


def _section(fmt: Format) -> tuple[bool, int]:
    """The group of rows that a format is in: above 8 bits, 8 bits, below, and scales."""
    return fmt.signed, (fmt.bits > 8) - (fmt.bits < 8)


def _columns(draw: Glyphs) -> list[_Column]:
    return [
        _Column(head="format", width=8, cell=lambda fmt: Text(fmt.name, style="bold"), left=True),
        _Column(head="bits", width=4, cell=lambda fmt: str(fmt.bits), rank=3),
        _Column(head=f"s{draw.dot}e{draw.dot}m", width=7, cell=lambda fmt: _fields(fmt, draw)),
        _Column(head="max", width=8, cell=lambda fmt: number(fmt.max)),
        _Column(head="smallest\nnormal", width=9, cell=lambda fmt: number(fmt.smallest_normal)),
        _Column(
            head="smallest\nsubnormal",
            width=9,
            cell=lambda fmt: number(fmt.smallest_subnormal) if fmt.has_subnormals else draw.dash,
        ),
        _Column(head="eps", width=5, cell=lambda fmt: f"2^-{fmt.mantissa_bits}" if fmt.mantissa_bits else "1", rank=2),
        _Column(head="binades", width=7, cell=lambda fmt: str(fmt.binades), rank=1),
        _Column(head="Inf NaN", width=7, cell=lambda fmt: _specials(fmt, draw), left=True),
    ]


def _fit(columns: list[_Column], width: int) -> tuple[list[_Column], list[str]]:
    """Return the columns that `width` has room for, and the heads of the others."""
    kept, left_out = list(columns), list[str]()
    while sum(column.width + 1 for column in kept) - 1 > width and any(column.rank for column in kept):
        first = max(kept, key=lambda column: column.rank)
        kept.remove(first)
        left_out.append(first.head)
    spare = width - sum(column.width + 2 for column in kept)
    if not left_out and spare >= 40:
        kept.append(_range_column(min(spare - 2, 70)))
    return kept, left_out


def _range_column(cells: int) -> _Column:
    whole = Reach.of(FP32)
    axis = Axis(low=whole.smallest, high=whole.largest, cells=cells)
    head = f"2^{whole.smallest}{f'2^{whole.largest}':>{cells - len(f'2^{whole.smallest}')}}"

    def cell(fmt: Format) -> Text:
        return axis.bar(Reach.of(fmt), glyphs(console()), "cyan")

    return _Column(head=head, width=cells, cell=cell, left=True)


def _fields(fmt: Format, draw: Glyphs) -> Text:
    text = Text()
    widths = {field.letter: (str(field.bits), field.style) for field in fields(fmt)}
    for letter in "SEM":
        if letter != "S":
            text.append(draw.dot, style="dim")
        text.append(*widths.get(letter, ("0", "dim")))
    return text


def _specials(fmt: Format, draw: Glyphs) -> str:
    return " ".join(f"{draw.present if there else draw.absent:^3}" for there in (fmt.has_inf, fmt.has_nan))


def _blocks(gap: int) -> Table:
    table = _frame("Block formats", gap)
    table.add_column("format", no_wrap=True)
    table.add_column("element", no_wrap=True)
    table.add_column("block", justify="right", no_wrap=True)
    table.add_column("scale", no_wrap=True)
    table.add_column("bits a value", justify="right", no_wrap=True)
    for fmt in BLOCKS:
        scale = f"{fmt.scale.name}, fp32 a tensor" if fmt.tensor_scale else fmt.scale.name
        table.add_row(Text(fmt.name, style="bold"), fmt.element.name, str(fmt.block), scale, f"{fmt.bits:g}")
    return table


def _frame(title: str, gap: int) -> Table:
    """Return an open table: a rule under its head only, `gap` cells between columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )
