"""Requirements of casts of tensors: shapes, strides, determinism, same inputs."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from plimsoll.certification.certificate import KINDS, TENSORS, Outcome
from plimsoll.certification.probing.arrays import attempted, compared, deviation, format_of_dtype
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.certification.registry import requirement
from plimsoll.certification.trial import Trial
from plimsoll.formats import Format


@requirement(
    "odd-shapes",
    "Tensors of any shape give the results that their values have in any other.",
    general=(TENSORS, "shapes"),
    may_refuse=True,
)
def odd_shapes(trial: Trial) -> Outcome:
    """Try small and odd shapes of one to three dimensions."""
    block = _block(trial)
    shapes = [(1, block), (3, block), (3 * block,), (7, 5 * block), (2, 3, 2 * block), (1, 1, 129 * block)]
    return _in_rows(trial, shapes if block > 1 else [(1,), (3,), (1, 1), *shapes[2:], (257,), (2, 1, 3, 5)])


@requirement(
    "scalar",
    "A tensor without dimensions gives one value.",
    general=(TENSORS, "shapes"),
    applies=lambda subject: subject.blocks is None,
    may_refuse=True,
)
def scalar(trial: Trial) -> Outcome:
    """Try one 0-d tensor."""
    return _in_rows(trial, [()])


@requirement("empty", "A tensor without values gives one without values.", general=(TENSORS, "shapes"))
def empty(trial: Trial) -> Outcome:
    """Try empty tensors of one and two dimensions."""
    return _in_rows(trial, [(0, 4 * _block(trial))] if _block(trial) > 1 else [(0,), (0, 4), (4, 0)])


@requirement(
    "strides",
    "A tensor gives the results of its contiguous copy, whatever its strides and offset.",
    general=(TENSORS, "strides"),
    may_refuse=True,
)
def strides(trial: Trial) -> Outcome:
    """Try offset, stepped, transposed, expanded and permuted tensors, small ones first."""
    block = _block(trial) if _block(trial) > 1 else 4
    made = [make(lambda *shape: _ordinary(trial, shape), block) for make in _LAYOUTS]
    return _same_as(trial, made, [tensor.clone(memory_format=torch.contiguous_format) for tensor in made])


@requirement("result-shape", "The result has the shape of the input.", kinds=("cast",), general=(TENSORS, "shapes"))
def result_shape(trial: Trial) -> Outcome:
    """Look at the result for a matrix."""
    shape = (trial.convention.rows, SIDE)
    shape_of_result = trial.convention(_ordinary(trial, shape)).values.shape
    if shape_of_result == shape:
        return Outcome(tried=1)
    return deviation(
        f"a tensor of shape {shape}", f"shape {shape}", f"shape {shape_of_result}", trial.convention.carrier
    )


@requirement(
    "result-dtype",
    "The result's dtype is the input's, or a floating one that holds every value of the format.",
    kinds=("cast",),
    general=(TENSORS, "dtypes"),
)
def result_dtype(trial: Trial) -> Outcome:
    """Look at the results for each dtype of inputs."""
    batches = trial.observed.batches
    for batch in batches:
        fmt = format_of_dtype(batch.dtype)
        is_number = not batch.dtype.startswith(("int", "uint", "bool"))  # of a float that is not known nothing is said
        if batch.dtype != batch.carrier and not (is_number if fmt is None else _holds(fmt, trial.subject.element)):
            wanted = f"{batch.carrier}, or one that holds {trial.subject.fmt.name}"
            return deviation(f"a tensor of {batch.carrier}", wanted, batch.dtype, tried=len(batches))
    return Outcome(tried=len(batches))


@requirement(
    "deterministic",
    "Two calls with the same input give the same result.",
    general=(TENSORS, "determinism"),
    applies=lambda subject: subject.rounding != "stochastic",
)
def deterministic(trial: Trial) -> Outcome:
    """Call twice."""
    x = _ordinary(trial, (trial.convention.rows, SIDE))
    first, second = (trial.convention(x.clone()).values.reshape(x.shape) for _ in range(2))
    return compared(second, first, lambda at: (float(x[at]), f"{trial.convention.carrier}, in a second call"))


@requirement(
    "input-unchanged",
    "The input holds the same bytes after the call.",
    kinds=KINDS,
    general=(TENSORS, "no side effects"),
)
def input_unchanged(trial: Trial) -> Outcome:
    """Compare the memory of every input before and after every call so far."""
    changed = trial.caller.changed
    return Outcome(tried=trial.caller.calls, wrong=int(changed is not None), counterexample=changed)


# Each makes a tensor of unusual strides from a maker of contiguous ones, with a last dimension of whole blocks.
_LAYOUTS: tuple[Callable[[Callable[..., Tensor], int], Tensor], ...] = (
    lambda make, block: make(3, block)[1:2],
    lambda make, block: make(2, 2 * block)[:, block:],
    lambda make, block: make(4, block)[::2],
    lambda make, block: make(1, block).expand(3, block),
    lambda make, block: make(block, 2).t(),
    lambda make, block: make(2, block, 2)[:, :, 0],
    lambda make, block: make(2 * block, SIDE).t(),
    lambda make, block: make(2, block, 3).permute(2, 0, 1),
)


def _block(trial: Trial) -> int:
    return 1 if trial.subject.blocks is None else trial.subject.blocks.block


def _in_rows(trial: Trial, shapes: list[tuple[int, ...]]) -> Outcome:
    """Compare results with those of the same values in full rows."""
    tensors = [_ordinary(trial, shape) for shape in shapes]
    rows: list[Tensor] = []
    for tensor in tensors:
        count = max(1, -(-tensor.numel() // SIDE))
        full = torch.ones(count * SIDE, dtype=tensor.dtype, device=tensor.device)
        full[: tensor.numel()] = tensor.reshape(-1)
        rows.append(full.reshape(count, SIDE))
    return _same_as(trial, tensors, rows)


def _same_as(trial: Trial, tensors: list[Tensor], references: list[Tensor]) -> Outcome:
    """Compare each tensor's result with that of the same values in its reference."""
    outcome = Outcome(tried=0)
    for tensor, reference in zip(tensors, references, strict=True):
        layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}"
        what = f"{trial.convention.carrier}, {layout}"
        outcome += attempted(what, lambda x=tensor, y=reference, what=what: _difference(trial, x, y, what))
    return outcome


def _difference(trial: Trial, tensor: Tensor, reference: Tensor, what: str) -> Outcome:
    shape = tuple(tensor.shape)
    result = trial.convention(tensor).values
    if result.shape != shape:
        return deviation("a tensor", f"shape {shape}", f"shape {result.shape}", what)
    if trial.subject.rounding == "stochastic" or not tensor.numel():
        return Outcome(tried=1)
    expected = trial.convention(reference).values.reshape(-1)[: tensor.numel()].reshape(shape)
    outcome = compared(result, expected, lambda at: (float(tensor[at]), f"{what}, at index {at}"))
    return Outcome(tried=1, wrong=int(outcome.wrong > 0), counterexample=outcome.counterexample)


def _ordinary(trial: Trial, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor of values of both signs, in steps of 1/16 up to 4."""
    count = int(np.prod(shape, dtype=np.int64))
    values = (np.arange(count) * 37 % 64 + 1) / 16.0 * np.where(np.arange(count) % 3 == 1, -1.0, 1.0)
    return torch.from_numpy(values.reshape(shape)).to(getattr(torch, trial.convention.carrier))


def _holds(fmt: Format, held: Format) -> bool:
    """Return whether every value of one format is one of another."""
    precise = fmt.mantissa_bits >= held.mantissa_bits and fmt.smallest_subnormal <= held.smallest_subnormal
    return precise and fmt.max >= held.max
