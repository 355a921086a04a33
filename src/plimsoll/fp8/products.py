"""The product of two FP8 matrices, and the layouts that devices require."""

import contextlib
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.operators.fp8_cast import FORMATS, MULTIPLE

_CODES = tuple(FORMATS)
_HAS_UNITS = (8, 9)  # lowest compute capability of NVIDIA GPUs with FP8 units


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return ``(a @ b.t()) * scale_a * scale_b + bias`` in `dtype`.

    Args:
        a: Codes (M, K), contiguous.
        b: Codes (N, K), contiguous.
        scale_a: Factor of `a`, a 0-d float32.
        scale_b: Factor of `b`, a 0-d float32.
        bias: Bias of N values, or None.
        dtype: Dtype of the result.
        fast: Whether FP8 units may add in fewer bits than float32 has, as is usual in a forward.
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
