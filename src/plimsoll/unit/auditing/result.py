"""`Audit`: what `unit.audit` found, as rows, a ranking, a table, a figure or data; and `compare` with another."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from plimsoll import display
from plimsoll.errors import ArgumentError
from plimsoll.notebook_repr import NotebookRepr
from plimsoll.spectrum import Spectrum
from plimsoll.unit.auditing import text_table
from plimsoll.unit.auditing.rows import DIRECTIONS, FORMATS, Direction, Kind, Pair, Reading, Row

if TYPE_CHECKING:
    from rich.table import Table

    from plimsoll.unit.auditing.result import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(NotebookRepr):
    """An audit before and one after.

    - `pairs`: rows that both have, in the order of `before`. `only_before`, `only_after`: rows of one of them alone.
    """

    before: "Audit"
    after: "Audit"
    pairs: tuple[Pair, ...]
    only_before: tuple[Row, ...]
    only_after: tuple[Row, ...]

    def table(self, most: int | None = None) -> "Table":
        """A rich table of 80 columns: the operations' scales before and after, forward and backward."""
        return text_table.compared(self._operations(), most)

    def to_dict(self) -> dict[str, object]:
        """The comparison as JSON-able data, without spectra: the audits' own data has those."""
        return {
            "before": self.before.model, "after": self.after.model,
            "pairs": [_scales(pair) for pair in self.pairs],
            "only_before": [row.name for row in self.only_before],
            "only_after": [row.name for row in self.only_after],
        }  # fmt: skip

    def figure(self) -> Any:
        """A Plotly figure: each operation's scale before (hollow) and after (solid). Needs the extra `report`."""
        return display.function("audit")(self.before, self.after)

    def __str__(self) -> str:
        alone = len(self.only_before), len(self.only_after)
        return text_table.compared_text(self.before, self.after, self._operations(), alone)

    def _operations(self) -> Sequence[Pair]:
        return [pair for pair in self.pairs if pair.before.kind == "operation"]


def compared(before: "Audit", after: "Audit") -> Comparison:
    """The comparison of two audits."""
    later = {row.key: row for row in after.rows}
    pairs = [Pair(before=row, after=later[row.key]) for row in before.rows if row.key in later]
    known = {pair.before.key for pair in pairs}
    return Comparison(
        before=before, after=after, pairs=tuple(pairs),
        only_before=tuple(row for row in before.rows if row.key not in known),
        only_after=tuple(row for row in after.rows if row.key not in known),
    )  # fmt: skip


def _scales(pair: Pair) -> dict[str, object]:
    found: dict[str, object] = {"kind": pair.before.kind, "name": pair.name}
    for direction in ("forward", "backward"):
        for when, row in (("before", pair.before), ("after", pair.after)):
            reading = row.reading(direction)
            scale = math.nan if reading is None else reading.scale
            found[f"{direction}_{when}"] = scale if math.isfinite(scale) else str(scale)
    return found


if TYPE_CHECKING:
    from rich.table import Table

By = Literal["scale", "fp16", "e4m3", "e5m2"]
_BY = ("scale", *FORMATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit(NotebookRepr):
    """The scale of every tensor of one forward and backward, and of every gradient.

    - `model`: its class's name; `training`: the mode it was in. `rows`: inputs, operations in program order,
      parameters.
    - `unmeasured`: operations whose results hold values that cannot be measured (nested tensors and the like).

    Prints as a summary with the worst offenders; `table` has all of them.
    """

    model: str
    rows: tuple[Row, ...]
    training: bool = True
    unmeasured: tuple[str, ...] = ()

    @property
    def operations(self) -> tuple[Row, ...]:
        """The rows of operations, in program order."""
        return self._of("operation")

    @property
    def parameters(self) -> tuple[Row, ...]:
        """The rows of parameters, in the model's order."""
        return self._of("parameter")

    @property
    def inputs(self) -> tuple[Row, ...]:
        """The rows of the model's floating inputs."""
        return self._of("input")

    @property
    def worst(self) -> tuple[Reading, ...]:
        """The operations' readings, forward and backward apart, the worst first: `ranked` by scale."""
        return self.ranked()

    def ranked(
        self, by: By = "scale", *, direction: Direction | None = None, kind: Kind = "operation"
    ) -> tuple[Reading, ...]:
        """Readings, the worst first: those with NaN or +Inf, then by what is asked; ties in program order.

        Args:
            by: "scale": how many binades the standard deviation lies from 1 (all zero is worst, and one value, or
                equal ones, are left out). A format: the fraction it would lose at either end, at the present scale.
            direction: of one direction; None for both.
            kind: "operation", "parameter" or "input".

        Raises `ArgumentError`.
        """
        _check("ranked", "by", by, _BY)
        _check("ranked", "kind", kind, ("operation", "parameter", "input"))
        found = [r for r in self.readings(direction, kind) if by != "scale" or r.spoiled or not math.isnan(r.scale)]
        keys = {id(r): _badness(r, by) for r in found}
        return tuple(sorted(found, key=lambda r: keys[id(r)], reverse=True))

    def readings(self, direction: Direction | None = None, kind: Kind = "operation") -> Iterator[Reading]:
        """The readings of a kind's rows, in program order; of one direction, or of both."""
        if direction is not None:
            _check("readings", "direction", direction, DIRECTIONS)
        for row in self._of(kind):
            for each in DIRECTIONS if direction is None else (direction,):
                reading = row.reading(each)
                if reading is not None:
                    yield reading

    def beyond(self, binades: float, direction: Direction | None = None) -> tuple[Reading, ...]:
        """The operations' readings whose standard deviation lies further than so many binades from 1, worst first."""
        return tuple(r for r in self.ranked("scale", direction=direction) if r.spoiled or r.distance > binades)

    def total(self, direction: Direction, kind: Kind = "operation") -> Spectrum:
        """All values of one direction together: what a format would make of the model with one scale for everything.

        >>> Audit(model="Empty", rows=()).total("forward").count
        0
        """
        return sum((reading.spectrum for reading in self.readings(direction, kind)), start=Spectrum.empty())

    def table(self, order: Literal["program", "worst"] = "program", most: int | None = None) -> "Table":
        """A rich table of 80 columns: each operation's scale and what formats lose, forward and backward.

        Args:
            order: program order, or the worst operations first.
            most: at most so many operations.

        Raises `ArgumentError`.
        """
        _check("table", "order", order, ("program", "worst"))
        if most is not None and (isinstance(most, bool) or most < 1):
            raise ArgumentError(f"Audit.table: expected most to be None or at least 1; got {most!r}. Leave it out.")
        return text_table.table(self._ordered(order), most)

    def to_dict(self) -> dict[str, object]:
        """The audit as JSON-able data."""
        return {
            "model": self.model, "training": self.training, "rows": [row.to_dict() for row in self.rows],
            "unmeasured": list(self.unmeasured),
        }  # fmt: skip

    def compare(self, other: "Audit") -> Comparison:
        """This audit beside a later one: of the model that was made of this one, say.

        Rows are matched by module, operation, call and output; those of one side alone are kept apart.
        """
        if not isinstance(other, Audit):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"Audit.compare: expected another Audit; got {type(other).__name__}. Write before.compare(after)."
            )
        return compared(self, other)

    def figure(self) -> Any:
        """A Plotly figure: every operation's scale, forward and backward, in program order, with formats' limits.

        Needs the extra `report`.
        """
        return display.function("audit")(self, None)

    def __str__(self) -> str:
        return text_table.text(self, self._ordered("worst"))

    def __repr__(self) -> str:
        return f"<Audit of {self.model}: {text_table.summary(self)}>"

    def _of(self, kind: Kind) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    def _ordered(self, order: str) -> Sequence[Row]:
        if order == "program":
            return self.operations
        return list(dict.fromkeys(reading.row for reading in self.worst))


def _badness(reading: Reading, by: By) -> tuple[int, float]:
    value = reading.distance if by == "scale" else reading.outside(by)
    return min(reading.spoiled, 1), -1.0 if math.isnan(value) else value


def _check(operation: str, name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(
            f"Audit.{operation}: expected {name} to be one of {', '.join(choices)}; got {value!r}. Choose one."
        )
