"""Pooling at unit scale."""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.functional.ideal_factors import carried_out
from plimsoll.unit.functional.input_multiplier import largest
from plimsoll.unit.scaled_multiply import check_floating

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
    """`torch.nn.functional.avg_pool1d` at unit scale: of windows of k, sqrt(k) forward, sqrt(k * stride) backward.

    Windows over a border count as full ones.

    Raises `ArgumentError`, and `UnsupportedTensorError` for a tensor that is not floating point.
    """
    step = kernel_size if stride is None else stride
    return _applied(
        "avg_pool1d",
        lambda x: F.avg_pool1d(x, kernel_size, step, padding, ceil_mode, count_include_pad),
        input,
        _average(kernel_size, stride, 1),
        constraint,
    )


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
    """`torch.nn.functional.avg_pool2d` at unit scale: as `avg_pool1d`, k being the window's area.

    `divisor_override` is refused: a divisor is a factor, and that is what the function gives.
    """
    if divisor_override is not None:
        raise ArgumentError(
            f"avg_pool2d: expected no divisor_override, since the result is at unit scale whatever divides; got "
            f"{divisor_override}. Leave it out."
        )
    return _applied(
        "avg_pool2d",
        lambda x: F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad),
        input,
        _average(kernel_size, stride, 2),
        constraint,
    )


def adaptive_avg_pool2d(
    input: Tensor,  # noqa: A002  (torch's name)
    output_size: Sizes,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """`torch.nn.functional.adaptive_avg_pool2d` at unit scale: windows of input size over output size, side by side.

    The output's size must divide the input's: else windows differ, and no factor suits all. Otherwise as `avg_pool2d`.
    """
    check_floating("adaptive_avg_pool2d", input=input)
    rows, columns = _each(output_size, 2)
    height, width = input.shape[-2:]
    if height % rows or width % columns:
        raise ArgumentError(
            f"adaptive_avg_pool2d: expected output_size to divide the input's {height} x {width}; got {rows} x "
            f"{columns}. Choose one that does, or pool with avg_pool2d."
        )
    window = (height // rows) * (width // columns)
    return _applied(
        "adaptive_avg_pool2d",
        lambda x: F.adaptive_avg_pool2d(x, (rows, columns)),
        input,
        formulas.average_pool(window, window),
        constraint,
    )


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
    """`torch.nn.functional.max_pool1d` at unit scale: 1 / deviation of the largest of k, and sqrt(stride) backward.

    The values keep the mean that a largest one has, above zero. Windows over a border count as full ones.

    Raises `ArgumentError`, and `UnsupportedTensorError` for a tensor that is not floating point.
    """
    return _applied(
        "max_pool1d",
        lambda x: F.max_pool1d(x, kernel_size, stride, padding, dilation, ceil_mode),
        input,
        _maximum(kernel_size, stride, 1),
        constraint,
    )


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
    """`torch.nn.functional.max_pool2d` at unit scale: as `max_pool1d`, k being the window's area."""
    return _applied(
        "max_pool2d",
        lambda x: F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode),
        input,
        _maximum(kernel_size, stride, 2),
        constraint,
    )


def _applied(
    operation: str, function: Callable[[Tensor], Tensor], x: Tensor, ideal: Factors, constraint: Constraint | None
) -> Tensor:
    check_floating(operation, input=x)
    check_constraint(operation, constraint)
    return carried_out(function, ideal, constraint, x)


def _average(kernel: Sizes, stride: Sizes | None, dims: int) -> Factors:
    window = math.prod(_each(kernel, dims))
    return formulas.average_pool(window, window if stride is None else math.prod(_each(stride, dims)))


def _maximum(kernel: Sizes, stride: Sizes | None, dims: int) -> Factors:
    window = math.prod(_each(kernel, dims))
    return formulas.maximum_pool(largest(window), window if stride is None else math.prod(_each(stride, dims)))


def _each(sizes: Sizes, dims: int) -> tuple[int, ...]:
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * dims if len(given) == 1 else given
