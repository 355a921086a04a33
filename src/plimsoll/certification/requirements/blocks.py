"""Requirements of block formats: scales, their ends, and effects between blocks."""

import math

import numpy as np
import torch

from plimsoll.certification.blocks import ordinary_blocks
from plimsoll.certification.certificate import IEEE_754, NVFP4_RECIPE, OCP_MX, TENSORS, Outcome
from plimsoll.certification.probing.arrays import compared, same, tensor_of
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.certification.registry import requirement
from plimsoll.certification.trial import Subject, Trial

_SCALE = {OCP_MX: "6.3", NVFP4_RECIPE: ""}


def _block(subject: Subject) -> bool:
    return subject.blocks is not None


@requirement(
    "scale",
    "A block's scale follows from its largest magnitude by the rule {scale_rule}.",
    sections=_SCALE,
    applies=_block,
)
def scale(trial: Trial) -> Outcome:
    """Try largest magnitudes far from those at which a rule's choice changes."""
    return trial.blocks.compare_scales(trial.subject.held_to_scale_rule, "ordinary")


@requirement(
    "scale-edges",
    "The rule {scale_rule} is exact where its choice changes, as one step below a power of two.",
    sections=_SCALE,
    applies=_block,
)
def scale_edges(trial: Trial) -> Outcome:
    """Try largest magnitudes at these places, and one step to either side of them."""
    return trial.blocks.compare_scales(trial.subject.held_to_scale_rule, "edge")


@requirement(
    "scale-range",
    "Blocks with a subnormal largest magnitude, or with a scale at the end of its range, have the values they should.",
    sections={OCP_MX: "5.4", NVFP4_RECIPE: ""},
    applies=_block,
)
def scale_range(trial: Trial) -> Outcome:
    """Try the smallest and largest magnitudes of the inputs' dtype."""
    return trial.blocks.values_in_range(trial.subject.held_to_scale_rule)


@requirement(
    "clamped",
    "An element beyond the largest one, at its block's scale, becomes the largest one.",
    sections=_SCALE,
    applies=_block,
)
def clamped(trial: Trial) -> Outcome:
    """Look at the largest values of all blocks."""
    return trial.blocks.clamped()


@requirement(
    "tensor-scale",
    "The tensor's scale brings its largest magnitude to the largest element at the largest scale.",
    sections={NVFP4_RECIPE: ""},
    applies=lambda subject: subject.blocks is not None and subject.blocks.tensor_scale,
)
def tensor_scale(trial: Trial) -> Outcome:
    """Try tensors of several largest magnitudes, which must come back within FP32's rounding."""
    outcome, tolerance = Outcome(tried=0), 2.0**-7 if trial.blocks.carrier == "bfloat16" else 2.0**-20
    for largest in (1.0, 0.375, 5.0, 1e-6, 3e4):
        x = torch.full((SIDE, SIDE), largest, dtype=torch.float64, device="cpu").to(
            getattr(torch, trial.blocks.carrier)
        )
        values, exact = trial.blocks.convention.sized(x).values, float(x[0, 0])
        note = f"{trial.blocks.carrier}, a tensor of this value alone"
        right = np.isclose(values, exact, rtol=tolerance)
        outcome += compared(values, np.full(values.shape, exact), lambda _, x=exact, n=note: (x, n), right=right)
    return outcome


@requirement("zero-block", "A block of zeros stays a block of zeros.", sections=_SCALE, applies=_block)
def zero_block(trial: Trial) -> Outcome:
    """Try a block of +0, one of -0, and a tensor of zeros alone."""
    carrier = trial.blocks.carrier
    mixed = trial.blocks.rows(np.array([[0.0], [-0.0]]).repeat(trial.blocks.fmt.block, axis=1))
    alone = trial.blocks.convention.sized(tensor_of(np.zeros((SIDE, SIDE)), getattr(torch, carrier))).values
    return sum(
        (compared(y, np.zeros(y.shape), lambda _, of=of: (f"a {of} of zeros", carrier), right=y == 0)
         for y, of in ((mixed, "block"), (alone, "tensor"))),
        Outcome(tried=0),
    )  # fmt: skip


@requirement(
    "nan-block",
    "A NaN is not replaced by a number: it becomes NaN, alone or with its whole block.",
    general=(IEEE_754, "6.2"),
    applies=_block,
    may_refuse=True,
)
def nan_block(trial: Trial) -> Outcome:
    """Try one NaN at the start, in the middle and at the end of a block."""
    block = trial.blocks.fmt.block
    places = np.array([0, block // 2, block - 1])
    rows = ordinary_blocks(trial.blocks.fmt, len(places))
    rows[np.arange(len(places)), places] = math.nan
    y = trial.blocks.rows(rows)[np.arange(len(places)), places]
    where = f"{trial.blocks.carrier}, at index"
    return compared(
        y, np.full(y.shape, math.nan), lambda at: (math.nan, f"{where} {places[at]} of a block of ordinary values")
    )


@requirement(
    "own-block",
    "A block's result depends on its own values alone, whatever its neighbours hold.",
    sections={OCP_MX: "5.1", NVFP4_RECIPE: ""},
    applies=_block,
)
def own_block(trial: Trial) -> Outcome:
    """Change one block after the other, to values 64 times as large, and compare all others."""
    columns = SIDE // trial.blocks.fmt.block
    rows = ordinary_blocks(trial.blocks.fmt, 4 * columns)
    before, outcome = trial.blocks.rows(rows), Outcome(tried=0)
    for changed in (0, columns - 1, columns, 2 * columns + 1):
        other = rows.copy()
        other[changed] *= 64.0
        after = trial.blocks.rows(other)
        right = same(after, before) | (trial.subject.rounding == "stochastic")
        right[changed] = True
        note = f"{trial.blocks.carrier}, in block {{}}, {columns} a row, once block {changed} is larger"
        outcome += compared(after, before, lambda at, n=note: (float(rows[at]), n.format(at[0])), right=right)
    return outcome


@requirement(
    "ragged-block",
    "A row that ends within a block ends in a short block of its own values.",
    general=(TENSORS, "shapes"),
    applies=_block,
    may_refuse=True,
)
def ragged_block(trial: Trial) -> Outcome:
    """Try rows of other lengths, next to the same rows filled up with zeros."""
    block, convention, outcome = trial.blocks.fmt.block, trial.blocks.convention, Outcome(tried=0)
    for length in (1, block - 1, block + 1, 2 * block + block // 2):
        filled = -(-length // block) * block
        # The second row's values are larger: a block that reads on into it takes its scale from there.
        values = np.linspace(0.125, 1.0, 3 * length).reshape(3, length) * np.array([[1.0], [100.0], [10.0]])
        x = torch.from_numpy(values).to(getattr(torch, trial.blocks.carrier))
        full = torch.zeros(3, filled, dtype=x.dtype, device=x.device)
        full[:, :length] = x
        expected = convention.sized(full).values.reshape(3, filled)[:, :length]
        rows = convention.sized(x).values.reshape(3, length)
        right = same(rows, expected) | (trial.subject.rounding == "stochastic")
        note = f"{trial.blocks.carrier}, at index {{}} of a tensor of shape (3, {length})"
        outcome += compared(rows, expected, lambda at, x=x, n=note: (float(x[at]), n.format(at)), right=right)
    return outcome
