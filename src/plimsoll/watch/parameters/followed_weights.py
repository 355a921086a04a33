"""A few 16-bit weights followed over steps, which show if updates that rounding loses come back later.

Gradients predict how far weights go: the weights that are fine enough to follow every update give the size. Where the
updates of a weight are too small for it, a compensated one goes as far all the same, a few steps later. Rounding to
nearest leaves it where it was, and a compensation that is wrong leads it elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT

# Weights go where the gradients say, or there on the mean, or elsewhere, or are too short or too far on the mean too.
OVER_STEPS, ON_AVERAGE = "lossless over steps", "lossless on average"
INEXACT, BIASED = "inexact", "biased"
LOSSLESS = (OVER_STEPS, ON_AVERAGE)
_TENSORS, _SMALLEST, _SPREAD = 8, 128, 384  # followed matrices, and of each the smallest values and some of all sizes
_AMONG = 1 << 16  # the first values of a tensor, which those are taken from
_WINDOW, _JUDGED = 64, (16, 32, 64)  # steps of a window, and after how many of them it is judged
_FIRST, _TIMES = 256, 4  # the second window begins at this step of the optimizer, the next ones at 4 times the last
_FEWEST_FINE, _FEWEST_COARSE = 8, 32
_FIT = 0.9  # correlation of the fine weights with what is predicted; without it nothing is known
_COARSE = 2.5  # times the largest update a weight's rounding is too coarse for all: half of it would lose them
# Differences from the prediction, relative to it. Measured over 16 to 64 steps of 4 kinds of updates, each with 4
# seeds, in batches of 32 and of all samples: compensated 0.04 to 0.26, rounded to nearest 0.95 to 1, compensated with
# the wrong sign 0.74 to 1.4. Rounded by chance it is 0.22 to 0.62, and the mean is right.
_SAME, _OTHER = 0.3, 0.7
_BIAS, _DEVIATIONS = 0.2, 4  # the mean is not right if it is off by so much, and by so many standard deviations
_SURE = 0.125  # the standard deviation of a mean that is right: nearest rounding's, off by 1, is 8 of them away

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over a window's steps, by value, in one row each.

    The rows are the first and the last value, the sum of the gradients and of their squares, the largest of them, the
    path, and the number of moves.
    """

    parts: list[tuple[torch.dtype, int]]  # dtype and number of values of each weight
    steps: int
    rows: DeviceValue


class FollowedWeights:
    """Weights of one optimizer, followed over its first steps and over windows of steps later."""

    def __init__(self) -> None:
        self.way: str | None = None  # as far as it is known
        self._steps, self._next = 0, 0
        self._window: _Window | None = None

    def after_step(self, params: Mapping[str, Tensor]) -> "Sums | None":
        """Follow the weights, and return what `way_of` is to judge if it is time.

        Args:
            params: The optimizer's weights after its step, with the gradients of the step.
        """
        self._steps += 1
        if self.way in LOSSLESS or self._steps <= self._next:
            return None
        if self._window is None:
            self._window = _Window(params)
            return None
        window = self._window
        goes_on = window.add(params)
        if not goes_on or window.steps >= _WINDOW:
            self._window, self._next = None, max(_FIRST, _TIMES * self._next)
        return window.sums() if goes_on and window.steps in _JUDGED else None


def way_of(sums: Sums) -> str | None:
    """Return how weights that are too coarse for each update come along with many.

    `OVER_STEPS`, `ON_AVERAGE`, `INEXACT` or `BIASED`; None if too few values show it. Waits for the device.
    """
    rows = sums.rows.tensor().double().numpy()
    ends = np.cumsum([count for _, count in sums.parts])[:-1]
    parts = zip(sums.parts, np.split(rows, ends, axis=1), strict=True)
    coarse = [_coarse(dtype, sums.steps, part) for (dtype, _), part in parts]
    moved, predicted = (np.concatenate(values) for values in zip(*coarse, strict=True))
    if len(moved) < _FEWEST_COARSE:
        return None
    size, difference = np.abs(predicted).sum(), np.abs(moved - predicted).sum()
    if difference <= _SAME * size:
        return OVER_STEPS
    bias = abs((moved * np.sign(predicted)).sum() / size - 1)
    deviation = np.sqrt(((moved - predicted) ** 2).sum()) / size
    if difference < _OTHER * size:
        return ON_AVERAGE if bias < _BIAS and deviation <= _SURE else None
    return BIASED if bias >= max(_BIAS, _DEVIATIONS * deviation) else INEXACT


class _Window:
    """Sums over steps of a few values of each weight."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        flat = {name: pair for name, p in params.items() if p.ndim > 1 and (pair := _flat(p)) is not None}
        names = [name for name, (weights, _) in flat.items() if weights.device == next(iter(flat.values()))[0].device]
        self._places = {name: _places(flat[name][0]) for name in names[:: -(-len(names) // _TENSORS) or 1]}
        self._lengths = [len(flat[name][0]) for name in self._places]
        self._parts = [(params[name].dtype, len(places)) for name, places in self._places.items()]
        self.steps = 0
        self._rows = torch.empty(0)
        if self._places:
            first = torch.cat([flat[name][0][places].float() for name, places in self._places.items()])
            self._rows = torch.stack([first, first, *torch.zeros(5, len(first), device=first.device)])

    def add(self, params: Mapping[str, Tensor]) -> bool:
        """Add a step; return False if the weights cannot be followed any more."""
        flat = [(_flat(params[name]) if name in params else None) for name in self._places]
        pairs = [pair for pair in flat if pair is not None and pair[0].device == self._rows.device]
        if not pairs or [len(weights) for weights, _ in pairs] != self._lengths:  # gone, or sharded otherwise
            return False
        places = self._places.values()
        weights, gradients = (
            torch.cat([pair[which][where] for pair, where in zip(pairs, places, strict=True)]).float()
            for which in (0, 1)
        )
        _, last, total, squares, largest, path, moves = self._rows
        change = (weights - last).abs()
        last.copy_(weights)
        total += gradients
        squares.addcmul_(gradients, gradients)
        torch.maximum(largest, gradients.abs(), out=largest)
        path += change
        moves += change > 0
        self.steps += 1
        return True

    def sums(self) -> Sums:
        """The sums of each weight, to be read later."""
        return Sums(self._parts, self.steps, DeviceValue(self._rows))


def _places(weights: Tensor) -> Tensor:
    """Return the places of the smallest values, which follow every update, and of some of all sizes."""
    size = weights.abs().float()
    smallest = torch.where(size > 0, size, torch.inf).topk(min(_SMALLEST, len(size)), largest=False).indices
    return torch.cat([smallest, torch.arange(0, len(size), -(-len(size) // _SPREAD), device=size.device)])


def _flat(p: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first values of a 16-bit weight and of its gradient; None of what is not plain."""
    g = p.grad
    if p.dtype not in SIXTEEN_BIT or g is None or type(p.data) is not Tensor or type(g) is not Tensor:
        return None
    if g.layout != torch.strided or not (p.is_contiguous() and g.is_contiguous()):
        return None
    if not 0 < p.numel() == g.numel() or p.untyped_storage().nbytes() < p.numel() * p.element_size():
        return None
    return p.detach().view(-1)[:_AMONG], g.detach().view(-1)[:_AMONG]


def _coarse(dtype: torch.dtype, steps: int, rows: _Floats) -> tuple[_Floats, _Floats]:
    """Return how far the weights went that are too coarse for their updates, and how far the gradients say."""
    first, last, total, squares, largest, path, moves = rows
    moved = last - first
    with np.errstate(all="ignore"):
        exponent = np.frexp(np.maximum(np.abs(first), np.abs(last)))[1] - 1 - FORMATS[dtype].mantissa_bits
        rounding = np.ldexp(1.0, np.maximum(exponent, FORMATS[dtype].quantum_exponent))
        fine = (moves >= 0.75 * steps) & (path >= 2 * rounding * steps) & (first != 0)
        if fine.sum() < _FEWEST_FINE:
            return moved[:0], moved[:0]
        best, predicted, bound = 0.0, moved, moved
        for scale in (np.ones_like(total), np.sqrt(squares / steps)):  # as SGD takes gradients, and as Adam does
            to, most = -total / scale, largest / scale
            along = (moved * to)[fine].sum()
            fit = along / np.sqrt((moved**2)[fine].sum() * (to**2)[fine].sum())
            if fit > best:
                rate = along / (to**2)[fine].sum()
                best, predicted, bound = fit, rate * to, rate * most
        if best < _FIT:
            return moved[:0], moved[:0]
        coarse = (rounding >= _COARSE * bound) & (np.abs(predicted) >= rounding)
    return moved[coarse] / rounding[coarse], predicted[coarse] / rounding[coarse]
