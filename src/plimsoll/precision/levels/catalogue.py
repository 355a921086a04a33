"""The precision levels as data: what each does with weights, norms, operations, updates and the loss scale.

A level is a record, and `LEVELS` the catalogue; `prepare` carries a level out, and `levels_table` shows them all.
Apex's O0 to O3 are names of four of them.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

import torch
from rich.table import Table

from plimsoll.emulate.module_regions import is_native
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP32, Format, ModulePlan, Plan, get

Update = Literal["plain", "masters", "stochastic", "kahan"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ALIASES = {"o0": "fp32", "o1": "amp-fp16", "o2": "fp16-master", "o3": "fp16-pure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How a model is trained.

    - `weights`, `norms`: the formats that parameters are kept in, and those of normalisation layers.
    - `operations`: the format of autocast's low operations; None where operations run in their inputs' format.
    - `matmuls`: the format of matrix products of FP32 values, where it is not FP32.
    - `update`: how a step reaches 16-bit weights: through FP32 masters, stochastic rounding, Kahan compensation, or
      plainly.
    - `scaled`: whether the loss is scaled.
    - `fp8`: how linear layers that run in FP8 are scaled: by constants ("unit", of a unit-scaled model), or each tensor
      by its own power of two ("tensor"); None where none run in FP8.
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
        """Whether the model's own weights are narrower than FP32."""
        return self.weights != "fp32"

    @property
    def low(self) -> str | None:
        """The 16-bit format that operations run in; None where there is none."""
        return self.operations or (self.weights if self.casts else None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return DTYPES[self.weights]


_CATALOGUE = (
    Level(name="fp32", summary="FP32 throughout; TF32 only where you have allowed it in torch yourself"),
    Level(name="tf32", matmuls="tf32", summary="FP32 weights; matrix products and convolutions in TF32"),
    Level(
        name="amp-fp16", operations="fp16", scaled=True,
        summary="FP32 weights; matrix products in FP16 by the operation lists; dynamic loss scaling",
    ),
    Level(name="amp-bf16", operations="bf16", summary="FP32 weights; matrix products in BF16 by the operation lists"),
    Level(
        name="fp16-master", weights="fp16", update="masters", scaled=True,
        summary="FP16 but for norms; FP32 masters; dynamic loss scaling",
    ),
    Level(
        name="fp16-pure", weights="fp16", norms="fp16", scaled=True,
        summary="FP16 throughout, optimizer state too; dynamic loss scaling: the measure of speed, seldom of quality",
    ),
    Level(
        name="bf16-master", weights="bf16", update="masters",
        summary="BF16 but for norms; FP32 masters kept as the missing 16 bits: 4 bytes for both",
    ),
    Level(
        name="bf16-stochastic", weights="bf16", update="stochastic",
        summary="BF16 but for norms; updates rounded at random",
    ),
    Level(name="bf16-kahan", weights="bf16", update="kahan", summary="BF16 but for norms; updates compensated (Kahan)"),
    Level(
        name="fp8-unit", operations="bf16", fp8="unit",
        summary="a unit-scaled model's linear layers in FP8 at constant scales; the rest as amp-bf16",
    ),
    Level(
        name="fp8-tensor", operations="bf16", fp8="tensor",
        summary="any model's linear layers in FP8, each tensor at a scale of its own; the rest as amp-bf16",
    ),
)  # fmt: skip
LEVELS = {level.name: level for level in _CATALOGUE}


def level_named(name: str) -> Level:
    """The level of that name or alias, in any case.

    Raises `ArgumentError` for a bare format and a name that does not exist.

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
        near = difflib.get_close_matches(key, LEVELS, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Levels: {', '.join(LEVELS)}."
        raise ArgumentError(
            f"prepare: expected a level, a plan file (.toml) or a schedule of (step, level); got precision={name!r}. "
            f"{hint}"
        )
    return LEVELS[key]


def level_of_plan(plan: Plan) -> Level:
    """The level that a plan is carried out at: FP32 weights, each module's operations in the plan's formats.

    The loss is scaled if the plan says at which scale, or if gradients go through a format of narrower range than
    FP32's without a scale of their own. Raises `ArgumentError` for a plan that asks for both.
    """
    said = {
        rule: ModulePlan.of(fmt, plan.backward.get(rule), **plan.scales.get(rule, {}))
        for rule, fmt in plan.formats.items()
    }
    if plan.default is not None:
        said["default"] = ModulePlan.of(plan.default)
    cast_alone = next((rule for rule, one in said.items() if one.gradients is not None and not is_native(one)), None)
    needs = next((rule for rule, one in said.items() if _needs_loss_scale(one)), None)
    layered = next((rule for rule, one in said.items() if one.gradients is not None and is_native(one)), None)
    scaled = plan.scale is not None or needs is not None or layered is not None
    if scaled and cast_alone is not None:
        why = (
            f"{needs!r} needs a loss scale"
            if needs
            else f"{layered!r} has one per layer"
            if layered
            else "a loss scale"
        )
        raise ArgumentError(
            f"prepare: expected a plan whose gradients are scaled in one way; got a scale of the cast for "
            f"{cast_alone!r}, which is of true gradients, and {why}. Give the others a format with FP32's "
            "range, such as bf16."
        )
    return Level(name=f"plan ({plan.target})", scaled=scaled, summary="FP32 weights; operations as the plan says")


def _needs_loss_scale(said: ModulePlan) -> bool:
    """Whether gradients go through a narrow range as they are; blocks have scales that reach as far as FP32."""
    fmt = get(said.backward)
    return isinstance(fmt, Format) and fmt.exponent_bits < FP32.exponent_bits and said.gradients is None


def levels_table() -> Table:
    """The catalogue as a table for the terminal."""
    table = Table(title="Precision levels")
    for title in ("level", "weights", "norms", "operations", "update", "loss scale", "what it is"):
        table.add_column(title)
    names = {level: alias.upper() for alias, level in ALIASES.items()}
    for level in _CATALOGUE:
        name = f"{level.name} ({names[level.name]})" if level.name in names else level.name
        operations = level.operations or level.matmuls or level.weights
        operations = f"fp8, {operations}" if level.fp8 else operations
        scale = "dynamic" if level.scaled else "none"
        table.add_row(name, level.weights, level.norms, operations, level.update, scale, level.summary)
    return table
