"""`cast`: the values of a tensor, rounded to a format."""

import sys
from collections.abc import Callable
from typing import Any, cast as typed

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.formats import BlockFormat
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING
from plimsoll.kernels.operators.checks import check_tensor
from plimsoll.rounding import arguments
from plimsoll.rounding.arguments import Generator

_LARGEST_TENSOR_SCALE = torch.finfo(torch.float32).max
_SMALLEST_TENSOR_SCALE = 2.0**-149


def cast(
    x: Tensor,
    fmt: object,
    *,
    rounding: str = "nearest_even",
    saturate: bool | None = None,
    scale: float | Tensor | None = None,
    scale_rule: str = "floor",
    axis: int = -1,
    generator: Generator = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the values of `x` rounded to a format, in the dtype of `x`.

    Numerics. Values are rounded once, exactly for every input, subnormals included, in every flush mode of the
    processor. Ties go to the even code. -0 stays -0 if the format has it. NaN stays NaN in the carrier, also for
    formats without NaN. Nearest modes and "stochastic" overflow if the rounded value would exceed `Format.max`. A
    directed mode that rounds toward zero stops at the largest value. If the carrier (the dtype of x, or `dtype`) cannot
    represent a result, the result is rounded to it once more, to nearest even. The result has no gradient:
    `fake_quantize` is the differentiable form. One exception: in a block of float64 values, a value more than 2**900
    below the largest may count as zero in the modes "up" and "down".

    Args:
        x: A floating tensor of any strides. A DTensor of shards or replicas is cast locally.
        fmt: A name, `Format`, `BlockFormat` or torch dtype.
        rounding: "nearest_even" (default), "nearest_away", "toward_zero", "up", "down" or "stochastic".
        saturate: True turns overflow and infinities into the largest value, False into NaN in a format without Inf.
            Default: None, the format's own (a format with Inf overflows to it, others saturate).
        scale: Number above 0 by which values are multiplied before and divided after, both in float64. A tensor of one
            value is read on its device. Default: None, 1.
        scale_rule: Rule for the power-of-two scale of a block from its largest magnitude: "floor" (default, OCP MX: its
            exponent), "ceil" (its exponent rounded up), "rceil" (the smallest scale at which it does not overflow),
            "even" (its exponent after rounding to the precision of the element). The E4M3 scale of NVFP4 and
            nvfp4_single is no power of two: "floor" and "even" are the nearest scale to largest / 6, as specified,
            "ceil" and "rceil" the next above.
        axis: Axis along which blocks run. The last block may be short. Default: -1.
        generator: For stochastic rounding, a CPU torch.Generator, an int, or an int64 key tensor (the form for
            torch.compile and CUDA graphs). Default: None, torch's default generator.
        dtype: Dtype of the result. Default: None, that of `x`.
        out: Tensor for the result, which may be `x` itself. Default: None, a new one.

    Raises:
        ArgumentError: An argument is out of range, or contradicts another.
        FormatError: The format does not exist.
        UnsupportedTensorError: `x` is no strided tensor of floating values.

    >>> cast(torch.tensor([0.1, 300.0, 1e-4]), "e4m3").tolist()
    [0.1015625, 288.0, 0.0]
    >>> cast(torch.tensor([1.0, 0.3, -7.0]), "mxfp4")
    tensor([ 1.0000,  0.5000, -6.0000])
    """
    check_tensor(x, "cast")
    plan = arguments.plan("cast", fmt, rounding=rounding, saturate=saturate, scale_rule=scale_rule, axis=axis)
    return cast_checked(x, plan, scale, generator, dtype, out)


def cast_checked(
    x: Tensor,
    plan: arguments.Plan,
    scale: float | Tensor | None,
    generator: Generator,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the `cast` of a floating, dense tensor with checked arguments."""
    if is_sharded(x):
        _refuse_out(out)
        return map_local(x, lambda local: _cast(local, plan, scale, generator, dtype, None), plan)
    return _cast(x.detach(), plan, scale, generator, dtype, out)


def _cast(
    x: Tensor,
    plan: arguments.Plan,
    scale: float | Tensor | None,
    generator: Generator,
    dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    carrier = _carrier(x, dtype, out)
    numbers = arguments.numbers("cast", x, plan, scale, generator)
    if isinstance(plan.format, BlockFormat):
        return _cast_blocks(x, plan, plan.format, numbers, carrier, out)
    if out is None:
        return kernels.ops.cast(x, plan.ints, *numbers, carrier)
    kernels.ops.cast_out(x, plan.ints, *numbers, out)
    return out


def _cast_blocks(
    x: Tensor,
    plan: arguments.Plan,
    fmt: BlockFormat,
    numbers: arguments.Numbers,
    carrier: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    matrix = rows_of(x, plan.axis, "cast")
    over = tensor_scale(matrix, fmt, numbers.scale, numbers.scale_tensor)
    if out is not None and out.is_contiguous() and plan.axis in (-1, x.dim() - 1):
        kernels.ops.block_cast_out(matrix, plan.ints, over, *numbers, out.view(matrix.shape))
        return out
    result = from_rows(kernels.ops.block_cast(matrix, plan.ints, over, *numbers, carrier), x.shape, plan.axis)
    return result if out is None else out.copy_(result)


def rows_of(x: Tensor, axis: int, operation: str) -> Tensor:
    """Return `x` as a matrix with rows along `axis`."""
    if not x.dim():
        x = x.reshape(1)
    if not -x.dim() <= axis < x.dim():
        raise ArgumentError(
            f"{operation}: expected axis to be one of {-x.dim()} to {x.dim() - 1}; "
            f"got {axis} for shape {tuple(x.shape)}."
        )
    moved = x.movedim(axis, -1)
    return moved.reshape(moved.numel() // max(moved.shape[-1], 1), moved.shape[-1])


def from_rows(matrix: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return a matrix of `rows_of` as a tensor of its first shape."""
    if not shape:
        return matrix.reshape(())
    axis %= len(shape)
    moved = [size for dim, size in enumerate(shape) if dim != axis] + [shape[axis]]
    return matrix.reshape(moved).movedim(-1, axis)


def tensor_scale(matrix: Tensor, fmt: BlockFormat, scale: float, scale_tensor: Tensor | None) -> Tensor | None:
    """Return the FP32 scale that NVFP4 has for a whole tensor.

    It is float32(absmax / (6 * 448)) of the largest finite magnitude, limited to positive float32 numbers, and 1 for a
    tensor of zeros. It is also 1 for a format without a tensor scale whose block scales have a mantissa, and None for
    block scales that are powers of two.
    """
    if not fmt.tensor_scale:
        return torch.ones((), device=matrix.device) if fmt.scale.signed else None
    absmax = kernels.ops.absmax(matrix) * (scale if scale_tensor is None else scale_tensor)
    ideal = (absmax / (fmt.element.max * fmt.scale.max)).clamp(_SMALLEST_TENSOR_SCALE, _LARGEST_TENSOR_SCALE)
    return torch.where(absmax == 0, 1.0, ideal).to(torch.float32)


def _carrier(x: Tensor, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    if out is not None and not isinstance(out, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"cast: expected out to be a tensor; got {type(out).__name__}. Use torch.empty_like(x).")
    carrier = dtype if dtype is not None else x.dtype if out is None else out.dtype
    if carrier not in FLOATING and carrier not in EIGHT_BIT:
        raise ArgumentError(f"cast: expected dtype to be a floating torch dtype of at most 64 bits; got {carrier}.")
    if out is None:
        return carrier
    problem = _why_not_out(x, carrier, out)
    if problem is not None:
        raise ArgumentError(f"cast: expected out to be {problem}")
    return carrier


def _why_not_out(x: Tensor, carrier: torch.dtype, out: Tensor) -> str | None:
    got = f"got {out.dtype}, shape {tuple(out.shape)}, on {out.device}."
    if out.shape != x.shape or out.device != x.device:
        return f"of x's shape {tuple(x.shape)} on its device {x.device}; {got}"
    if out.dtype != carrier:
        return f"of the dtype {carrier} that dtype= names; {got} Leave dtype out."
    if out.requires_grad and torch.is_grad_enabled():
        return f"a tensor that needs no gradient; {got} Use torch.no_grad() or out.detach()."
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        return f"a tensor with memory for each value; {got} It is expanded: use out.contiguous()."
    return None


def _refuse_out(out: Tensor | None) -> None:
    if out is not None:
        raise UnsupportedTensorError("cast: expected out=None for a DTensor; got a tensor. Use the returned DTensor.")


def is_sharded(x: Tensor) -> bool:
    """Return whether `x` is a DTensor, without an import of torch.distributed."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def map_local(x: Tensor, operation: Callable[[Tensor], Tensor], plan: arguments.Plan) -> Tensor:
    """Return a DTensor like `x` with `operation` applied to its local part."""
    whole = typed("Any", x)
    _check_placements(whole, plan)
    local = operation(whole.to_local().detach())
    sharded = typed("Any", sys.modules["torch.distributed.tensor"]).DTensor
    shape, stride = whole.shape, whole.stride()
    return sharded.from_local(local, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride)


def _check_placements(whole: Any, plan: arguments.Plan) -> None:
    blocks = plan.format if isinstance(plan.format, BlockFormat) else None
    for placement in whole.placements:
        if placement.is_partial():
            raise UnsupportedTensorError(
                f"cast: expected a DTensor of shards or replicas; got {placement}, values that are not summed yet. "
                "Call x.redistribute(...) first."
            )
        if blocks is None or not placement.is_shard():
            continue
        if blocks.tensor_scale:
            raise UnsupportedTensorError(
                f"cast: expected a whole tensor for {blocks.name}, whose tensor scale needs the largest value of all "
                f"shards; got {placement}. Gather it, or cast to mxfp4."
            )
        if placement.dim == plan.axis % whole.dim():
            raise UnsupportedTensorError(
                f"cast: expected blocks along an axis that is not sharded; got {placement} and axis={plan.axis}. "
                "Choose another axis or redistribute."
            )
