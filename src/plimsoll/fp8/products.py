"""The three products of a linear layer in FP8, as one autograd function.

Forward ``x @ w.t()`` is E4M3 by E4M3. The gradient of the input, ``g @ w``, and that of the weight, ``g.t() @ x``, are
E5M2 by E4M3. Each tensor is cast once, in the layouts that its products read. Autograd saves the codes, half the size
of bfloat16. The gradient of the bias is a float32 sum of the uncast gradient.
"""

import contextlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.formats import E5M2
from plimsoll.fp8.casting import DTYPES, Codes, absmax_of, gradient_scale, scale_for, to_codes
from plimsoll.kernels.operators.fp8_cast import FORMATS, MULTIPLE, Layout

# -- the product of two FP8 matrices, and the layouts that devices require ---------------------------------------------

_CODES = tuple(FORMATS)
_HAS_UNITS = (8, 9)  # lowest compute capability of NVIDIA GPUs with FP8 units


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return ``(a @ b.t()) * scale_a * scale_b + bias`` in `dtype`.

    Codes (M, K) and (N, K) are contiguous, and scales are 0-d float32. If `fast`, FP8 units may add in fewer bits than
    float32 has, as is usual in a forward.
    """
    if a.numel() == 0 or b.numel() == 0:
        zeros = torch.zeros((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
        return zeros if bias is None else zeros + bias.to(dtype)
    if a.is_cuda and has_units(a.device):
        return _on_units(a, b, scale_a, scale_b, bias, dtype, fast)
    return reference(a, b, scale_a, scale_b, bias, dtype)


# The reference: codes become float32, which represents them and the products of two of them exactly. Sums are float32.
# The sum is multiplied by the product of both scales, the bias is added, and the result is rounded once to the dtype of
# the output. CPUs, and GPUs without FP8 units, compute it bit for bit. (torch's own product for CPUs is slower, and
# applies the scales in another order, see docs/design/fp8.md.) FP8 units add in another order, some of them in fewer
# bits.
def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the reference result of `product`, on any device."""
    kind = a.device.type
    with torch.autocast(kind, enabled=False) if is_autocasting(kind) else contextlib.nullcontext():
        sums = torch.mm(a.to(torch.float32), b.to(torch.float32).t())
    sums = sums * (scale_a * scale_b)
    if bias is not None:
        sums = sums + bias.to(dtype)
    return sums.to(dtype)


def _on_units(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    epilogue = bias is not None and dtype != torch.float32  # cuBLAS adds no bias to a float32 result
    added = bias.to(dtype) if bias is not None and epilogue else None
    y = scaled_mm(a, b.t(), scale_a, scale_b, added, dtype, fast)
    return y if bias is None or epilogue else y + bias


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return torch's scaled product of row-major `a` and column-major `b`."""
    # Compilers know the operator. Where torch lacks it, the public function does the same.
    operator: Any = getattr(torch, "_scaled_mm", None)
    if operator is not None:
        return cast("Tensor", operator(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast))
    return public_scaled_mm(a, b, scale_a, scale_b, bias, dtype, fast)


def public_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return the scaled product by `torch.nn.functional.scaled_mm` (torch 2.10 on)."""
    functional: Any = torch.nn.functional
    whole = functional.ScalingType.TensorWise
    scaled = functional.scaled_mm(
        a, b, scale_a, whole, scale_b, whole, bias=bias, output_dtype=dtype, use_fast_accum=fast
    )
    return cast("Tensor", scaled)


def is_autocasting(kind: str) -> bool:
    """Return whether the device type has autocast, and it is on."""
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


@torch.compiler.assume_constant_result  # torch 2.9 cannot trace is_autocast_available
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def has_units(device: torch.device) -> bool:
    """Return whether a CUDA device has FP8 units."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _HAS_UNITS


def check(a: Tensor, b: Tensor) -> None:
    """Raise unless FP8 units can multiply `a` by `b`.

    The answer is the same on every device.

    Args:
        a: FP8 codes (M, K) in E4M3 or E5M2, contiguous by rows.
        b: FP8 codes (K, N), contiguous by columns (the transpose of a contiguous matrix). K and N must be divisible by
            16, and one of `a` and `b` must be E4M3.

    Raises:
        UnsupportedTensorError: An operand is no matrix of FP8 codes, or both are E5M2.
        ArgumentError: Devices, sizes or strides do not fit.

    >>> a = torch.zeros(3, 32).to(torch.float8_e4m3fn)
    >>> check(a, torch.zeros(48, 32).to(torch.float8_e5m2).t())
    >>> check(a, torch.zeros(32, 48).to(torch.float8_e5m2))
    Traceback (most recent call last):
        ...
    plimsoll.ArgumentError: fp8.check: expected b to be contiguous by columns; got b=(32, 48) of ...
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in _CODES or x.dim() != 2:
            raise UnsupportedTensorError(
                f"fp8.check: expected {name} to be a matrix of float8_e4m3fn or float8_e5m2; got "
                f"{name}={_described(x)}. Cast it first."
            )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise UnsupportedTensorError(
            f"fp8.check: expected at most one operand in E5M2; got a={_described(a)}, b={_described(b)}. FP8 units "
            "multiply E5M2 by E4M3 only: keep weights and activations in E4M3."
        )
    if a.device != b.device or a.shape[1] != b.shape[0]:
        raise ArgumentError(
            f"fp8.check: expected a of (M, K) and b of (K, N) on one device; got a={_described(a)} on {a.device}, "
            f"b={_described(b)} on {b.device}. Change shapes or devices."
        )
    _check_layout(a, b)


def _check_layout(a: Tensor, b: Tensor) -> None:
    if not a.is_contiguous():
        raise ArgumentError(
            f"fp8.check: expected a to be contiguous by rows; got a={_described(a)} with strides {a.stride()}. Use "
            "a.contiguous()."
        )
    if not b.t().is_contiguous():
        raise ArgumentError(
            f"fp8.check: expected b to be contiguous by columns; got b={_described(b)} with strides {b.stride()}. Use "
            "b.t().contiguous().t()."
        )
    if b.shape[0] % MULTIPLE or b.shape[1] % MULTIPLE:
        raise ArgumentError(
            f"fp8.check: expected K and N divisible by {MULTIPLE}; got b={_described(b)}. Pad with zeros."
        )


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype}"


# -- the three products ------------------------------------------------------------------------------------------------


class Constants(NamedTuple):
    """Factors of a call's products, and the settings known before it runs."""

    output: float
    input: float
    weight: float
    dtype: torch.dtype  # of the result
    keep: bool  # whether a backward may follow
    margin: int = 0
    first: bool = False  # no history yet
    bias: float = 1.0
    gradient: float = 1.0  # constant scale of the gradient


class Marks(NamedTuple):
    """Buffers that the backward writes to, and the number of its step.

    None for those that the layer lacks. Autograd does not save these tensors, since a second forward may change them
    before the backward of the first.
    """

    scale: Tensor | None = None
    history: Tensor | None = None
    absmax: Tensor | None = None
    step: Tensor | None = None
    forward_step: Tensor | None = None
    bank: Tensor | None = None
    row: int = 0


class Fp8Product(torch.autograd.Function):
    """``x @ weight.t() + bias`` of two matrices, with a weight already in FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_codes: Codes,
        scale: Tensor | None,
        bank: Tensor | None,
        row: int,
        marks: Marks,
        constants: Constants,
    ) -> Tensor:
        """Return the product, times the factor of unit scaling, in the constants' dtype."""
        ctx.constants, ctx.marks, ctx.sizes = constants, marks, (*x.shape, weight.shape[0])
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        layout: Layout = "both" if constants.keep and ctx.needs_input_grad[1] else "rows"
        codes = to_codes(x, DTYPES["activations"], scale, layout, bank, row)
        assert codes.rows is not None
        assert weight_codes.rows is not None
        if constants.keep:
            ctx.save_for_backward(codes.columns, weight_codes.columns, scale, weight_codes.scale)
        if bias is not None:
            bias = _padded(_times(bias, constants.output), weight_codes.rows.shape[0])
        scales = _inverse(scale, constants.output, x), _inverse(weight_codes.scale, 1.0, x)
        y = product(codes.rows, weight_codes.rows, *scales, bias, constants.dtype, fast=True)
        return _cut(y, x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, weight and bias, each in its tensor's dtype."""
        x_columns, columns, x_scale, weight_scale = ctx.saved_tensors
        constants: Constants = ctx.constants
        batch, width, height = ctx.sizes
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        codes = _gradient_codes(gradient, ctx.marks, constants, of_input, of_weight)
        result: list[Tensor | None] = [None] * 9
        if codes.rows is not None:
            scales = _inverse(codes.scale, constants.input, gradient), _inverse(weight_scale, 1.0, gradient)
            product_of_rows = product(codes.rows, columns, *scales, None, ctx.dtypes[0], fast=False)
            result[0] = _cut(product_of_rows, batch, width)
        if codes.columns is not None:
            scales = _inverse(codes.scale, constants.weight, gradient), _inverse(x_scale, 1.0, gradient)
            product_of_columns = product(codes.columns, x_columns, *scales, None, ctx.dtypes[1], fast=False)
            result[1] = _cut(product_of_columns, height, width)
        if of_bias:
            result[2] = _times(gradient.sum(0, dtype=torch.float32), constants.bias).to(ctx.dtypes[2])
        return tuple(result)


def _gradient_codes(gradient: Tensor, marks: Marks, constants: Constants, of_input: bool, of_weight: bool) -> Codes:
    """Return the codes of the gradient in the layouts that are needed."""
    if not (of_input or of_weight):
        return Codes()
    layout: Layout = "both" if of_input and of_weight else "rows" if of_input else "columns"
    scale = _scale_gradient(gradient, marks, constants)
    return to_codes(gradient, DTYPES["gradients"], scale, layout, marks.bank, marks.row)


def _scale_gradient(gradient: Tensor, marks: Marks, constants: Constants) -> Tensor | None:
    if marks.scale is None:
        is_one = constants.gradient == 1.0
        return None if is_one else torch.full((), constants.gradient, dtype=torch.float32, device=gradient.device)
    absmax = absmax_of(gradient)
    if marks.history is None or marks.absmax is None or marks.step is None or marks.forward_step is None:
        scale = scale_for(absmax, E5M2, constants.margin)
    else:
        scale = gradient_scale(
            marks.history, marks.absmax, marks.step, marks.forward_step, absmax, constants.first, constants.margin
        )
    marks.scale.copy_(scale)
    return scale


def _inverse(scale: Tensor | None, factor: float, like: Tensor) -> Tensor:
    """Return `factor` divided by the scale of an operand, a power of two."""
    if scale is None:
        return torch.full((), factor, dtype=torch.float32, device=like.device)
    return _times(scale.reciprocal(), factor)


def _times(x: Tensor, factor: float) -> Tensor:
    is_one = factor == 1.0  # never true for a symbol, which a compiler has for a dynamic batch size
    return x if is_one else x * factor


def _padded(bias: Tensor, size: int) -> Tensor:
    return bias if bias.shape[0] == size else torch.nn.functional.pad(bias, (0, size - bias.shape[0]))


def _cut(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix without its padding, contiguous."""
    if x.shape[1] != columns:
        return x[:rows, :columns].contiguous()
    return x if x.shape[0] == rows else x[:rows]
