"""Requirements of casts as operations on tensors: shapes, strides, determinism, inputs that stay as they are."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.probing.arrays import CallFailedError, format_of_dtype, same
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.certification.registry import requirement
from plimsoll.certification.specifications import TENSORS
from plimsoll.certification.trial import Subject, Trial
from plimsoll.formats import BlockFormat, Format

_CASTS = ("cast", "pack")


def _element(subject: Subject) -> bool:
    return isinstance(subject.fmt, Format)


def _deterministic(subject: Subject) -> bool:
    return subject.rounding != "stochastic"


@requirement(
    "odd-shapes",
    "Tensors of any shape give the results that their values have in any other.",
    kinds=_CASTS,
    general=(TENSORS, "shapes"),
    may_refuse=True,
)
def odd_shapes(trial: Trial) -> Outcome:
    """Try small and odd shapes of one to three dimensions."""
    block = trial.subject.fmt.block if isinstance(trial.subject.fmt, BlockFormat) else 1
    shapes = [(1, block), (3, block), (3 * block,), (7, 5 * block), (2, 3, 2 * block), (1, 1, 129 * block)]
    shapes = shapes if block > 1 else [(1,), (3,), (1, 1), *shapes[2:], (257,), (2, 1, 3, 5)]
    return _same_as_in_rows(trial, [_ordinary(trial, shape) for shape in shapes])


@requirement(
    "scalar",
    "A tensor without dimensions gives one value.",
    kinds=_CASTS,
    general=(TENSORS, "shapes"),
    applies=_element,
    may_refuse=True,
)
def scalar(trial: Trial) -> Outcome:
    """Try one 0-d tensor."""
    return _same_as_in_rows(trial, [_ordinary(trial, ())])


@requirement("empty", "A tensor without values gives one without values.", kinds=_CASTS, general=(TENSORS, "shapes"))
def empty(trial: Trial) -> Outcome:
    """Try empty tensors of one and two dimensions."""
    block = trial.subject.fmt.block if isinstance(trial.subject.fmt, BlockFormat) else 1
    shapes = [(0, 4 * block)] if block > 1 else [(0,), (0, 4), (4, 0)]
    return _same_as_in_rows(trial, [_ordinary(trial, shape) for shape in shapes])


@requirement(
    "strides",
    "A tensor gives the results of its contiguous copy, whatever its strides and offset.",
    kinds=_CASTS,
    general=(TENSORS, "strides"),
    may_refuse=True,
)
def strides(trial: Trial) -> Outcome:
    """Try offset, stepped, transposed, expanded and permuted tensors, small ones first."""
    block = trial.subject.fmt.block if isinstance(trial.subject.fmt, BlockFormat) else 4
    made = [make(lambda *shape: _ordinary(trial, shape), block) for make in _LAYOUTS]
    return _compared(trial, made, [tensor.clone(memory_format=torch.contiguous_format) for tensor in made])


@requirement("result-shape", "The result has the shape of the input.", kinds=("cast",), general=(TENSORS, "shapes"))
def result_shape(trial: Trial) -> Outcome:
    """Look at the result for a matrix."""
    x = _ordinary(trial, (8, SIDE))
    found = trial.convention(x).values.shape
    if found == tuple(x.shape):
        return Outcome(tried=1)
    example = Counterexample(input=f"a tensor of shape {tuple(x.shape)}", expected=f"shape {tuple(x.shape)}",
                             got=f"shape {found}", note=_carrier(trial))  # fmt: skip
    return Outcome(tried=1, wrong=1, counterexample=example)


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
        if batch.dtype == batch.carrier or (is_number if fmt is None else _holds(fmt, trial.subject)):
            continue
        wanted = f"{batch.carrier}, or one that holds {trial.subject.fmt.name}"
        example = Counterexample(input=f"a tensor of {batch.carrier}", expected=wanted, got=batch.dtype)
        return Outcome(tried=len(batches), wrong=1, counterexample=example)
    return Outcome(tried=len(batches))


@requirement(
    "deterministic",
    "Two calls with the same input give the same result.",
    kinds=_CASTS,
    general=(TENSORS, "determinism"),
    applies=_deterministic,
)
def deterministic(trial: Trial) -> Outcome:
    """Call twice."""
    x = _ordinary(trial, (8, SIDE))
    first, second = (trial.convention(x.clone()).values for _ in range(2))
    moved = np.flatnonzero(~same(first, second).reshape(-1))
    if not len(moved):
        return Outcome(tried=x.numel())
    place = int(moved[0])
    example = Counterexample(
        input=float(x.view(-1)[place]), expected=float(first.flat[place]), got=float(second.flat[place]),
        note=f"{_carrier(trial)}, in a second call",
    )  # fmt: skip
    return Outcome(tried=x.numel(), wrong=len(moved), counterexample=example)


@requirement(
    "input-unchanged",
    "The input holds the same bytes after the call.",
    kinds=("cast", "pack", "unpack", "matmul", "sum"),
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


def _same_as_in_rows(trial: Trial, tensors: list[Tensor]) -> Outcome:
    """Compare results with those of the same values in full rows, which every implementation is made for."""
    rows: list[Tensor] = []
    for tensor in tensors:
        count = max(1, -(-tensor.numel() // SIDE))
        full = torch.ones(count * SIDE, dtype=tensor.dtype)
        full[: tensor.numel()] = tensor.reshape(-1)
        rows.append(full.reshape(count, SIDE))
    return _compared(trial, tensors, rows)


def _compared(trial: Trial, tensors: list[Tensor], references: list[Tensor]) -> Outcome:
    """Compare the result for each tensor with that for the same values in its reference.

    A wrong result counts for more than a refusal, wherever it comes.
    """
    refused: Counterexample | None = None
    for tensor, reference in zip(tensors, references, strict=True):
        what = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}"
        what = f"{_carrier(trial)}, {what}"
        try:
            example = _difference(trial, tensor, reference, what)
        except CallFailedError as error:
            refused = refused or Counterexample(input="a tensor", expected="a result", got=str(error), note=what)
            continue
        if example is not None:
            return Outcome(tried=len(tensors), wrong=1, counterexample=example)
    if refused is None:
        return Outcome(tried=len(tensors))
    return Outcome(tried=len(tensors), wrong=1, counterexample=refused, refused=f"{refused.note}: {refused.got}")


def _difference(trial: Trial, tensor: Tensor, reference: Tensor, what: str) -> Counterexample | None:
    shape = tuple(tensor.shape)
    found = trial.convention(tensor).values
    if found.shape != shape:
        return Counterexample(input="a tensor", expected=f"shape {shape}", got=f"shape {found.shape}", note=what)
    if trial.subject.rounding == "stochastic" or not tensor.numel():
        return None
    expected = trial.convention(reference).values.reshape(-1)[: tensor.numel()].reshape(shape)
    wrong = np.argwhere(~same(found, expected))
    if not len(wrong):
        return None
    place = tuple(int(index) for index in wrong[0])
    return Counterexample(
        input=float(tensor[place]),
        expected=float(expected[place]),
        got=float(found[place]),
        note=f"{what}, at index {place}",
    )


def _ordinary(trial: Trial, shape: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor of different values of both signs, in whole steps of 1/16 up to 4."""
    count = int(np.prod(shape, dtype=np.int64))
    values = (np.arange(count) * 37 % 64 + 1) / 16.0 * np.where(np.arange(count) % 3 == 1, -1.0, 1.0)
    return torch.from_numpy(values.reshape(shape)).to(getattr(torch, _carrier(trial)))


def _carrier(trial: Trial) -> str:
    return trial.convention.carrier


def _holds(fmt: Format, subject: Subject) -> bool:
    """Whether every value of the subject's format is one of `fmt`."""
    held = subject.element
    return (
        fmt.mantissa_bits >= held.mantissa_bits
        and fmt.max >= held.max
        and fmt.smallest_subnormal <= held.smallest_subnormal
    )
