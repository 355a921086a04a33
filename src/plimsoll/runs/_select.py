"""Reading rows of the parts: only what is asked for, without what was replaced, each as often as it counts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs import _block_columns, _order
from plimsoll.runs._arrow import Table, array, pa, pc, values_of
from plimsoll.runs._catalog import Catalog
from plimsoll.runs._parts import Part
from plimsoll.runs._place import Place
from plimsoll.runs._tables import SCHEMAS, WIDE, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Which steps are asked for: from `low` up to and not including `high`, every one or every so many."""

    low: int | None = None
    high: int | None = None
    every: int = 1

    @classmethod
    def of(cls, steps: slice | None) -> "Steps":
        """Those that a slice of step numbers means."""
        if steps is None:
            return cls()
        return cls(low=steps.start, high=steps.stop, every=1 if steps.step is None else steps.step)

    def may_be_in(self, part: Part) -> bool:
        """Whether a part can hold any."""
        return (self.low is None or part.max_step >= self.low) and (self.high is None or part.min_step < self.high)

    def mask(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these steps are meant."""
        result = np.ones(len(steps), dtype=bool)
        if self.low is not None:
            result &= steps >= self.low
        if self.high is not None:
            result &= steps < self.high
        return result if self.every == 1 else result & ((steps - (self.low or 0)) % self.every == 0)


def select(
    catalog: Catalog,
    kind: Kind,
    *,
    equal: Mapping[str, Collection[str]] | None = None,
    steps: Steps | None = None,
    columns: Sequence[str] | None = None,
    blocks: bool = True,
) -> Table:
    """Rows whose words are among those of `equal`, with a column `rank`; sorted by key, step and rank.

    Row groups that cannot hold any are not read. Where a part has records of blocks the table has their columns, unless
    `columns` or `blocks` leave them out.
    """
    wanted = steps or Steps()
    names = list(columns or SCHEMAS[kind].names)
    more = _block_columns.NAMES if blocks and columns is None and kind == "spectra" else ()

    def load(place: Place, part: Part) -> Table:
        return _load(place, part, names, more, _filter(equal or {}, wanted, catalog.visible_end(part), part))

    found = catalog.read(lambda: [p for p in catalog.of(kind) if _is_worth_reading(catalog, p, wanted)], load)
    schema = pa.schema([*(SCHEMAS[kind].field(name) for name in names), ("rank", pa.int32())])
    tables = [table.append_column("rank", array(np.full(len(table), part.rank, np.int32))) for part, table in found]
    table = pa.concat_tables([pa.Table.from_batches([], schema), *tables], promote_options="default")
    if wanted.every != 1:
        table = table.filter(array(wanted.mask(values_of(table["step"]))))
    return _order.ordered(table, kind, ("rank",))


def _is_worth_reading(catalog: Catalog, part: Part, steps: Steps) -> bool:
    return steps.may_be_in(part) and catalog.visible_end(part) >= part.min_step


def _load(place: Place, part: Part, names: list[str], more: Sequence[str], condition: Any) -> Table:
    """The columns `names`, and those of `more` that the part has."""
    if condition is None:
        source = place.opened(part.name)
        there = source.schema_arrow.names
    else:
        source = place.filtered(part.name, condition)
        there = source.schema.names
    wanted = [*names, *(name for name in more if name in there)]
    schema = pa.schema([(WIDE if part.kind == "spectra" else SCHEMAS[part.kind]).field(name) for name in wanted])
    return source.read(columns=wanted).select(wanted).cast(schema)


def _filter(equal: Mapping[str, Collection[str]], steps: Steps, end: int, part: Part) -> Any:
    """The condition that pyarrow skips row groups by; None for none."""
    conditions: list[Any] = []
    for name, values in equal.items():
        conditions.append(pc.field(name) == next(iter(values)) if len(values) == 1 else _among(name, sorted(values)))
    if steps.low is not None and steps.low > part.min_step:
        conditions.append(pc.field("step") >= steps.low)
    if steps.high is not None and steps.high <= part.max_step:
        conditions.append(pc.field("step") < steps.high)
    if end < part.max_step:
        conditions.append(pc.field("step") <= end)
    combined: Any = None
    for condition in conditions:
        combined = condition if combined is None else combined & condition
    return combined


def _among(name: str, values: list[str]) -> Any:
    return (pc.field(name) >= values[0]) & (pc.field(name) <= values[-1]) & pc.field(name).isin(values)
