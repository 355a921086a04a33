"""Factors by measurement, of operations that have no formula.

The operation (or a cluster of them) is run on tensors of independent normal values, in float64, of the example's
shapes, until 2^15 values of each have been seen (in at most 16 runs), with seeds of its own. Their means are those
that the operations before them leave; tensors that carry no gradient (masks, positions) are as in the example. Forward:
mean and standard deviation of all output values. Backward, from a gradient of independent normal values: the root of
the second moment of each input's gradient. The factors are 1 / those. What is not finite is left out, as rows that a
mask leaves empty are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_VALUES = 1 << 15
_RUNS = 16
_SEED = 0x5CA1E


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The output's mean and standard deviation, and the root second moments of the inputs' gradients."""

    mean: float
    std: float
    gradients: dict[str, float]

    @property
    def centre(self) -> float:
        """The mean against the standard deviation; 0 where it may be chance: below 4 standard errors of 2^15 values."""
        found = self.mean / self.std
        return found if abs(found) > 4 * _VALUES**-0.5 else 0.0


def measured(
    function: Callable[[Mapping[str, Tensor]], Any], shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float]
) -> Measured | None:
    """The scales of `function` on normal inputs of `shapes` and `means`; None where they are no positive numbers."""
    smallest = min((math.prod(shape) for shape in shapes.values()), default=0)
    if smallest == 0:
        return None
    runs = min(_RUNS, -(-_VALUES // smallest))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(_SEED)
        sums = [_one(function, shapes, means) for _ in range(runs)]
    kept = [one for one in sums if one is not None]
    return _scales(kept) if len(kept) == runs else None


def _one(
    function: Callable[[Mapping[str, Tensor]], Any], shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float]
) -> dict[str, tuple[float, ...]] | None:
    drawn = {name: torch.randn(shape, dtype=torch.float64) + means[name] for name, shape in shapes.items()}
    inputs = {name: x.requires_grad_() for name, x in drawn.items()}
    output = function(inputs)
    if not isinstance(output, Tensor) or not output.requires_grad:
        return None
    seed = torch.randn(output.shape, dtype=output.dtype)
    found = cast(
        "tuple[Tensor | None, ...]", torch.autograd.grad(output, list(inputs.values()), seed, allow_unused=True)
    )
    sums = {"": _sums(output.detach())}
    for name, gradient in zip(inputs, found, strict=True):
        if gradient is not None:
            sums[name] = _sums(gradient)
    return sums


def _sums(x: Tensor) -> tuple[float, ...]:
    kept = x[x.isfinite()].double()
    return float(kept.numel()), float(kept.sum()), float((kept * kept).sum())


def _scales(runs: list[dict[str, tuple[float, ...]]]) -> Measured | None:
    roots: dict[str, float] = {}
    std = mean = 0.0
    for name in runs[0]:
        n, total, squares = (math.fsum(run[name][i] for run in runs) for i in range(3))
        if n == 0 or not math.isfinite(squares) or squares <= 0:
            return None
        roots[name] = (squares / n) ** 0.5
        if not name:
            mean = total / n
            std = max(squares / n - mean**2, 0.0) ** 0.5
    if std < 1e-9 * roots.pop(""):
        return None
    return Measured(mean=mean, std=std, gradients=roots)
