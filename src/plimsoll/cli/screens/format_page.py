"""One format on a page: bits, numbers, and place against FP16, BF16 and FP32."""

import math

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from plimsoll.cli.screens.format_drawing import Reach, bit_cells, block_cells, ranges
from plimsoll.cli.terminal import Glyphs, drawing_width, glyphs
from plimsoll.formats import BF16, FP16, FP32, BlockFormat, Format
from plimsoll.text import number

_SPECIALS = {
    "ieee": "the highest exponent is reserved for Inf and NaN, as in IEEE 754",
    "fn": "no Inf; only the code of all ones is NaN",
    "fnuz": "no Inf and no -0; the code of -0 is the only NaN",
    "none": "neither Inf nor NaN; every code is a number",
}


def print_page(fmt: Format | BlockFormat, other_names: list[str], target: Console) -> None:
    """Print everything about one format."""
    if isinstance(fmt, BlockFormat):
        _print_block(fmt, target)
    else:
        _print_element(fmt, other_names, target)


def _print_element(fmt: Format, other_names: list[str], target: Console) -> None:
    draw = glyphs(target)
    target.print(_title(fmt.name, f"{fmt.bits} bits"))
    target.print(Text(_SPECIALS[fmt.specials], style="dim"))
    if other_names:
        target.print(Text(f"also called {', '.join(other_names)}", style="dim"))
    _section(target, "Bits")
    _print_lines(target, bit_cells(fmt, drawing_width(target) - 2, draw))
    target.print()
    _print_lines(target, [Text(line) for line in _formula(fmt, draw)])
    _section(target, "Numbers")
    _print_numbers(target, _numbers(fmt))
    _print_range(target, draw, [(fmt.name, Reach.of(fmt), "bold cyan")])


def _print_block(fmt: BlockFormat, target: Console) -> None:
    draw = glyphs(target)
    element, scale = fmt.element, fmt.scale
    target.print(_title(fmt.name, f"{fmt.bits:g} bits a value"))
    tensor = " and one fp32 scale a tensor" if fmt.tensor_scale else ""
    target.print(Text(f"{fmt.block} {element.name} elements share one {scale.name} scale{tensor}", style="dim"))
    _section(target, "Bits of a block")
    _print_lines(target, block_cells(fmt, draw))
    for part, what in ((scale, "scale"), (element, "element")):
        _section(target, f"Bits of the {what}, {part.name}")
        _print_lines(target, bit_cells(part, drawing_width(target) - 2, draw))
    _section(target, "Numbers")
    _print_numbers(target, _block_numbers(fmt))
    rows = [(fmt.name, Reach.of_block(fmt), "bold cyan"), ("one block", Reach.of(element), "cyan")]
    _print_range(target, draw, rows)
    if fmt.tensor_scale:
        target.print(Text("The tensor's fp32 scale moves this window as a whole.", style="dim"))


def _title(name: str, size: str) -> Text:
    return Text.assemble((name.upper(), "bold"), ("  " + size, "dim"))


def _section(target: Console, title: str) -> None:
    target.print()
    target.print(Text(title, style="bold"))


def _print_lines(target: Console, lines: list[Text]) -> None:
    for line in lines:
        target.print(Text("  ").append_text(line), no_wrap=True, crop=True)


def _formula(fmt: Format, draw: Glyphs) -> list[str]:
    times = f" {draw.times} "
    if not fmt.signed:
        return [f"value = 2^(E - {fmt.bias})"]
    if not fmt.has_subnormals:
        return [f"value = (-1)^S{times}2^(E - {fmt.bias})", f"      = (-1)^S{times}0 where E = 0"]
    return [
        f"value = (-1)^S{times}2^(E - {fmt.bias}){times}1.M",
        f"      = (-1)^S{times}2^{fmt.min_exponent}{times}0.M where E = 0",
    ]


_Row = tuple[str, str, str, str]  # name, value, the value as a power of two, the code


def _print_numbers(target: Console, rows: list[_Row]) -> None:
    """The rows in columns; a narrow terminal gets them without the codes."""
    times = glyphs(target).times
    for width in (4, 3):
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for index in range(width):
            grid.add_column(no_wrap=True, justify="right" if index == 1 else "left", style="dim" if index > 1 else None)
        for name, *cells in rows:
            grid.add_row(f"  {name}", *(cell.replace("*", times) for cell in cells[: width - 1]))
        if Measurement.get(target, target.options.update(max_width=1000), grid).maximum <= target.width:
            break
    target.print(grid)


def _numbers(fmt: Format) -> list[_Row]:
    normal = 0 if not fmt.signed else 1 << fmt.mantissa_bits
    rows = [
        _row("max", fmt.max, _hex(fmt, fmt.max_code)),
        _row("smallest normal", fmt.smallest_normal, _hex(fmt, normal)),
    ]
    if fmt.has_subnormals:
        rows.append(_row("smallest subnormal", fmt.smallest_subnormal, _hex(fmt, 1)))
    rows.append(_row("epsilon", fmt.epsilon, ""))
    rows.append(("binades", str(fmt.binades), f"2^{Reach.of(fmt).smallest} to 2^{fmt.max_exponent}", ""))
    rows.append(("bias", str(fmt.bias), "", ""))
    for name, code in _special_codes(fmt):
        rows.append((name, "yes" if code is not None else "no", "", "" if code is None else _hex(fmt, code)))
    overflow = "Inf" if fmt.has_inf else number(fmt.max)
    rows.append(("overflow gives", overflow, "by default", ""))
    return rows


def _row(name: str, value: float, code: str) -> _Row:
    return name, number(value), _power(value), code


def _power(value: float) -> str:
    """Return a value as a significand times a power of two, exactly.

    >>> _power(448.0), _power(2.0**-24), _power(65504.0)
    ('1.75 * 2^8', '2^-24', '(2 - 2^-10) * 2^15')
    """
    mantissa, exponent = math.frexp(value)
    significand = 2 * mantissa
    if significand == 1:
        return f"2^{exponent - 1}"
    below_two = math.frexp(2 - significand)
    short = f"{significand:.6g}"
    exact = float(short) == significand or below_two[0] != 0.5
    return f"{short if exact else f'(2 - 2^{below_two[1] - 1})'} * 2^{exponent - 1}"


def _hex(fmt: Format, code: int) -> str:
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


def _special_codes(fmt: Format) -> list[tuple[str, int | None]]:
    """Return Inf, NaN (the first) and -0 with their codes, None if it has none."""
    magnitudes = 1 << (fmt.exponent_bits + fmt.mantissa_bits)
    nan = {"ieee": fmt.max_code + 2, "fn": magnitudes - 1, "fnuz": magnitudes, "none": None}[fmt.specials]
    return [
        ("Inf", fmt.max_code + 1 if fmt.has_inf else None),
        ("NaN", nan if fmt.has_nan else None),
        ("-0", magnitudes if fmt.has_negative_zero else None),
    ]


def _block_numbers(fmt: BlockFormat) -> list[_Row]:
    element, scale = fmt.element, fmt.scale
    top, bottom = element.max * scale.max, element.smallest_subnormal * scale.smallest_subnormal
    return [
        _row("element max", element.max, ""),
        _row("element smallest", element.smallest_subnormal, ""),
        ("binades in a block", str(element.binades), "largest to smallest element", ""),
        _row("largest scale", scale.max, ""),
        _row("smallest scale", scale.smallest_subnormal, ""),
        _row("largest value", top, ""),
        _row("smallest value", bottom, ""),
        ("bits of a block", f"{fmt.bits * fmt.block:g}", f"{fmt.block} elements and their scale", ""),
    ]


def _print_range(target: Console, draw: Glyphs, rows: list[tuple[str, Reach, str]]) -> None:
    _section(target, "Range")
    names = [name for name, *_ in rows]
    others = [(fmt.name, Reach.of(fmt), "dim") for fmt in (FP16, BF16, FP32) if fmt.name not in names]
    _print_lines(target, ranges(rows + others, drawing_width(target) - 2, draw))
    target.print(Text(f"  {draw.normal * 2} normal   {draw.subnormal * 2} subnormal", style="dim"))
