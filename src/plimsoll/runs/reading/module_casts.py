"""Casts of modules to 8 bits before they multiply: recorded formats and scales.

A watch records an event of kind `casts` when it first finds modules that cast, and after each change. It has for each
module and role the series whose values are cast, the format, and the scale. A scale that follows the data is null
there. Its values are a scalar of the run, ``cast:module:role``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll import tensor_collections
from plimsoll.formats import ROLES, Role
from plimsoll.runs.records import Event

EVENT = "casts"
PREFIX = "cast:"  # of the scalars that are scales

# The collection in which the values of a role are recorded.
COLLECTIONS: Mapping[Role, str] = {c.role: c.name for c in tensor_collections.COLLECTIONS if c.role is not None}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cast:
    """One operand that a module casts: its values, times a scale, in a format.

    Attributes:
        module: Name of the module.
        role: "weights", "activations" or "gradients".
        format: Name of the format.
        collection: Collection of the series before the cast.
        name: Name of that series.
        since_step: First step.
        until_step: Last step. None: the end of the run.
        constant: Whether the scale does not follow the data.
        steps: Steps at which the scale changes.
        scales: Scale from each of these steps on.
    """

    module: str
    role: Role
    format: str
    collection: str
    name: str
    since_step: int
    until_step: int | None
    constant: bool
    steps: NDArray[np.int64]
    scales: NDArray[np.float64]

    def scale_at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the last scale recorded by each step. NaN if there is none, or no cast."""
        if not len(self.steps):
            return np.full(len(steps), np.nan)
        place = np.searchsorted(self.steps, steps, side="right") - 1
        within = (steps >= self.since_step) & (place >= 0)
        if self.until_step is not None:
            within &= steps <= self.until_step
        scales = self.scales[np.maximum(place, 0)]
        return np.where(within & np.isfinite(scales) & (scales > 0), scales, np.nan)


def scalar_of(module: str, role: str) -> str:
    """Return the name of the scalar that has a cast's scale.

    >>> scalar_of("blocks.0.mlp", "weights")
    'cast:blocks.0.mlp:weights'
    """
    return f"{PREFIX}{module}:{role}"


def casts_of(
    events: Iterable[Event], scales: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
) -> list[Cast]:
    """Return the casts in events, by module and role and then by step.

    `scales` has the steps and values of the scalars, by name.
    """
    cast_events = [event for event in events if event.kind == EVENT]
    # All ranks cast alike, so only the lowest rank's events count.
    lowest = min((event.rank for event in cast_events), default=0)
    tables = [(event.step, _entries(event)) for event in cast_events if event.rank == lowest]
    keys = list(dict.fromkeys(key for _, table in tables for key in table))
    return [cast_span for key in keys for cast_span in _spans(key, tables, scales)]


_Key = tuple[str, Role]
_Entry = tuple[str, str, float | None]  # format, series, scale


def _entries(event: Event) -> dict[_Key, _Entry]:
    """Return an event's casts, without invalid entries, since anyone may write events."""
    entries: dict[_Key, _Entry] = {}
    for module, said in _mapping(event.details.get("modules")).items():
        for role in ROLES:
            entry = _mapping(_mapping(said).get(role))
            fmt, series, scale = entry.get("format"), entry.get("series"), entry.get("scale")
            if isinstance(fmt, str) and isinstance(series, str) and (scale is None or isinstance(scale, int | float)):
                entries[str(module), role] = fmt, series, None if scale is None else float(scale)
    return entries


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _spans(
    key: _Key,
    tables: Sequence[tuple[int, Mapping[_Key, _Entry]]],
    scales: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> Iterable[Cast]:
    """Yield a cast for each range of steps in which a module's role keeps its cast."""
    before: _Entry | None = None
    begun = 0
    for step, table in tables:
        now = table.get(key)
        if now != before:
            if before is not None:
                yield _made(key, before, begun, step - 1, scales)
            before, begun = now, step
    if before is not None:
        yield _made(key, before, begun, None, scales)


def _made(
    key: _Key,
    entry: _Entry,
    since: int,
    until: int | None,
    scales: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> Cast:
    (module, role), (fmt, series, scale) = key, entry
    nothing = np.empty(0, dtype=np.int64), np.empty(0)
    steps, values = scales.get(scalar_of(module, role), nothing) if scale is None else nothing
    inside = (steps >= since) & (steps <= (until if until is not None else np.iinfo(np.int64).max))
    return Cast(
        module=module,
        role=role,
        format=fmt,
        collection=COLLECTIONS[role],
        name=series,
        since_step=since,
        until_step=until,
        constant=scale is not None,
        steps=steps[inside] if scale is None else np.array([since], dtype=np.int64),
        scales=values[inside] if scale is None else np.array([scale]),
    )
