"""Convolutions and pooling at unit scale."""

import math
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, cast

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.arguments import check_floating
from plimsoll.unit.formulas import Constraint, Factors, root
from plimsoll.unit.functional.ideal_factors import apply_checked, largest, resolve_factors
from plimsoll.unit.scaled_multiply import multiplied

# -- pooling -----------------------------------------------------------------------------------------------------------

Sizes = int | tuple[int, ...]
MaybeSizes = int | tuple[int | None, ...] | None


def avg_pool1d(
    input: Tensor,  # noqa: A002  (torch's name)
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.avg_pool1d` at unit scale.

    The factors for windows of k values are sqrt(k) forward and sqrt(k * stride) backward. Windows over a border count
    as full ones.

    Raises:
        ArgumentError: The constraint is unknown.
        UnsupportedTensorError: The tensor is not floating point.
    """
    ideal = _average("avg_pool1d", kernel_size, stride, 1)
    settings = (kernel_size, kernel_size if stride is None else stride, padding, ceil_mode, count_include_pad)
    return apply_checked("avg_pool1d", F.avg_pool1d, ideal, constraint, *settings, input=input)


def avg_pool2d(
    input: Tensor,  # noqa: A002  (torch's name)
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.avg_pool2d` at unit scale.

    As `avg_pool1d`, k being the area of the window. `divisor_override` must be None. A divisor is a factor, and the
    function has its own.
    """
    if divisor_override is not None:
        raise ArgumentError(
            f"avg_pool2d: expected no divisor_override, since the result is at unit scale whatever divides; got "
            f"{divisor_override}. Leave it out."
        )
    ideal = _average("avg_pool2d", kernel_size, stride, 2)
    settings = (kernel_size, stride, padding, ceil_mode, count_include_pad)
    return apply_checked("avg_pool2d", F.avg_pool2d, ideal, constraint, *settings, input=input)


def adaptive_avg_pool2d(
    input: Tensor,  # noqa: A002  (torch's name)
    output_size: MaybeSizes,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.adaptive_avg_pool2d` at unit scale.

    A window has the input's size over the output's. `output_size` must divide the input's size. Otherwise windows
    differ, and no factor fits all of them. None is the input's size. Everything else is as in `avg_pool2d`.
    """
    # Before anything is read from the shape, which what is no tensor does not have.
    check_floating("adaptive_avg_pool2d", input=input)
    height, width = input.size(-2), input.size(-1)
    sizes = per_dimension(output_size, 2)
    if len(sizes) != 2 or 0 not in sizes:  # which divides nothing
        _check_sizes("adaptive_avg_pool2d", 2, output_size=tuple(1 if size is None else size for size in sizes))
    rows, columns = (own if size is None else size for size, own in zip(sizes, (height, width), strict=True))
    if not rows or not columns or height % rows or width % columns:
        raise ArgumentError(
            f"adaptive_avg_pool2d: expected output_size to divide the input's {height} x {width}; got {rows} x "
            f"{columns}. Choose one that does, or pool with avg_pool2d."
        )
    window = (height // rows) * (width // columns)
    ideal = formulas.average_pool(window, window)
    return apply_checked("adaptive_avg_pool2d", F.adaptive_avg_pool2d, ideal, constraint, (rows, columns), input=input)


def max_pool1d(
    input: Tensor,  # noqa: A002  (torch's name)
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.max_pool1d` at unit scale.

    The factors are 1 / standard deviation of the largest of k values forward, and sqrt(stride) backward. The values
    keep the mean of a largest value, which is above zero. Windows over a border count as full ones.

    Raises:
        ArgumentError: The constraint is unknown.
        UnsupportedTensorError: The tensor is not floating point.
    """
    ideal = _maximum("max_pool1d", kernel_size, stride, 1)
    settings = (kernel_size, stride, padding, dilation, ceil_mode)
    return apply_checked("max_pool1d", F.max_pool1d, ideal, constraint, *settings, input=input)


def max_pool2d(
    input: Tensor,  # noqa: A002  (torch's name)
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.max_pool2d`, as `max_pool1d` for k an area."""
    ideal = _maximum("max_pool2d", kernel_size, stride, 2)
    settings = (kernel_size, stride, padding, dilation, ceil_mode)
    return apply_checked("max_pool2d", F.max_pool2d, ideal, constraint, *settings, input=input)


def _average(operation: str, kernel: Sizes, stride: Sizes | None, dims: int) -> Factors:
    return formulas.average_pool(*_areas(operation, kernel, stride, dims))


def _maximum(operation: str, kernel: Sizes, stride: Sizes | None, dims: int) -> Factors:
    window, step = _areas(operation, kernel, stride, dims)
    return formulas.maximum_pool(largest(window), step)


def _areas(operation: str, kernel: Sizes, stride: Sizes | None, dims: int) -> tuple[int, int]:
    """Return the number of values in a window, and in a step (default: a window)."""
    # As in torch, an empty stride is the window's.
    step = kernel if stride is None or stride in ((), []) else stride
    _check_sizes(operation, dims, kernel_size=kernel, stride=step)
    return math.prod(per_dimension(kernel, dims)), math.prod(per_dimension(step, dims))


def _check_sizes(operation: str, dims: int, **sizes: Any) -> None:
    """Raise an error unless these are whole numbers above zero, one or one for each dimension."""
    for name, value in sizes.items():
        each = per_dimension(value, dims)
        # A size may be a compiler's symbol.
        if len(each) != dims or any(isinstance(n, (str, bool, float, NoneType)) or not n > 0 for n in each):
            many = "a whole number" if dims == 1 else f"one or {dims} whole numbers"
            raise ArgumentError(
                f"{operation}: expected {name} to be {many} above 0; got {name}={value!r}. Use 2, for example."
            )


def per_dimension(sizes: Any, dims: int) -> tuple[Any, ...]:
    """Return one size for each spatial dimension."""
    # A number may be NumPy's.
    values: tuple[Any, ...] = tuple(cast("Iterable[Any]", sizes)) if isinstance(sizes, (tuple, list)) else (sizes,)
    return values * dims if len(values) == 1 else values


# -- convolutions ------------------------------------------------------------------------------------------------------


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
    return _convolution(1, F.conv1d, input, weight, bias, stride, padding, dilation, groups, constraint, factors)


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
    return _convolution(2, F.conv2d, input, weight, bias, stride, padding, dilation, groups, constraint, factors)


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
    _check_convolution("conv_transpose2d", 2, input, weight, bias, groups, stride=stride, dilation=dilation)
    kernel, steps = math.prod(weight.shape[2:]), math.prod(_spread(stride, weight))
    fan_in, fan_out = weight.shape[0] // groups * kernel, weight.shape[1] * kernel
    ideal = Factors(output=root(fan_in / steps), inputs=(root(fan_out),))
    factors = resolve_factors("conv_transpose2d", constraint, factors, ideal)
    # Every input position meets the whole kernel. The bias is added at the output's positions.
    positions = _positions(input, _spatial(input, weight))
    settings = (stride, padding, output_padding, groups, dilation)
    return _convolved(F.conv_transpose2d, input, weight, bias, settings, factors, positions, positions * steps)


def _convolution(
    dims: int,
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
    operation = f"conv{dims}d"
    _check_convolution(operation, dims, x, weight, bias, groups, stride=stride, dilation=dilation)
    if not isinstance(padding, str) and len(per_dimension(padding, dims)) != dims:
        raise ArgumentError(
            f"{operation}: expected padding to be one number or {dims}; got {padding!r}. Use 0 for none."
        )
    kernel = math.prod(weight.shape[2:])
    fan_in, fan_out = weight.shape[1] * kernel, weight.shape[0] // groups * kernel
    ideal = formulas.convolution(fan_in, fan_out, math.prod(_spread(stride, weight)))
    factors = resolve_factors(operation, constraint, factors, ideal)
    positions = _positions(x, _output_sizes(x, weight, stride, padding, dilation))
    settings = (stride, padding, dilation, groups)
    return _convolved(function, x, weight, bias, settings, factors, positions, positions)


def _check_convolution(
    operation: str, dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, **sizes: Sizes
) -> None:
    """Raise an error for what has no factors. Torch compares the channels."""
    check_floating(operation, input=x, weight=weight, bias=bias)
    _check_sizes(operation, dims, **sizes)
    _check_sizes(operation, 1, groups=groups)
    if x.dim() not in (dims + 1, dims + 2) or weight.dim() != dims + 2:
        raise ArgumentError(
            f"{operation}: expected an input of {dims + 1} or {dims + 2} dimensions, and a weight of {dims + 2}; got "
            f"shapes {tuple(x.shape)} and {tuple(weight.shape)}. Add dimensions with unsqueeze."
        )


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
