"""Requirements of block formats: the scales of blocks, their ends, and what blocks do to each other."""

import math

import numpy as np
import torch

from plimsoll.certification.blocks.inputs import ordinary_blocks
from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.probing.arrays import same, tensor_of
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.certification.registry import requirement
from plimsoll.certification.specifications import IEEE_754, NVFP4_RECIPE, OCP_MX, TENSORS
from plimsoll.certification.trial import Subject, Trial
from plimsoll.formats import BlockFormat

_CASTS = ("cast", "pack")


def _block(subject: Subject) -> bool:
    return isinstance(subject.fmt, BlockFormat)


def _tensor_scale(subject: Subject) -> bool:
    return isinstance(subject.fmt, BlockFormat) and subject.fmt.tensor_scale


@requirement(
    "scale",
    "A block's scale follows from its largest magnitude by the rule {scale_rule}.",
    kinds=_CASTS,
    sections={OCP_MX: "6.3", NVFP4_RECIPE: ""},
    applies=_block,
)
def scale(trial: Trial) -> Outcome:
    """Try largest magnitudes far from those at which a rule's choice changes."""
    return trial.blocks.compare_scales(trial.subject.held_to_scale_rule, "ordinary")


@requirement(
    "scale-edges",
    "The rule {scale_rule} is exact where its choice changes, as one step below a power of two.",
    kinds=_CASTS,
    sections={OCP_MX: "6.3", NVFP4_RECIPE: ""},
    applies=_block,
)
def scale_edges(trial: Trial) -> Outcome:
    """Try largest magnitudes at these places, and one step to either side of them."""
    return trial.blocks.compare_scales(trial.subject.held_to_scale_rule, "edge")


@requirement(
    "scale-range",
    "Blocks with a subnormal largest magnitude, or with a scale at the end of its range, have the values they should.",
    kinds=_CASTS,
    sections={OCP_MX: "5.4", NVFP4_RECIPE: ""},
    applies=_block,
)
def scale_range(trial: Trial) -> Outcome:
    """Try the smallest and largest magnitudes of the inputs' dtype."""
    return trial.blocks.values_in_range(trial.subject.held_to_scale_rule)


@requirement(
    "clamped",
    "An element beyond the largest one, at its block's scale, becomes the largest one.",
    kinds=_CASTS,
    sections={OCP_MX: "6.3", NVFP4_RECIPE: ""},
    applies=_block,
)
def clamped(trial: Trial) -> Outcome:
    """Look at the largest values of all blocks."""
    return trial.blocks.clamped()


@requirement(
    "tensor-scale",
    "The tensor's scale brings its largest magnitude to the largest element at the largest scale.",
    kinds=_CASTS,
    sections={NVFP4_RECIPE: ""},
    applies=_tensor_scale,
)
def tensor_scale(trial: Trial) -> Outcome:
    """Try tensors of several largest magnitudes, which must come back within FP32's rounding."""
    tried = (1.0, 0.375, 5.0, 1e-6, 3e4)
    for largest in tried:
        x = torch.full((SIDE, SIDE), largest, dtype=torch.float64).to(getattr(torch, trial.blocks.carrier))
        exact = float(x[0, 0])
        found = trial.blocks.convention.blocks(x).values
        if not np.allclose(found, exact, rtol=2.0**-7 if trial.blocks.carrier == "bfloat16" else 2.0**-20):
            note = f"{trial.blocks.carrier}, a tensor of this value alone"
            example = Counterexample(input=exact, expected=exact, got=float(found.flat[0]), note=note)
            return Outcome(tried=len(tried), wrong=1, counterexample=example)
    return Outcome(tried=len(tried))


@requirement(
    "zero-block",
    "A block of zeros stays a block of zeros.",
    kinds=_CASTS,
    sections={OCP_MX: "6.3", NVFP4_RECIPE: ""},
    applies=_block,
)
def zero_block(trial: Trial) -> Outcome:
    """Try a block of +0, one of -0, and a tensor of zeros alone."""
    fmt = trial.blocks.fmt
    rows = np.zeros((2, fmt.block))
    rows[1] = -0.0
    y = trial.blocks.read(rows, trial.blocks.carrier).values.reshape(-1, fmt.block)[:2]
    alone = trial.blocks.convention.blocks(tensor_of(np.zeros((SIDE, SIDE)), getattr(torch, trial.blocks.carrier)))
    bad = np.concatenate([y[y != 0], alone.values[alone.values != 0]])
    example = None
    if len(bad):
        of = "a block of zeros" if (y != 0).any() else "a tensor of zeros"
        example = Counterexample(input=of, expected=0.0, got=float(bad[0]), note=trial.blocks.carrier)
    return Outcome(tried=3, wrong=int(len(bad) > 0), counterexample=example)


@requirement(
    "nan-block",
    "A NaN is not replaced by a number: it becomes NaN, alone or with its whole block.",
    kinds=_CASTS,
    general=(IEEE_754, "6.2"),
    applies=_block,
    may_refuse=True,
)
def nan_block(trial: Trial) -> Outcome:
    """Try one NaN at the start, in the middle and at the end of a block."""
    fmt = trial.blocks.fmt
    places = (0, fmt.block // 2, fmt.block - 1)
    rows = ordinary_blocks(trial.blocks.fmt, len(places))
    rows[range(len(places)), places] = math.nan
    y = trial.blocks.read(rows, trial.blocks.carrier).values.reshape(-1, fmt.block)
    wrong = [place for row, place in enumerate(places) if not math.isnan(y[row, place])]
    example = None
    if wrong:
        row = places.index(wrong[0])
        example = Counterexample(
            input=math.nan, expected=math.nan, got=float(y[row, wrong[0]]),
            note=f"{trial.blocks.carrier}, at index {wrong[0]} of a block of ordinary values",
        )  # fmt: skip
    return Outcome(tried=len(places), wrong=len(wrong), counterexample=example)


@requirement(
    "own-block",
    "A block's result depends on its own values alone, whatever the blocks beside, above and below it have.",
    kinds=_CASTS,
    sections={OCP_MX: "5.1", NVFP4_RECIPE: ""},
    applies=_block,
)
def own_block(trial: Trial) -> Outcome:
    """Change one block after the other, to values 64 times as large, and compare all others."""
    fmt, columns = trial.blocks.fmt, SIDE // trial.blocks.fmt.block
    rows = ordinary_blocks(trial.blocks.fmt, 4 * columns)
    before = trial.blocks.read(rows, trial.blocks.carrier).values.reshape(-1, fmt.block)[: len(rows)]
    changed_places = (0, columns - 1, columns, 2 * columns + 1)
    for changed in changed_places:
        other = rows.copy()
        other[changed] *= 64.0
        after = trial.blocks.read(other, trial.blocks.carrier).values.reshape(-1, fmt.block)[: len(rows)]
        moved = np.argwhere(~same(after, before) & (np.arange(len(rows)) != changed)[:, None])
        if len(moved) and trial.subject.rounding != "stochastic":
            row, column = moved[0]
            example = Counterexample(
                input=float(rows[row, column]), expected=float(before[row, column]), got=float(after[row, column]),
                note=f"{trial.blocks.carrier}, in block {row}, {columns} a row, once block {changed} is larger",
            )  # fmt: skip
            return Outcome(tried=len(changed_places), wrong=1, counterexample=example)
    return Outcome(tried=len(changed_places))


@requirement(
    "ragged-block",
    "A row that ends within a block ends in a short block of its own values.",
    kinds=_CASTS,
    general=(TENSORS, "shapes"),
    applies=_block,
    may_refuse=True,
)
def ragged_block(trial: Trial) -> Outcome:
    """Try rows of other lengths, next to the same rows filled up with zeros."""
    fmt, convention = trial.blocks.fmt, trial.blocks.convention
    dtype = getattr(torch, trial.blocks.carrier)
    lengths = (1, fmt.block - 1, fmt.block + 1, 2 * fmt.block + fmt.block // 2)
    for length in lengths:
        filled = -(-length // fmt.block) * fmt.block
        # The second row's values are larger: a block that reads on into it takes its scale from there.
        values = np.linspace(0.125, 1.0, 3 * length).reshape(3, length) * np.array([[1.0], [100.0], [10.0]])
        x = torch.from_numpy(values).to(dtype)
        full = torch.zeros(3, filled, dtype=dtype)
        full[:, :length] = x
        expected = convention.blocks(full).values.reshape(3, filled)[:, :length]
        found = convention.blocks(x).values.reshape(3, length)
        wrong = np.argwhere(~same(found, expected))
        if len(wrong) and trial.subject.rounding != "stochastic":
            row, column = wrong[0]
            example = Counterexample(
                input=float(x[row, column]), expected=float(expected[row, column]), got=float(found[row, column]),
                note=f"{trial.blocks.carrier}, at index ({row}, {column}) of a tensor of shape (3, {length})",
            )  # fmt: skip
            return Outcome(tried=len(lengths), wrong=len(wrong), counterexample=example)
    return Outcome(tried=len(lengths))
