"""Convolutions at unit scale.

A value sums over its group's input channels and the kernel, a gradient over the output channels and the kernel. Next to
a border with padding fewer terms are real: there values are smaller than unit scale, and no factor says otherwise, as
one that did would follow the picture's size.
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.constraints import Constraint
from plimsoll.unit.factors.formulas import Factors, root
from plimsoll.unit.functional.ideal_factors import resolved
from plimsoll.unit.scaled_multiply import check_floating, multiplied

Sizes = int | tuple[int, ...]


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
    """`torch.nn.functional.conv1d` at unit scale; the arguments are torch's, then those of `linear`.

    Forward fan_in^-1/2, of a group's input channels times the kernel's size; the input's gradient likewise of the
    output channels, and times sqrt(stride); the gradients of weight and bias positions^-1/2, of a batch's output
    positions, whatever the constraint.

    Raises `ArgumentError`, and `UnsupportedTensorError` for tensors that are not floating point.
    """

    def plain(x: Tensor, w: Tensor, b: "Tensor | None") -> Tensor:
        return F.conv1d(x, w, b, stride, padding, dilation, groups)

    check_floating("conv1d", input=input, weight=weight, bias=bias)
    used = resolved("conv1d", constraint, factors, _ideal(weight, stride, groups))
    places = _count(input, _lengths(input, weight, stride, padding, dilation))
    return _convolved(plain, input, weight, bias, used, places, places)


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
    """`torch.nn.functional.conv2d` at unit scale: as `conv1d`, with both dimensions of kernel and stride."""

    def plain(x: Tensor, w: Tensor, b: "Tensor | None") -> Tensor:
        return F.conv2d(x, w, b, stride, padding, dilation, groups)

    check_floating("conv2d", input=input, weight=weight, bias=bias)
    used = resolved("conv2d", constraint, factors, _ideal(weight, stride, groups))
    places = _count(input, _lengths(input, weight, stride, padding, dilation))
    return _convolved(plain, input, weight, bias, used, places, places)


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
    """`torch.nn.functional.conv_transpose2d` at unit scale: `conv2d` with its two directions exchanged.

    An output value sums over kernel / stride positions on average: where the stride does not divide the kernel's size,
    some values sum over more of them than others.
    """

    def plain(x: Tensor, w: Tensor, b: "Tensor | None") -> Tensor:
        return F.conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)

    check_floating("conv_transpose2d", input=input, weight=weight, bias=bias)
    kernel, steps = math.prod(weight.shape[2:]), math.prod(_each(stride, weight))
    fan_in, fan_out = weight.shape[0] // groups * kernel, weight.shape[1] * kernel
    ideal = Factors(output=root(fan_in / steps), inputs=(root(fan_out),))
    used = resolved("conv_transpose2d", constraint, factors, ideal)
    # Every input position meets the whole kernel; the bias is added at the output's.
    places = _count(input, _spatial(input, weight))
    return _convolved(plain, input, weight, bias, used, places, places * steps)


def _ideal(weight: Tensor, stride: Sizes, groups: int) -> Factors:
    kernel = math.prod(weight.shape[2:])
    fan_in, fan_out = weight.shape[1] * kernel, weight.shape[0] // groups * kernel
    return formulas.convolution(fan_in, fan_out, math.prod(_each(stride, weight)))


def _convolved(
    plain: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None,
    factors: Factors, of_weight: int, of_bias: int,
) -> Tensor:  # fmt: skip
    """The convolution between its factors; the last two are how many terms the parameters' gradients sum over."""
    given = factors.weight
    x = multiplied(x, 1.0, factors.inputs[0])
    weight = multiplied(weight, 1.0, (root(of_weight) if given is None else given) / factors.moment)
    bias = None if bias is None else multiplied(bias, 1.0, root(of_bias) if given is None else given)
    return multiplied(plain(x, weight, bias), factors.output, 1.0)


def _lengths(x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes | str, dilation: Sizes) -> list[int]:
    """The output's spatial sizes."""
    spatial = _spatial(x, weight)
    if padding == "same":
        return spatial
    steps, dilations = _each(stride, weight), _each(dilation, weight)
    pads = _each(0 if isinstance(padding, str) else padding, weight)
    each = zip(spatial, weight.shape[2:], steps, pads, dilations, strict=True)
    return [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in each]


def _spatial(x: Tensor, weight: Tensor) -> list[int]:
    return list(x.shape[x.dim() - weight.dim() + 2 :])


def _count(x: Tensor, lengths: list[int]) -> int:
    """All positions of a batch."""
    return math.prod(lengths) * (x.shape[0] if x.dim() == len(lengths) + 2 else 1)


def _each(sizes: Sizes, weight: Tensor) -> tuple[int, ...]:
    """One for every spatial dimension."""
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * (weight.dim() - 2) if len(given) == 1 else given
