"""Catalogue of the precision levels, and the precision of a run over time.

`LEVELS` lists them, `prepare` applies one, `levels_table` prints them. Apex's O0 to O3 are aliases of four levels.
"""

import bisect
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from rich.table import Table

from plimsoll.checks import nearest
from plimsoll.emulate.module_regions import is_native
from plimsoll.emulate.plan_context import plan_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP32, Format, ModulePlan, Plan, get
from plimsoll.kernels.dtypes import TRAINING as DTYPES

Update = Literal["plain", "masters", "stochastic", "kahan"]
ALIASES = {"o0": "fp32", "o1": "amp-fp16", "o2": "fp16-master", "o3": "fp16-pure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Way to train a model in low precision.

    Attributes:
        name: Name that `prepare` takes.
        summary: One line for tables.
        weights: Format of the parameters.
        norms: Format of the parameters of normalization layers.
        operations: Format of autocast's low-precision operations; None: operations run in the format of their inputs.
        matmuls: Format of matrix products of FP32 values; None: FP32.
        update: How a step changes 16-bit weights: through FP32 masters, with stochastic rounding, with Kahan
            compensation, or plainly.
        scaled: Whether the loss is scaled.
        fp8: Scaling of FP8 linear layers: "unit" (constants, for a unit-scaled model) or "tensor" (a power of two for
            each tensor); None: no FP8 layers.
    """

    name: str
    summary: str
    weights: str = "fp32"
    norms: str = "fp32"
    operations: str | None = None
    matmuls: str | None = None
    update: Update = "plain"
    scaled: bool = False
    fp8: Literal["unit", "tensor"] | None = None

    @property
    def casts(self) -> bool:
        """True if the model's weights are narrower than FP32."""
        return self.weights != "fp32"

    @property
    def low(self) -> str | None:
        """16-bit format that operations run in, or None."""
        return self.operations or (self.weights if self.casts else None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return DTYPES[self.weights]


_CATALOGUE = (
    Level(name="fp32", summary="FP32 throughout; TF32 only where you have allowed it in torch yourself"),
    Level(name="tf32", matmuls="tf32", summary="FP32 weights; matrix products and convolutions in TF32"),
    Level(
        name="amp-fp16",
        operations="fp16",
        scaled=True,
        summary="FP32 weights; matrix products in FP16 by the operation lists; dynamic loss scaling",
    ),
    Level(name="amp-bf16", operations="bf16", summary="FP32 weights; matrix products in BF16 by the operation lists"),
    Level(
        name="fp16-master",
        weights="fp16",
        update="masters",
        scaled=True,
        summary="FP16 but for norms; FP32 masters; dynamic loss scaling",
    ),
    Level(
        name="fp16-pure",
        weights="fp16",
        norms="fp16",
        scaled=True,
        summary="FP16 throughout, optimizer state too; dynamic loss scaling: the measure of speed, seldom of quality",
    ),
    Level(
        name="bf16-master",
        weights="bf16",
        update="masters",
        summary="BF16 but for norms; FP32 masters kept as the missing 16 bits: 4 bytes for both",
    ),
    Level(
        name="bf16-stochastic",
        weights="bf16",
        update="stochastic",
        summary="BF16 but for norms; updates rounded at random",
    ),
    Level(name="bf16-kahan", weights="bf16", update="kahan", summary="BF16 but for norms; updates compensated (Kahan)"),
    Level(
        name="fp8-unit",
        operations="bf16",
        fp8="unit",
        summary="a unit-scaled model's linear layers in FP8 at constant scales; the rest as amp-bf16",
    ),
    Level(
        name="fp8-tensor",
        operations="bf16",
        fp8="tensor",
        summary="any model's linear layers in FP8, each tensor at its own scale; the rest as amp-bf16",
    ),
)
LEVELS = {level.name: level for level in _CATALOGUE}


def level_named(name: str) -> Level:
    """Return the level of a name or alias, in upper or lower case, but no bare format.

    >>> level_named("O2").name
    'fp16-master'
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key in ("fp16", "bf16", "fp8"):
        choices = ", ".join(level.name for level in _CATALOGUE if ("fp8" if level.fp8 else level.low) == key)
        raise ArgumentError(
            f"prepare: expected a level; got precision={name!r}, which can mean several. Choose one of {choices}."
        )
    if key not in LEVELS:
        near = nearest(key, LEVELS, 2)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Levels: {', '.join(LEVELS)}."
        raise ArgumentError(
            f"prepare: expected a level, a plan file (.toml) or a schedule of (step, level); got precision={name!r}. "
            f"{hint}"
        )
    return LEVELS[key]


def level_of_plan(plan: Plan) -> Level:
    """Return the level that a plan trains at.

    Weights are FP32, and each module's operations are in the plan's formats. The loss is scaled if the plan gives a
    loss scale, or if unscaled gradients pass through a format with a narrower range than FP32. A plan that asks for a
    loss scale and for gradient scales is an error.
    """
    plans = {
        rule: ModulePlan.of(fmt, plan.backward.get(rule), **plan.scales.get(rule, {}))
        for rule, fmt in plan.formats.items()
    }
    if plan.default is not None:
        plans["default"] = ModulePlan.of(plan.default)
    with_gradient_scale = {rule: p for rule, p in plans.items() if p.gradients is not None}
    cast_alone = next((rule for rule, p in with_gradient_scale.items() if not is_native(p)), None)
    layered = next((rule for rule, p in with_gradient_scale.items() if is_native(p)), None)
    needs = next((rule for rule, p in plans.items() if _needs_loss_scale(p)), None)
    scaled = plan.scale is not None or needs is not None or layered is not None
    if scaled and cast_alone is not None:
        why = f"{layered!r} has one per layer" if layered else "a loss scale"
        why = f"{needs!r} needs a loss scale" if needs else why
        raise ArgumentError(
            f"prepare: expected a plan whose gradients are scaled in one way; got a scale of the cast for "
            f"{cast_alone!r}, which is of true gradients, and {why}. Give the others a format with FP32's "
            "range, such as bf16."
        )
    return Level(name=f"plan ({plan.target})", scaled=scaled, summary="FP32 weights; operations by the plan")


def _needs_loss_scale(module_plan: ModulePlan) -> bool:
    """Return whether gradients are cast unscaled to a narrow range."""
    fmt = get(module_plan.backward)
    # Scales of blocks have the range of FP32.
    return isinstance(fmt, Format) and fmt.exponent_bits < FP32.exponent_bits and module_plan.gradients is None


def levels_table() -> Table:
    """Return the catalogue as a table for the terminal."""
    table = Table(title="Precision levels")
    for title in ("level", "weights", "norms", "operations", "update", "loss scale", "summary"):
        table.add_column(title)
    names = {level: alias.upper() for alias, level in ALIASES.items()}
    for level in _CATALOGUE:
        name = f"{level.name} ({names[level.name]})" if level.name in names else level.name
        operations = level.operations or level.matmuls or level.weights
        operations = f"fp8, {operations}" if level.fp8 else operations
        scale = "dynamic" if level.scaled else "none"
        table.add_row(name, level.weights, level.norms, operations, level.update, scale, level.summary)
    return table


# -- one level, a plan, or a schedule of them --------------------------------------------------------------------------

# A schedule is a list of (step, precision), the first at step 0. A precision is active from its optimizer step until
# the next pair's. Steps count as in `Loop.step_index`, skipped ones included.

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
