"""Scales and factors of an operation by measurement.

The operation runs on independent normal inputs, with an independent normal gradient, several times. Forward, its scale
is the standard deviation of all output values. Backward, it is the root of the second moment of each input's gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_VALUES = 1 << 15
_RUNS = 16
_SEED = 0x5CA1E


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A scale and its standard error."""

    value: float
    error: float

    @property
    def factor(self) -> float:
        """Return the factor that makes the scale 1."""
        return 1 / self.value

    def off(self, expected: float = 1.0) -> float:
        """Return the distance from the expected scale, in standard errors."""
        return abs(self.value - expected) / self.error if self.error else math.inf * (self.value != expected) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales of the output and of each input's gradient."""

    output: Scale
    inputs: tuple[Scale, ...]


def measure_scales(
    function: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    *,
    runs: int = 24,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    inputs: Callable[[Sequence[int]], Tensor] | None = None,
) -> Scales:
    """Return the scales of a function of tensors.

    Torch's random generator is restored afterwards.

    Args:
        function: Function of tensors. A scalar result gets a gradient of 1.
        shapes: Shapes of its inputs.
        runs: Number of runs. Default: 24.
        seed: Seed of the inputs. Default: 0.
        dtype: Dtype of the inputs. Default: float32.
        inputs: Makes an input from its shape. Default: unit normal values.
    """
    outputs: list[Tensor] = []
    gradients: list[list[Tensor]] = [[] for _ in shapes]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in range(runs):
            drawn = [(inputs or _normal)(shape).to(dtype).requires_grad_() for shape in shapes]
            out = function(*drawn)
            incoming = torch.randn_like(out) if out.dim() else torch.ones_like(out)
            outputs.append(_means(out))
            for runs_of_input, gradient in zip(gradients, torch.autograd.grad(out, drawn, incoming), strict=True):
                runs_of_input.append(_means(gradient))
    return Scales(output=_scale(outputs, about_mean=True), inputs=tuple(_scale(means) for means in gradients))


def _normal(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape)


def _means(x: Tensor) -> Tensor:
    """Return the means of the values and of their squares."""
    wide = x.detach().double()
    return torch.stack([wide.mean(), wide.square().mean()])


# `measure_scales` gives standard errors. The values within one run share their inputs and so are no independent
# samples, but the runs are. The variance of their mean squares, which contains the fourth moment, gives the standard
# error under any dependence inside.
def _scale(runs: list[Tensor], *, about_mean: bool = False) -> Scale:
    means, squares = torch.stack(runs).unbind(1)
    if about_mean:
        mean = means.mean()
        squares = squares - 2 * mean * means + mean**2
    value = squares.mean().clamp(min=0).sqrt()
    # d sqrt(s) = ds / (2 sqrt(s)), and the mean of n runs has their deviation over sqrt(n).
    error = squares.std() / math.sqrt(len(runs)) / (2 * value)
    return Scale(value=value.item(), error=error.item())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Mean and deviation of the output, root second moments of the gradients."""

    mean: float
    std: float
    gradients: dict[str, float]

    @property
    def centre(self) -> float:
        """Return the mean divided by the standard deviation, or 0 if it may be chance."""
        centre = self.mean / self.std
        # 4 standard errors of 2^15 values: chance exceeds them once in 16,000 measurements.
        return centre if abs(centre) > 4 * _VALUES**-0.5 else 0.0


# `measure_factors` is for the conversion. It runs in float64 on tensors of the example's shapes, until 2^15 values of
# each have been used, in at most 16 runs with fixed seeds. The means of the tensors are those that the operations
# before them leave. Tensors without gradients (masks, positions) are as in the example. Values that are not finite are
# left out, as for rows that a mask leaves empty.
def measure_factors(
    function: Callable[[Mapping[str, Tensor]], Any], shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float]
) -> Measured | None:
    """Return the scales of a function of normal inputs, or None if one is not > 0."""
    smallest = min((math.prod(shape) for shape in shapes.values()), default=0)
    if smallest == 0:
        return None
    runs = min(_RUNS, -(-_VALUES // smallest))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(_SEED)
        sums = [_run(function, shapes, means) for _ in range(runs)]
    complete = [run for run in sums if run is not None]
    return _pooled(complete) if len(complete) == runs else None


def _run(
    function: Callable[[Mapping[str, Tensor]], Any], shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float]
) -> dict[str, tuple[float, ...]] | None:
    drawn = {name: torch.randn(shape, dtype=torch.float64) + means[name] for name, shape in shapes.items()}
    inputs = {name: x.requires_grad_() for name, x in drawn.items()}
    output = function(inputs)
    if not isinstance(output, Tensor) or not output.requires_grad:
        return None
    seed = torch.randn(output.shape, dtype=output.dtype)
    gradients = cast(
        "tuple[Tensor | None, ...]", torch.autograd.grad(output, list(inputs.values()), seed, allow_unused=True)
    )
    sums = {"": _sums(output.detach())}
    for name, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:
            sums[name] = _sums(gradient)
    return sums


def _sums(x: Tensor) -> tuple[float, ...]:
    finite = x[x.isfinite()].double()
    return float(finite.numel()), float(finite.sum()), float((finite * finite).sum())


def _pooled(runs: list[dict[str, tuple[float, ...]]]) -> Measured | None:
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
