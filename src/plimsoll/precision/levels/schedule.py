"""Precision of a run over time: one level, a plan, or a schedule of them.

A schedule is a list of (step, precision), the first at step 0. A precision is active from its optimizer step until the
next pair's. Steps count as in `Loop.step_index`, skipped ones included.
"""

import bisect
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plimsoll.emulate.plan_context import plan_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import Plan
from plimsoll.precision.levels.catalogue import Level, level_named, level_of_plan

Precision = str | os.PathLike[str] | Plan | Sequence[tuple[int, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Level with an optional plan of the formats of modules."""

    level: Level
    plan: Plan | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Stages and their first steps."""

    starts: tuple[int, ...]
    stages: tuple[Stage, ...]

    def at(self, step: int) -> Stage:
        """Return the stage of a step."""
        return self.stages[bisect.bisect_right(self.starts, step) - 1]


def schedule_of(precision: Precision) -> Schedule:
    """Return the schedule of `precision`, or raise `ArgumentError`."""
    if isinstance(precision, str | os.PathLike | Plan):
        return Schedule(starts=(0,), stages=(_stage(precision),))
    pairs = _pairs(precision)
    starts = tuple(step for step, _ in pairs)
    if starts[:1] != (0,) or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ArgumentError(
            f"prepare: expected a schedule whose steps begin at 0 and rise; got steps {list(starts)}. "
            'Write [(0, "bf16-master"), (1000, "amp-fp16")].'
        )
    return Schedule(starts=starts, stages=tuple(_stage(name) for _, name in pairs))


def _pairs(precision: object) -> list[tuple[int, Any]]:
    if isinstance(precision, Sequence):
        pairs = list(cast("Sequence[Any]", precision))
        if pairs and all(_is_pair(pair) for pair in pairs):
            return [(pair[0], pair[1]) for pair in pairs]
    raise ArgumentError(
        f"prepare: expected a level, a plan file or a schedule of (step, precision); got precision={precision!r}. "
        'Write "amp-bf16", or [(0, "bf16-master"), (1000, "amp-fp16")].'
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(cast("Any", value)) == 2 and type(cast("Any", value)[0]) is int


def _stage(precision: object) -> Stage:
    if isinstance(precision, Plan | os.PathLike) or (isinstance(precision, str) and precision.endswith(".toml")):
        plan = plan_of("prepare", cast("Plan | str", precision))
        return Stage(level=level_of_plan(plan), plan=plan)
    if isinstance(precision, str):
        return Stage(level=level_named(precision))
    raise ArgumentError(
        f"prepare: expected a level or a plan file at each step; got {precision!r}. Name one, such as amp-bf16."
    )
