"""Result of an audit: rows, ranking, comparison, tables, text and data."""

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plimsoll import display
from plimsoll.checks import integer, number as finite_number, one_of
from plimsoll.errors import ArgumentError
from plimsoll.results import NotebookRepr, as_data
from plimsoll.spectrum import Spectrum
from plimsoll.text import counted, number, printable

Kind = Literal["input", "operation", "parameter"]
Direction = Literal["forward", "backward"]
By = Literal["scale", "fp16", "e4m3", "e5m2"]
# Reasons for a missing gradient: gradients were off, nothing here is trained, or it was expected and did not come.
Absence = Literal["no_grad", "frozen", "never came"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
KINDS: tuple[Kind, ...] = ("operation", "parameter", "input")
FORMATS = ("fp16", "e4m3", "e5m2")  # formats that readings are judged by

_WIDTH, _NAME_WIDTH, _WORST_SHOWN = 80, 28, 12
_NEAR, _FAR = 2.0, 6.0  # binades from unit scale above which a scale is marked
_FEW, _MANY = 0.01, 0.1  # fractions likewise
_ABSENCES: dict[Absence | None, str] = {"frozen": "frozen", "no_grad": "no grad", "never came": "none", None: ""}
_CAPTION = "scale: log2 of the standard deviation. fp16, e4m3, e5m2: % that underflows (<) or overflows (>)."
# FP8 training computes forward in E4M3 and keeps gradients in E5M2, which has the range that they need.
_FORMATS_OF: dict[Direction, tuple[str, str]] = {"forward": ("fp16", "e4m3"), "backward": ("fp16", "e5m2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(NotebookRepr):
    """Values of a tensor, or of its gradient: one direction of a row.

    Fractions are estimates (`Spectrum.fit`) of the nonzero finite values, at the scale that the values have now.
    """

    row: "Row"
    direction: Direction
    spectrum: Spectrum

    @property
    def scale(self) -> float:
        """log2 of the standard deviation: 0 at unit scale, -Inf if all values are zero.

        NaN for fewer than two finite values, and for values that are all equal and not zero.
        """
        s = self.spectrum
        if s.finite < 2:
            return math.nan
        if not s.nonzero:
            return -math.inf
        return math.log2(s.std) if s.std > 0 else math.nan

    @property
    def distance(self) -> float:
        """Distance of the standard deviation from 1 in binades, above or below."""
        return abs(self.scale)

    @property
    def spoiled(self) -> int:
        """Number of NaN and +Inf. A -Inf does not count, since masks consist of them."""
        return self.spectrum.nans + self.spectrum.pos_infs

    def lost(self, fmt: object) -> float:
        """Return the fraction that would underflow to zero in the format."""
        return self.spectrum.fit(fmt).lost.estimate

    def overflow(self, fmt: object) -> float:
        """Return the fraction beyond the format's largest value."""
        return self.spectrum.fit(fmt).overflow.estimate

    def outside(self, fmt: object) -> float:
        """Return the fraction that would underflow or overflow in the format."""
        fit = self.spectrum.fit(fmt)
        return fit.lost.estimate + fit.overflow.estimate

    def __str__(self) -> str:
        return f"{self.row.name}, {self.direction}: {_std(self.spectrum)}"

    def to_dict(self) -> dict[str, object]:
        """Return the reading as data for JSON."""
        s = self.spectrum
        return {
            "std": as_data(s.std),
            "log2_std": as_data(self.scale),
            "rms": as_data(s.rms),
            "absmax": as_data(s.absmax),
            "zero_fraction": as_data(s.zero_fraction),
            "nans": s.nans,
            "pos_infs": s.pos_infs,
            "neg_infs": s.neg_infs,
            "lost": {name: self.lost(name) for name in FORMATS},
            "overflow": {name: self.overflow(name) for name in FORMATS},
            "spectrum": s.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(NotebookRepr):
    """Tensor of a forward pass: a result, an input of the model, or a parameter.

    Attributes:
        position: Position in program order. Parameters come after all operations, in the model's order.
        kind: `"input"`, `"operation"` or `"parameter"`.
        operation: Name such as "linear". Index or name of an input, own name of a parameter ("weight").
        module: Path of the innermost module that runs the operation, "model" for the root, "loss" for the loss.
        call: Number of the call of this operation in this module, from 0.
        output: Number of the result of this call, from 0.
        source: Line of the user's code, "file:line", or None.
        shape: Shape of the tensor.
        dtype: Name of its dtype.
        moved: Whether the values are those of another tensor (a view, a copy, a join), or made of no values.
        forward: Spectrum of the values.
        backward: Spectrum of the gradient, or None.
        absence: Reason for a missing gradient.
    """

    position: int
    kind: Kind
    operation: str
    module: str
    call: int = 0
    output: int = 0
    source: str | None = None
    shape: tuple[int, ...]
    dtype: str
    moved: bool = False
    forward: Spectrum
    backward: Spectrum | None = None
    absence: Absence | None = None

    @property
    def name(self) -> str:
        """Name such as "blocks.0.mlp linear", with call and output if several."""
        call = f" #{self.call + 1}" if self.call else ""
        output = f" [{self.output}]" if self.output else ""
        if self.kind == "parameter":
            return f"{self.module}.{self.operation}" if self.module != "model" else self.operation
        return f"{self.module} {self.operation}{call}{output}"

    @property
    def key(self) -> tuple[str, str, str, int, int, bool]:
        """Key by which rows of two audits are matched. No two rows of an audit have the same."""
        return self.kind, self.module, self.operation, self.call, self.output, self.moved

    @property
    def forward_std(self) -> float:
        """Standard deviation of the values."""
        return self.forward.std

    @property
    def backward_std(self) -> float:
        """Standard deviation of the gradient's values, or NaN without a gradient."""
        return math.nan if self.backward is None else self.backward.std

    def reading(self, direction: Direction) -> Reading | None:
        """Return one direction, or None if there is no gradient.

        Raises:
            ArgumentError: `direction` is neither "forward" nor "backward".
        """
        one_of("Row.reading", "direction", direction, DIRECTIONS)
        spectrum = self.forward if direction == "forward" else self.backward
        return None if spectrum is None else Reading(row=self, direction=direction, spectrum=spectrum)

    def __str__(self) -> str:
        backward = self.absence or "none" if self.backward is None else _std(self.backward)
        return f"{self.name}: forward {_std(self.forward)}, backward {backward}"

    def to_dict(self) -> dict[str, object]:
        """Return the row as data for JSON."""
        forward, backward = self.reading("forward"), self.reading("backward")
        return {
            "position": self.position,
            "kind": self.kind,
            "name": self.name,
            "operation": self.operation,
            "module": self.module,
            "call": self.call,
            "output": self.output,
            "source": self.source,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "moved": self.moved,
            "forward": None if forward is None else forward.to_dict(),
            "backward": None if backward is None else backward.to_dict(),
            "absence": self.absence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Row of one audit and the matching row of another."""

    before: Row
    after: Row

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.before.name

    def distances(self, direction: Direction) -> tuple[float, float]:
        """Return the distances from unit scale in binades, before and after, or NaN."""
        readings = [row.reading(direction) for row in (self.before, self.after)]
        before, after = (math.nan if reading is None else reading.distance for reading in readings)
        return before, after


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(NotebookRepr):
    """Two audits, one before and one after a change.

    Attributes:
        before: First audit.
        after: Second audit.
        pairs: Rows of both, in the order of `before`.
        only_before: Rows of `before` alone.
        only_after: Rows of `after` alone.
    """

    before: "Audit"
    after: "Audit"
    pairs: tuple[Pair, ...]
    only_before: tuple[Row, ...]
    only_after: tuple[Row, ...]

    def table(self, most: int | None = None) -> Table:
        """Return a rich table of 80 columns: operations' scales before and after.

        Args:
            most: Largest number of operations. Default: all.

        Raises:
            ArgumentError: `most` is below 1.
        """
        _check_most("Comparison.table", most)
        return _comparison_table(self._operations(), most)

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as data for JSON, without the audits' spectra."""
        return {
            "before": self.before.model,
            "after": self.after.model,
            "pairs": [_scales(pair) for pair in self.pairs],
            "only_before": [row.name for row in self.only_before],
            "only_after": [row.name for row in self.only_after],
        }

    def figure(self) -> Any:
        """Return a Plotly figure of scales before (hollow) and after (solid).

        Needs the extra `report`.
        """
        return display.function("audit")(self.before, self.after)

    def __str__(self) -> str:
        pairs, alone = self._operations(), (len(self.only_before), len(self.only_after))
        lines = [
            textwrap.fill(f"Before: {_summary(self.before)}", _WIDTH, subsequent_indent="        "),
            textwrap.fill(f"After:  {_summary(self.after)}", _WIDTH, subsequent_indent="        "),
            f"{counted(len(pairs), 'operation')} matched; rows only before: {alone[0]:,}, only after: {alone[1]:,}.",
        ]
        changed = sorted(pairs, key=_change, reverse=True)
        return "\n".join([*lines, *([_printed(_comparison_table(changed, _WORST_SHOWN))] if changed else [])])

    def _operations(self) -> Sequence[Pair]:
        return [pair for pair in self.pairs if pair.before.kind == "operation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(NotebookRepr):
    """Scales of all tensors of one forward and backward pass, and of all gradients.

    Printed, it is a summary with the operations that are furthest from unit scale. `table` has all of them.

    Attributes:
        model: Name of the model's class.
        rows: Inputs, operations in program order, parameters.
        training: Whether the model was in training mode.
        unmeasured: Operations whose results contain values that cannot be measured, such as nested tensors.
    """

    model: str
    rows: tuple[Row, ...]
    training: bool = True
    unmeasured: tuple[str, ...] = ()

    @property
    def operations(self) -> tuple[Row, ...]:
        """Rows of operations, in program order."""
        return self._of("operation")

    @property
    def parameters(self) -> tuple[Row, ...]:
        """Rows of parameters, in the model's order."""
        return self._of("parameter")

    @property
    def inputs(self) -> tuple[Row, ...]:
        """Rows of the model's floating-point inputs."""
        return self._of("input")

    @property
    def worst(self) -> tuple[Reading, ...]:
        """Readings of operations, each direction apart, worst scale first."""
        return self.ranked()

    def ranked(
        self, by: By = "scale", *, direction: Direction | None = None, kind: Kind = "operation"
    ) -> tuple[Reading, ...]:
        """Return readings, worst first: those with NaN or +Inf, then by `by`.

        Ties are in program order.

        Args:
            by: `"scale"` ranks by the distance of the standard deviation from 1 in binades. All zero is worst. Single
                and equal values are left out. A format ranks by the fraction that underflows or overflows in it at the
                present scale. Default: `"scale"`.
            direction: `"forward"` or `"backward"`. Default: both.
            kind: `"operation"`, `"parameter"` or `"input"`. Default: `"operation"`.

        Raises:
            ArgumentError: An argument is none of these.
        """
        one_of("Audit.ranked", "by", by, ("scale", *FORMATS))
        one_of("Audit.ranked", "kind", kind, KINDS)
        ranked = [r for r in self.readings(direction, kind) if by != "scale" or r.spoiled or not math.isnan(r.scale)]
        keys = {id(r): _badness(r, by) for r in ranked}
        return tuple(sorted(ranked, key=lambda r: keys[id(r)], reverse=True))

    def readings(self, direction: Direction | None = None, kind: Kind = "operation") -> Iterator[Reading]:
        """Yield the readings of a kind's rows in program order."""
        if direction is not None:
            one_of("Audit.readings", "direction", direction, DIRECTIONS)
        one_of("Audit.readings", "kind", kind, KINDS)
        for row in self._of(kind):
            for side in DIRECTIONS if direction is None else (direction,):
                reading = row.reading(side)
                if reading is not None:
                    yield reading

    def beyond(self, binades: float, direction: Direction | None = None) -> tuple[Reading, ...]:
        """Return operations' readings so many binades from unit scale, worst first.

        Raises:
            ArgumentError: `binades` is no number, or `direction` is no direction.
        """
        binades = finite_number("Audit.beyond", "binades", binades, remedy="Use 6, for example.")
        return tuple(r for r in self.ranked("scale", direction=direction) if r.spoiled or r.distance > binades)

    def total(self, direction: Direction, kind: Kind = "operation") -> Spectrum:
        """Return the spectrum of all values of one direction.

        It is that for a format with one scale for the whole model.

        >>> Audit(model="Empty", rows=()).total("forward").count
        0
        """
        return sum((reading.spectrum for reading in self.readings(direction, kind)), start=Spectrum.empty())

    def table(self, order: Literal["program", "worst"] = "program", most: int | None = None) -> Table:
        """Return a rich table of 80 columns: operations' scales and losses in formats.

        Args:
            order: `"program"`, or `"worst"` for the worst operations first. Default: `"program"`.
            most: Largest number of operations. Default: all.

        Raises:
            ArgumentError: `order` is neither, or `most` is below 1.
        """
        one_of("Audit.table", "order", order, ("program", "worst"))
        _check_most("Audit.table", most)
        return _operations_table(self._ordered(order), most)

    def to_dict(self) -> dict[str, object]:
        """Return the audit as data for JSON."""
        return {
            "model": self.model,
            "training": self.training,
            "rows": [row.to_dict() for row in self.rows],
            "unmeasured": list(self.unmeasured),
        }

    def compare(self, other: "Audit") -> Comparison:
        """Compare this audit with a later one, for example of the converted model.

        Rows are matched by module, operation, call and output. Rows of one side alone are listed separately.

        Raises:
            ArgumentError: `other` is no audit.
        """
        if not isinstance(other, Audit):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"Audit.compare: expected another Audit; got {type(other).__name__}. Write before.compare(after)."
            )
        return _compare(self, other)

    def figure(self) -> Any:
        """Return a Plotly figure of all scales in program order, with formats' limits.

        Needs the extra `report`.
        """
        return display.function("audit")(self, None)

    def __str__(self) -> str:
        lines = [textwrap.fill(f"Audit of {self.model}: {_summary(self)}", _WIDTH)]
        if self.unmeasured:
            lines.append(textwrap.fill(f"Not measured: {', '.join(sorted(set(self.unmeasured)))}.", _WIDTH))
        worst = self._ordered("worst")
        return "\n".join([*lines, *([_printed(_operations_table(worst, _WORST_SHOWN))] if worst else [])])

    def __repr__(self) -> str:
        return f"<Audit of {self.model}: {_summary(self)}>"

    def _of(self, kind: Kind) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    def _ordered(self, order: str) -> Sequence[Row]:
        if order == "program":
            return self.operations
        return list(dict.fromkeys(reading.row for reading in self.worst))


def _check_most(operation: str, most: object) -> None:
    if most is not None:
        integer(operation, "most", most, low=1, remedy="Leave it out for all.")


def _std(spectrum: Spectrum) -> str:
    return f"std {number(spectrum.std)}"


def _compare(before: "Audit", after: "Audit") -> Comparison:
    later = {row.key: row for row in after.rows}
    pairs = [Pair(before=row, after=later[row.key]) for row in before.rows if row.key in later]
    known = {pair.before.key for pair in pairs}
    return Comparison(
        before=before,
        after=after,
        pairs=tuple(pairs),
        only_before=tuple(row for row in before.rows if row.key not in known),
        only_after=tuple(row for row in after.rows if row.key not in known),
    )


def _scales(pair: Pair) -> dict[str, object]:
    scales: dict[str, object] = {"kind": pair.before.kind, "name": pair.name}
    for direction in DIRECTIONS:
        for when, row in (("before", pair.before), ("after", pair.after)):
            reading = row.reading(direction)
            scales[f"{direction}_{when}"] = as_data(math.nan if reading is None else reading.scale)
    return scales


def _badness(reading: Reading, by: By) -> tuple[int, float]:
    value = reading.distance if by == "scale" else reading.outside(by)
    return min(reading.spoiled, 1), -1.0 if math.isnan(value) else value


def _operations_table(rows: Sequence[Row], most: int | None) -> Table:
    """Return a table of rows. A last line counts those that are not shown."""
    table = _empty_table(("forward", "fp16", "e4m3", "backward", "fp16", "e5m2"), (8, 6, 6, 8, 6, 6))
    shown = rows[:most]
    for row in shown:
        forward, backward = row.reading("forward"), row.reading("backward")
        assert forward is not None
        table.add_row(_row_name(row), *_reading_cells(forward, None), *_reading_cells(backward, row.absence))
    if len(rows) > len(shown):
        table.add_row(Text(f"and {len(rows) - len(shown):,} more", style="dim"))
    table.caption = _CAPTION
    return table


def _comparison_table(pairs: Sequence[Pair], most: int | None) -> Table:
    table = _empty_table(("forward", "after", "backward", "after"), (9, 9, 9, 9))
    for pair in pairs[:most]:
        readings = [row.reading(d) for d in DIRECTIONS for row in (pair.before, pair.after)]
        absences: list[Absence | None] = [None, None, pair.before.absence, pair.after.absence]
        cells = [_scale_text(r) if r else _absence_text(a) for r, a in zip(readings, absences, strict=True)]
        table.add_row(_row_name(pair.before), *cells)
    if most is not None and len(pairs) > most:
        table.add_row(Text(f"and {len(pairs) - most:,} more", style="dim"))
    table.caption = "log2 of the standard deviation, before and after, forward and backward."
    return table


def _summary(audit: Audit) -> str:
    """Return one line: the number of operations, and their scales' range."""
    parts = [counted(len(audit.operations), "operation")]
    for direction in DIRECTIONS:
        scales = [r.scale for r in audit.readings(direction) if math.isfinite(r.scale)]
        if scales:
            low, high = (_signed(end).removeprefix("+") for end in (min(scales), max(scales)))
            parts.append(f"{direction} std 2^{low} to 2^{high}")
    spoiled = sum(reading.spoiled > 0 for reading in audit.readings())
    zero = sum(reading.scale == -math.inf for reading in audit.readings())
    parts += [f"{spoiled:,} with NaN or Inf"] if spoiled else []
    parts += [f"{zero:,} all zero"] if zero else []
    return ", ".join(parts)


def _change(pair: Pair) -> float:
    changes = [abs(a - b) for a, b in (pair.distances(direction) for direction in DIRECTIONS)]
    return max(0.0 if math.isnan(change) else change for change in changes)


def _empty_table(heads: Sequence[str], widths: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=_WIDTH, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.caption_justify, table.caption_style = "left", "dim"
    table.add_column("operation", ratio=1, no_wrap=True, overflow="ellipsis")
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head, justify="right", width=width, no_wrap=True)
    return table


def _row_name(row: Row) -> Text:
    """Return the row's name. A long path loses its beginning, the general part."""
    name = printable(row.name, lines=False)
    return Text(name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}")


def _reading_cells(reading: Reading | None, absence: Absence | None) -> tuple[Text, Text, Text]:
    if reading is None:
        return _absence_text(absence), Text(""), Text("")
    first, second = _FORMATS_OF[reading.direction]
    return _scale_text(reading), _share(reading, first), _share(reading, second)


def _absence_text(absence: Absence | None) -> Text:
    return Text(_ABSENCES[absence], style="dim")


def _scale_text(reading: Reading) -> Text:
    s = reading.spectrum
    if reading.spoiled:
        return Text("NaN" if s.nans else "Inf", style="bold red")
    scale = reading.scale
    if scale == -math.inf:
        return Text("zero", style="bold red")
    if math.isnan(scale):
        return Text("-", style="dim")
    style = "bold red" if abs(scale) > _FAR else "yellow" if abs(scale) > _NEAR else "green"
    return Text(_signed(scale), style=style)


def _signed(scale: float) -> str:
    """Write a number of binades with its sign. Zero has none.

    >>> _signed(1.25), _signed(-0.04)
    ('+1.2', '0.0')
    """
    written = f"{scale:+.1f}"
    return written[1:] if float(written) == 0 else written


def _share(reading: Reading, fmt: str) -> Text:
    underflow, overflow = reading.lost(fmt), reading.overflow(fmt)
    share, sign = (overflow, ">") if overflow > underflow else (underflow, "<")
    if not share:
        return Text("0", style="dim")
    written = f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.1f}" if share >= 0.0005 else "0.0"
    return Text(f"{written}{sign}", style="bold red" if share > _MANY else "yellow" if share > _FEW else "")


def _printed(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
