"""Formats that products multiply and add up in, by device and torch's switches.

Nothing of this is in a tensor's dtype. The rules are torch's own:

- CPU: oneDNN, MKL and torch's kernels add up 16-bit products in FP32 (tests/receipts/test_accumulators.py measures it).
  FP32 operands are rounded to BF16 where `torch.backends.mkldnn` allows it and the processor has AMX; with AVX-512
  alone oneDNN leaves them as they are. The sums of `index_add` and of an embedding's gradient are kept in the
  tensor's own dtype.
- CUDA: tensor cores add up in FP32, unless `torch.backends.cuda.matmul.allow_fp16_accumulation` is set. Partial sums of
  a split product may be added in 16 bits where `allow_*_reduced_precision_reduction` is set, as it is by default. FP32
  operands are rounded to TF32 where `fp32_precision` says so, as it does for convolutions by default.
- Other devices: unknown.
"""

from typing import Any, NamedTuple, cast

import torch

from plimsoll.formats import get_element
from plimsoll.receipts.recording.operations import CONVOLUTIONS

_OWN_DTYPE = {  # sums that are kept in the dtype of the tensor
    "cpu": frozenset(("index_add", "embedding_dense_backward")),
    "cuda": frozenset(("index_add", "scatter_add", "index_put")),
}
_WIDE_SUMS = frozenset((
    "sum", "mean", "nansum", "linalg_vector_norm", "norm", "_foreach_norm", "var", "std", "var_mean", "std_mean",
    "cumsum",
))  # fmt: skip
_SMALLEST_BF16_PRODUCT = 16**3  # multiplications below which oneDNN is not asked


class Switches(NamedTuple):
    """torch's global switches that change products, as they are now."""

    cuda_matmul: str = "none"
    cuda_convolution: str = "none"
    cpu_matmul: str = "none"
    cpu_convolution: str = "none"
    fp16_accumulation: bool = False
    fp16_reduction: bool = False
    bf16_reduction: bool = False
    cpu_fp16_reduction: bool = False

    @classmethod
    def now(cls) -> "Switches":
        """Return the switches of this process. Reading them waits for no device."""
        backends: Any = torch.backends
        cuda, private = backends.cuda.matmul, _private()
        return cls(
            cuda_matmul=cuda.fp32_precision,
            cuda_convolution=backends.cudnn.conv.fp32_precision,
            cpu_matmul=backends.mkldnn.matmul.fp32_precision,
            cpu_convolution=backends.mkldnn.conv.fp32_precision,
            fp16_accumulation=bool(getattr(private, "_get_cublas_allow_fp16_accumulation", bool)()),
            fp16_reduction=_allows(private._get_cublas_allow_fp16_reduced_precision_reduction()),  # noqa: SLF001
            bf16_reduction=_allows(private._get_cublas_allow_bf16_reduced_precision_reduction()),  # noqa: SLF001
            cpu_fp16_reduction=bool(getattr(private, "_get_cpu_allow_fp16_reduced_precision_reduction", bool)()),
        )


def _private() -> Any:
    return torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def _allows(answer: Any) -> bool:
    """Return whether a reduction may be narrow; newer torch answers with a pair."""
    return bool(cast("tuple[bool, ...]", answer)[0] if isinstance(answer, tuple) else answer)


class Arithmetic(NamedTuple):
    """Arithmetic of a product: its operands' format and its accumulators."""

    multiplied: str | None = None  # format that FP32 operands are rounded to; None: they are not
    accumulate: str | None = None  # None: unknown
    partial: str | None = None  # format that partial sums may be added in


def product_arithmetic(
    base: str, dtype: torch.dtype, device: torch.device, size: int, switches: Switches, *, fast: bool = False
) -> Arithmetic:
    """Return how a device computes a product.

    Args:
        base: The operation's name.
        dtype: The dtype of its operands.
        device: Their device.
        size: Number of multiplications; a small product is not given to oneDNN.
        switches: torch's switches.
        fast: Whether an FP8 product may add up in fewer bits (`use_fast_accum`).
    """
    if not dtype.is_floating_point:
        return Arithmetic(accumulate="int32" if dtype in (torch.int8, torch.uint8) else None)
    convolution = base.removesuffix("_backward") in CONVOLUTIONS or base in CONVOLUTIONS
    if device.type == "cuda":
        return _on_cuda(dtype, device, switches, convolution=convolution, fast=fast)
    if device.type != "cpu":
        return Arithmetic()
    if dtype == torch.float64:
        return Arithmetic(accumulate="fp64")
    if dtype == torch.float16 and switches.cpu_fp16_reduction:
        return Arithmetic(partial="fp16")
    asked = switches.cpu_convolution if convolution else switches.cpu_matmul
    narrow = dtype == torch.float32 and asked == "bf16" and size >= _SMALLEST_BF16_PRODUCT and _has_bf16()
    return Arithmetic("bf16" if narrow else None, "fp32")


def _on_cuda(
    dtype: torch.dtype, device: torch.device, switches: Switches, *, convolution: bool, fast: bool
) -> Arithmetic:
    if dtype == torch.float64:
        return Arithmetic(accumulate="fp64")
    if dtype == torch.float32:
        asked = switches.cuda_convolution if convolution else switches.cuda_matmul
        return Arithmetic("tf32" if asked == "tf32" and _has_tf32(device) else None, "fp32")
    if dtype.itemsize == 1:
        return Arithmetic() if fast else Arithmetic(accumulate="fp32")
    if convolution:
        return Arithmetic(accumulate="fp32")
    if dtype == torch.float16 and switches.fp16_accumulation:
        return Arithmetic(accumulate="fp16")
    narrow = switches.fp16_reduction if dtype == torch.float16 else switches.bf16_reduction
    return Arithmetic(None, "fp32", get_element(dtype, "receipt").name if narrow else None)


def sum_accumulator(base: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the format that a reduction adds up in; None where it is unknown."""
    if dtype == torch.float64:
        return "fp64"
    if dtype.itemsize not in (2, 4) or device.type not in _OWN_DTYPE:
        return None
    if base in _OWN_DTYPE[device.type]:
        return get_element(dtype, "receipt").name
    return "fp32" if base in _WIDE_SUMS else None


def _has_tf32(device: torch.device) -> bool:
    """Return whether the device multiplies in TF32; fake ones without CUDA do."""
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _has_bf16() -> bool:
    """Return whether oneDNN may multiply FP32 operands in BF16 on this processor."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return bool(torch.backends.mkldnn.is_available()) and bool(has_amx())
