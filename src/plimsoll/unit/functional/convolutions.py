"""Convolutions at unit scale."""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.arguments import check_floating
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import Constraint, Factors, root
from plimsoll.unit.functional.ideal_factors import resolve_factors
from plimsoll.unit.functional.pooling import Sizes, per_dimension
from plimsoll.unit.scaled_multiply import multiplied


def conv1d(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """Return `torch.nn.functional.conv1d` at unit scale.

    Arguments are torch's, then those of `linear`. The forward factor is fan_in^-1/2, with the channels of a group times
    the kernel's size. The factor of the input's gradient is fan_out^-1/2, likewise, times sqrt(stride). The gradients
    of weight and bias have positions^-1/2 under every constraint, with all output positions of the batch.

    Raises:
        ArgumentError: `constraint` or `factors` is not allowed.
        UnsupportedTensorError: A tensor is not floating point.
    """
    return _convolution("conv1d", F.conv1d, input, weight, bias, stride, padding, dilation, groups, constraint, factors)


def conv2d(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """Return `torch.nn.functional.conv2d` at unit scale.

    As `conv1d`, with both dimensions of kernel and stride.
    """
    return _convolution("conv2d", F.conv2d, input, weight, bias, stride, padding, dilation, groups, constraint, factors)


def conv_transpose2d(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    constraint: Constraint | None = "gmean",
    factors: Factors | None = None,
) -> Tensor:
    """Return `torch.nn.functional.conv_transpose2d` at unit scale.

    It is `conv2d` with its two directions exchanged. An output value sums over kernel / stride positions on average. If
    the stride does not divide the kernel's size, some values sum over more of them than others.
    """
    check_floating("conv_transpose2d", input=input, weight=weight, bias=bias)
    kernel, steps = math.prod(weight.shape[2:]), math.prod(_spread(stride, weight))
    fan_in, fan_out = weight.shape[0] // groups * kernel, weight.shape[1] * kernel
    ideal = Factors(output=root(fan_in / steps), inputs=(root(fan_out),))
    factors = resolve_factors("conv_transpose2d", constraint, factors, ideal)
    # Every input position meets the whole kernel. The bias is added at the output's positions.
    positions = _positions(input, _spatial(input, weight))
    settings = (stride, padding, output_padding, groups, dilation)
    return _convolved(F.conv_transpose2d, input, weight, bias, settings, factors, positions, positions * steps)


def _convolution(
    operation: str,
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
    constraint: Constraint | None,
    factors: Factors | None,
) -> Tensor:
    check_floating(operation, input=x, weight=weight, bias=bias)
    kernel = math.prod(weight.shape[2:])
    fan_in, fan_out = weight.shape[1] * kernel, weight.shape[0] // groups * kernel
    ideal = formulas.convolution(fan_in, fan_out, math.prod(_spread(stride, weight)))
    factors = resolve_factors(operation, constraint, factors, ideal)
    positions = _positions(x, _output_sizes(x, weight, stride, padding, dilation))
    settings = (stride, padding, dilation, groups)
    return _convolved(function, x, weight, bias, settings, factors, positions, positions)


# A value sums over the input channels of its group and the kernel, a gradient over the output channels and the kernel.
# Next to a padded border fewer terms are real, so values there are below unit scale. No factor corrects this: it would
# depend on the size of the picture.
def _convolved(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: tuple[object, ...],
    factors: Factors,
    weight_terms: int,
    bias_terms: int,
) -> Tensor:
    """Run a convolution between its factors, for so many terms of its gradients."""
    custom = factors.weight
    x = multiplied(x, 1.0, factors.inputs[0])
    weight = multiplied(weight, 1.0, (root(weight_terms) if custom is None else custom) / factors.moment)
    bias = None if bias is None else multiplied(bias, 1.0, root(bias_terms) if custom is None else custom)
    return multiplied(function(x, weight, bias, *settings), factors.output, 1.0)


def _output_sizes(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes | str, dilation: Sizes) -> list[int]:
    """Return the output's spatial sizes."""
    spatial = _spatial(x, weight)
    if padding == "same":
        return spatial
    steps, dilations = _spread(stride, weight), _spread(dilation, weight)
    pads = _spread(0 if isinstance(padding, str) else padding, weight)
    dimensions = zip(spatial, weight.shape[2:], steps, pads, dilations, strict=True)
    return [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in dimensions]


def _spatial(x: Tensor, weight: Tensor) -> list[int]:
    return list(x.shape[x.dim() - weight.dim() + 2 :])


def _positions(x: Tensor, sizes: list[int]) -> int:
    """Count the positions of a whole batch."""
    return math.prod(sizes) * (x.shape[0] if x.dim() == len(sizes) + 2 else 1)


def _spread(sizes: Sizes, weight: Tensor) -> tuple[int, ...]:
    return per_dimension(sizes, weight.dim() - 2)
