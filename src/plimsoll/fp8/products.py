"""The product of two FP8 matrices, and what a device asks of them.

The reference, which every device's result is held against: codes become float32, which holds them and the products of
two of them exactly; sums are float32; the sum is multiplied by the product of both scales, the bias is added, and the
result is rounded once to the output's dtype. On a CPU, and on GPUs without FP8 units, it is computed so, bit for bit.
(torch's own product for CPUs is slower than this, and takes the scales in another order: see docs/design/fp8.md.) FP8
units add in another order, and some of them in fewer bits.
"""

import contextlib
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.operators.fp8_cast import FORMATS, MULTIPLE

_CODES = tuple(FORMATS)
_HAS_UNITS = (8, 9)  # compute capability from which NVIDIA's GPUs multiply FP8


def product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """``(a @ b.t()) * scale_a * scale_b + bias`` in `dtype`, of codes that both lie row by row.

    `fast` lets FP8 units add up in fewer bits than float32 has, as is usual forward.
    """
    if a.numel() == 0 or b.numel() == 0:
        found = torch.zeros((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
        return found if bias is None else found + bias.to(dtype)
    if a.is_cuda and has_units(a.device):
        return _on_units(a, b, scale_a, scale_b, bias, dtype, fast)
    return reference(a, b, scale_a, scale_b, bias, dtype)


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`product` as this module's first lines define it, on any device."""
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
    epilogue = bias is not None and dtype != torch.float32  # the units' libraries add no bias to a float32 result
    added = bias.to(dtype) if bias is not None and epilogue else None
    found = scaled_mm(a, b.t(), scale_a, scale_b, added, dtype, fast)
    return found if bias is None or epilogue else found + bias


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return the scaled product that torch has, of row-major `a` and column-major `b`.

    The operator that compilers know where this torch has it, else the public function that follows it.
    """
    operator: Any = getattr(torch, "_scaled_mm", None)
    if operator is not None:
        found = operator(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
        return cast("Tensor", found)
    return public_scaled_mm(a, b, scale_a, scale_b, bias, dtype, fast)


def public_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return the same by `torch.nn.functional.scaled_mm`, which torch has from 2.10 on."""
    functional: Any = torch.nn.functional
    whole = functional.ScalingType.TensorWise
    found = functional.scaled_mm(
        a, b, scale_a, whole, scale_b, whole, bias=bias, output_dtype=dtype, use_fast_accum=fast
    )
    return cast("Tensor", found)


def is_autocasting(kind: str) -> bool:
    """Return whether autocast is on for devices of that kind; not for a kind that has none."""
    return _has_autocast(kind) and torch.is_autocast_enabled(kind)


@torch.compiler.assume_constant_result  # torch 2.9 cannot trace the question
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def has_units(device: torch.device) -> bool:
    """Return whether a CUDA device multiplies FP8 by itself."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _HAS_UNITS


def check(a: Tensor, b: Tensor) -> None:
    """Raise unless FP8 units can multiply `a` by `b`. The result is the same on every device.

    Both are matrices of FP8 codes on one device: `a` (M, K) in E4M3 or E5M2, row after row; `b` (K, N), column after
    column (the transpose of a contiguous matrix); not both in E5M2; K and N divisible by 16. Raises
    `UnsupportedTensorError` or `ArgumentError`.

    >>> a = torch.zeros(3, 32).to(torch.float8_e4m3fn)
    >>> check(a, torch.zeros(48, 32).to(torch.float8_e5m2).t())
    >>> check(a, torch.zeros(32, 48).to(torch.float8_e5m2))
    Traceback (most recent call last):
        ...
    plimsoll.ArgumentError: fp8.check: expected b to lie column after column; got b=(32, 48) of ...
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in _CODES or x.dim() != 2:
            raise UnsupportedTensorError(
                f"fp8.check: expected {name} to be a matrix of float8_e4m3fn or float8_e5m2; got {name}={_say(x)}. "
                "Cast it first."
            )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise UnsupportedTensorError(
            f"fp8.check: expected at most one operand in E5M2; got a={_say(a)}, b={_say(b)}. FP8 units multiply E5M2 "
            "by E4M3 only: keep weights and activations in E4M3."
        )
    if a.device != b.device or a.shape[1] != b.shape[0]:
        raise ArgumentError(
            f"fp8.check: expected a of (M, K) and b of (K, N) on one device; got a={_say(a)} on {a.device}, "
            f"b={_say(b)} on {b.device}. Bring them together."
        )
    _check_layout(a, b)


def _check_layout(a: Tensor, b: Tensor) -> None:
    if not a.is_contiguous():
        raise ArgumentError(
            f"fp8.check: expected a to lie row after row; got a={_say(a)} with strides {a.stride()}. Use "
            "a.contiguous()."
        )
    if not b.t().is_contiguous():
        raise ArgumentError(
            f"fp8.check: expected b to lie column after column; got b={_say(b)} with strides {b.stride()}. Use "
            "b.t().contiguous().t()."
        )
    if b.shape[0] % MULTIPLE or b.shape[1] % MULTIPLE:
        raise ArgumentError(
            f"fp8.check: expected K and N divisible by {MULTIPLE}; got b={_say(b)}. Make them up with zeros."
        )


def _say(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype}"
