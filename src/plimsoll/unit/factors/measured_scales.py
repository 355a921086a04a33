"""An operation's scales by measurement: what the formulas are held against, and what stands in where there is none.

The function runs on independent normal inputs, with an independent normal gradient behind it, several times. Each time
gives the mean square of every tensor; forward that about the mean over all runs. The values within one run share their
inputs and so are no independent samples, but the runs are: the variance of their mean squares, which is where the
fourth moment comes in, gives the standard error, whatever depends on what inside.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A scale, and the standard error of it."""

    value: float
    error: float

    @property
    def factor(self) -> float:
        """What makes the scale 1."""
        return 1 / self.value

    def off(self, expected: float = 1.0) -> float:
        """How far it is from what was expected, in standard errors."""
        return abs(self.value - expected) / self.error if self.error else math.inf * (self.value != expected) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Of the output, and of each input's gradient."""

    output: Scale
    inputs: tuple[Scale, ...]


def scales(
    function: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    *,
    runs: int = 24,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    inputs: Callable[[Sequence[int]], Tensor] | None = None,
) -> Scales:
    """The scales of `function` of tensors of `shapes`; torch's random generator is afterwards what it was.

    - `inputs`: makes an input of its shape; None: unit normal values. A scalar output has a gradient of 1.
    """
    outputs: list[Tensor] = []
    gradients: list[list[Tensor]] = [[] for _ in shapes]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in range(runs):
            given = [(inputs or _normal)(shape).to(dtype).requires_grad_() for shape in shapes]
            out = function(*given)
            behind = torch.randn_like(out) if out.dim() else torch.ones_like(out)
            found = torch.autograd.grad(out, given, behind)
            outputs.append(_sums(out))
            for kept, gradient in zip(gradients, found, strict=True):
                kept.append(_sums(gradient))
    return Scales(output=_scale(outputs, about_mean=True), inputs=tuple(_scale(each) for each in gradients))


def _normal(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape)


def _sums(x: Tensor) -> Tensor:
    """The means of the values and of their squares."""
    wide = x.detach().double()
    return torch.stack([wide.mean(), wide.square().mean()])


def _scale(sums: list[Tensor], *, about_mean: bool = False) -> Scale:
    means, squares = torch.stack(sums).unbind(1)
    if about_mean:
        mean = means.mean()
        squares = squares - 2 * mean * means + mean**2
    value = squares.mean().clamp(min=0).sqrt()
    # d sqrt(s) = ds / (2 sqrt(s)), and the mean of the runs has their deviation over the root of their number.
    error = squares.std() / math.sqrt(len(sums)) / (2 * value)
    return Scale(value=value.item(), error=error.item())
