"""An audit as text: a table of 80 columns, and a summary."""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plimsoll.text import printable
from plimsoll.unit.auditing.rows import Absence, Direction, Pair, Reading, Row

WIDTH = 80
_NAME, _WORST_SHOWN = 28, 12
_NEAR, _FAR = 2.0, 6.0  # binades from unit scale above which a scale is marked
_FEW, _MANY = 0.01, 0.1  # fractions likewise
_ABSENT: dict[Absence | None, str] = {"frozen": "frozen", "no_grad": "no grad", "never came": "none", None: ""}
_SAID = "scale: log2 of the standard deviation. fp16, e4m3, e5m2: % lost below (<) or beyond (>) what they hold."
_JUDGED: dict[Direction, tuple[str, str]] = {"forward": ("fp16", "e4m3"), "backward": ("fp16", "e5m2")}


class Audited(Protocol):
    """The part of an audit that is written as text."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Names of what could not be measured."""
        ...

    @property
    def operations(self) -> tuple[Row, ...]:
        """The rows of operations."""
        ...

    def readings(self, direction: Direction | None = None) -> Iterator[Reading]:
        """Yield the readings of one direction, or of both."""
        ...


def table(rows: Sequence[Row], most: int | None = None) -> Table:
    """One line for each row; a last one says how many are not shown."""
    made = _empty(("forward", "fp16", "e4m3", "backward", "fp16", "e5m2"), (8, 6, 6, 8, 6, 6))
    shown = rows[:most]
    for row in shown:
        forward, backward = row.reading("forward"), row.reading("backward")
        assert forward is not None
        made.add_row(_named(row), *_cells(forward, None), *_cells(backward, row.absence))
    if len(rows) > len(shown):
        made.add_row(Text(f"and {len(rows) - len(shown):,} more", style="dim"))
    made.caption = _SAID
    return made


def compared(pairs: Sequence[Pair], most: int | None = None) -> Table:
    """One line for each pair."""
    made = _empty(("forward", "after", "backward", "after"), (9, 9, 9, 9))
    for pair in pairs[:most]:
        readings = [row.reading(d) for d in ("forward", "backward") for row in (pair.before, pair.after)]
        absences: list[Absence | None] = [None, None, pair.before.absence, pair.after.absence]
        cells = [_scale(r) if r else _absent(a) for r, a in zip(readings, absences, strict=True)]
        made.add_row(_named(pair.before), *cells)
    if most is not None and len(pairs) > most:
        made.add_row(Text(f"and {len(pairs) - most:,} more", style="dim"))
    made.caption = "log2 of the standard deviation, before and after, forward and backward."
    return made


def text(audit: Audited, worst: Sequence[Row]) -> str:
    """A summary, and the worst operations."""
    lines = [textwrap.fill(f"Audit of {audit.model}: {summary(audit)}", WIDTH)]
    if audit.unmeasured:
        lines.append(textwrap.fill(f"Not measured: {', '.join(sorted(set(audit.unmeasured)))}.", WIDTH))
    return "\n".join([*lines, *([_printed(table(worst, _WORST_SHOWN))] if worst else [])])


def compared_text(before: Audited, after: Audited, pairs: Sequence[Pair], alone: tuple[int, int]) -> str:
    """Return both summaries, and the operations whose scale has changed most; `alone` counts rows of one audit only."""
    lines = [
        textwrap.fill(f"Before: {summary(before)}", WIDTH, subsequent_indent="        "),
        textwrap.fill(f"After:  {summary(after)}", WIDTH, subsequent_indent="        "),
        f"{len(pairs):,} operations matched; rows only before: {alone[0]:,}, only after: {alone[1]:,}.",
    ]
    changed = sorted(pairs, key=_change, reverse=True)
    return "\n".join([*lines, *([_printed(compared(changed, _WORST_SHOWN))] if changed else [])])


def summary(audit: Audited) -> str:
    """How many operations, and how far their scales reach.

    One line, in numbers: the lowest and the highest log2 of a standard deviation in each direction.
    """
    parts = [f"{len(audit.operations):,} operations"]
    for direction in ("forward", "backward"):
        scales = [r.scale for r in audit.readings(direction) if math.isfinite(r.scale)]
        if scales:
            low, high = (signed(end).removeprefix("+") for end in (min(scales), max(scales)))
            parts.append(f"{direction} std 2^{low} to 2^{high}")
    spoiled = sum(reading.spoiled > 0 for reading in audit.readings())
    zero = sum(reading.scale == -math.inf for reading in audit.readings())
    parts += [f"{spoiled:,} with NaN or Inf"] if spoiled else []
    parts += [f"{zero:,} all zero"] if zero else []
    return ", ".join(parts)


def _change(pair: Pair) -> float:
    found = [abs(a - b) for a, b in (pair.distances("forward"), pair.distances("backward"))]
    return max((0.0 if math.isnan(one) else one for one in found), default=0.0)


def _empty(heads: Sequence[str], widths: Sequence[int]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    made.caption_justify, made.caption_style = "left", "dim"
    made.add_column("operation", ratio=1, no_wrap=True, overflow="ellipsis")
    for head, width in zip(heads, widths, strict=True):
        made.add_column(head, justify="right", width=width, no_wrap=True)
    return made


def _named(row: Row) -> Text:
    """The row's name; of a long path the end says more than the beginning."""
    name = printable(row.name, lines=False)
    return Text(name if len(name) <= _NAME else f"…{name[1 - _NAME :]}")


def _cells(reading: Reading | None, absence: Absence | None) -> tuple[Text, Text, Text]:
    if reading is None:
        return _absent(absence), Text(""), Text("")
    first, second = _JUDGED[reading.direction]
    return _scale(reading), _share(reading, first), _share(reading, second)


def _absent(absence: Absence | None) -> Text:
    return Text(_ABSENT[absence], style="dim")


def _scale(reading: Reading) -> Text:
    s = reading.spectrum
    if reading.spoiled:
        return Text("NaN" if s.nans else "Inf", style="bold red")
    scale = reading.scale
    if scale == -math.inf:
        return Text("zero", style="bold red")
    if math.isnan(scale):
        return Text("-", style="dim")
    style = "bold red" if abs(scale) > _FAR else "yellow" if abs(scale) > _NEAR else "green"
    return Text(signed(scale), style=style)


def signed(scale: float) -> str:
    """A number of binades with its sign; zero has none.

    >>> signed(1.25), signed(-0.04)
    ('+1.2', '0.0')
    """
    said = f"{scale:+.1f}"
    return said[1:] if float(said) == 0 else said


def _share(reading: Reading, fmt: str) -> Text:
    lost, over = reading.lost(fmt), reading.overflow(fmt)
    share, sign = (over, ">") if over > lost else (lost, "<")
    if not share:
        return Text("0", style="dim")
    said = f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.1f}" if share >= 0.0005 else "0.0"
    return Text(f"{said}{sign}", style="bold red" if share > _MANY else "yellow" if share > _FEW else "")


def _printed(made: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_terminal=False).print(made)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
