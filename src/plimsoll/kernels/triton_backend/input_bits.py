"""How raw elements become bits that kernels compute on, for every input dtype.

Kernels load elements as integers and decode them here, so that no load, compare or conversion of the hardware decides
what a subnormal or a NaN is. All types up to 32 bits become the bits of the float32 of the same value (int32), float64
stays as it is (int64). Both are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The kinds of element, as constexpr arguments of the kernels.
FP64, FP32, BF16, FP16, E5M2, E4M3, E5M2FNUZ, E4M3FNUZ = (tl.constexpr(kind) for kind in range(8))

_KINDS: dict[torch.dtype, tl.constexpr] = {
    torch.float64: FP64,
    torch.float32: FP32,
    torch.bfloat16: BF16,
    torch.float16: FP16,
    torch.float8_e5m2: E5M2,
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2fnuz: E5M2FNUZ,
    torch.float8_e4m3fnuz: E4M3FNUZ,
}
DTYPES = tuple(_KINDS)
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_POINTEES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


def kind(dtype: torch.dtype) -> int:
    """The number by which kernels know a dtype."""
    return int(_KINDS[dtype].value)


def as_integers(x: Tensor) -> Tensor:
    """`x` seen as integers of its width."""
    return x.view(_INTEGERS[x.element_size()])


def pointee(dtype: torch.dtype) -> tl.dtype:
    """Triton's type for the integers that a kernel loads from a tensor of that dtype."""
    return _POINTEES[dtype.itemsize]


@triton.jit
def decode(raw, KIND: tl.constexpr):
    """Bits of the float64 (int64) for float64 elements, else bits of the float32 (int32)."""
    if KIND == FP64 or KIND == FP32:
        return raw
    elif KIND == BF16:
        return raw.to(tl.int32) << 16
    elif KIND == FP16:
        return raw.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    elif KIND == E5M2:
        return _decode_byte(raw, 2, 15, 0x7C, 0x7C, -1)
    elif KIND == E4M3:
        return _decode_byte(raw, 3, 7, -1, 0x7E, -1)
    elif KIND == E5M2FNUZ:
        return _decode_byte(raw, 2, 16, -1, 0x7F, 0x80)
    else:
        return _decode_byte(raw, 3, 8, -1, 0x7F, 0x80)


@triton.jit
def _decode_byte(raw, M: tl.constexpr, BIAS: tl.constexpr, INF: tl.constexpr, LAST: tl.constexpr, NAN: tl.constexpr):
    # Magnitudes beyond LAST are NaN, and so is the one code NAN; INF is the magnitude of infinity (-1: there is none).
    code = raw.to(tl.int32)
    magnitude = code & 0x7F
    normal = (magnitude << (23 - M)) + ((127 - BIAS) << 23)
    # A subnormal's integer times a power of two: both are normal float32 values, and so is the product.
    quantum: tl.constexpr = (127 + 1 - BIAS - M) << 23
    spacing = tl.full((), quantum, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32) * spacing).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < (1 << M), subnormal, normal)
    bits = tl.where(magnitude == INF, 0x7F800000, bits)
    bits = tl.where((magnitude > LAST) | (code == NAN), 0x7FC00000, bits)
    return bits | ((code & 0x80) << 24)


@triton.jit
def to_double(bits, WIDE: tl.constexpr):
    """The float64 of decoded bits (exact: no conversion here flushes subnormals, which the compile test looks for)."""
    if WIDE:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True).to(tl.float64)
