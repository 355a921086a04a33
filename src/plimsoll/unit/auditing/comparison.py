"""`Comparison`: two audits side by side, row by row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plimsoll.notebook_repr import NotebookRepr
from plimsoll.unit.auditing import figure_hook, text_table
from plimsoll.unit.auditing.rows import Direction, Row

if TYPE_CHECKING:
    from rich.table import Table

    from plimsoll.unit.auditing.result import Audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same row before and after."""

    before: Row
    after: Row

    @property
    def name(self) -> str:
        """What the row is called."""
        return self.before.name

    def distances(self, direction: Direction) -> tuple[float, float]:
        """How many binades from unit scale it lies, before and after; NaN where there is no scale to speak of."""
        found = [row.reading(direction) for row in (self.before, self.after)]
        before, after = (math.nan if reading is None else reading.distance for reading in found)
        return before, after


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
        return figure_hook.figure(self.before, self.after)

    def __str__(self) -> str:
        return text_table.compared_text(self, self._operations())

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
