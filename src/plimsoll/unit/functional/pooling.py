"""Pooling at unit scale."""

import math

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit.arguments import check_floating
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import Constraint, Factors
from plimsoll.unit.functional.ideal_factors import apply_checked, largest

Sizes = int | tuple[int, ...]


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
    ideal = _average(kernel_size, stride, 1)
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
    ideal = _average(kernel_size, stride, 2)
    settings = (kernel_size, stride, padding, ceil_mode, count_include_pad)
    return apply_checked("avg_pool2d", F.avg_pool2d, ideal, constraint, *settings, input=input)


def adaptive_avg_pool2d(
    input: Tensor,  # noqa: A002  (torch's name)
    output_size: Sizes,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.adaptive_avg_pool2d` at unit scale.

    A window has the input's size over the output's. `output_size` must divide the input's size. Otherwise windows
    differ, and no factor fits all of them. Everything else is as in `avg_pool2d`.
    """
    # Before anything is read from the shape, which what is no tensor does not have.
    check_floating("adaptive_avg_pool2d", input=input)
    rows, columns = per_dimension(output_size, 2)
    height, width = input.shape[-2:]
    if height % rows or width % columns:
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
    ideal = _maximum(kernel_size, stride, 1)
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
    ideal = _maximum(kernel_size, stride, 2)
    settings = (kernel_size, stride, padding, dilation, ceil_mode)
    return apply_checked("max_pool2d", F.max_pool2d, ideal, constraint, *settings, input=input)


def _average(kernel: Sizes, stride: Sizes | None, dims: int) -> Factors:
    window, step = _areas(kernel, stride, dims)
    return formulas.average_pool(window, step)


def _maximum(kernel: Sizes, stride: Sizes | None, dims: int) -> Factors:
    window, step = _areas(kernel, stride, dims)
    return formulas.maximum_pool(largest(window), step)


def _areas(kernel: Sizes, stride: Sizes | None, dims: int) -> tuple[int, int]:
    """Return the number of values in a window, and in a step (default: a window)."""
    window = math.prod(per_dimension(kernel, dims))
    return window, window if stride is None else math.prod(per_dimension(stride, dims))


def per_dimension(sizes: Sizes, dims: int) -> tuple[int, ...]:
    """Return one size for each spatial dimension."""
    values = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return values * dims if len(values) == 1 else values
