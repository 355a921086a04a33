"""Decoding of raw elements of any input dtype to the bits that kernels use."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from plimsoll.formats import Format
from plimsoll.kernels.dtypes import EIGHT_BIT, FORMATS

# The kinds of element, as constexpr arguments of the kernels. From `_CODES` on a kind is the fields of an 8-bit format.
FP64, FP32, BF16, FP16 = (tl.constexpr(kind) for kind in range(4))
_CODES = 1 << 30
_FNUZ, _INF = 1 << 20, 1 << 21


def _kind_of_codes(fmt: Format) -> int:
    """Return one number for decoding: flags, largest magnitude, bias, mantissa bits.

    There are two flags, and then 8, 8 and 4 bits.
    """
    flags = (_FNUZ if fmt.specials == "fnuz" else 0) | (_INF if fmt.has_inf else 0)
    return _CODES | flags | fmt.max_code << 12 | fmt.bias << 4 | fmt.mantissa_bits


_KINDS: dict[torch.dtype, int] = {
    torch.float64: FP64.value,
    torch.float32: FP32.value,
    torch.bfloat16: BF16.value,
    torch.float16: FP16.value,
    **{dtype: _kind_of_codes(FORMATS[dtype]) for dtype in EIGHT_BIT},
}
DTYPES = tuple(_KINDS)
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_POINTEES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


def kind(dtype: torch.dtype) -> int:
    """The number by which kernels know a dtype."""
    return _KINDS[dtype]


def as_integers(x: Tensor) -> Tensor:
    """`x` seen as integers of its width."""
    return x.view(_INTEGERS[x.element_size()])


def pointee(dtype: torch.dtype) -> tl.dtype:
    """Triton's type for the integers that a kernel loads from a tensor of that dtype."""
    return _POINTEES[dtype.itemsize]


# Kernels load elements as integers and decode them here, so that no load, compare or conversion of the hardware decides
# what a subnormal or a NaN is. All types up to 32 bits become the bits of the float32 of the same value (int32),
# float64 stays as it is (int64). Both are exact.
@triton.jit
def decode(raw, KIND: tl.constexpr):
    """Return the bits of the float64 (int64), or else of the float32 (int32)."""
    if KIND == FP64 or KIND == FP32:
        return raw
    elif KIND == BF16:
        return raw.to(tl.int32) << 16
    elif KIND == FP16:
        return raw.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        LAST: tl.constexpr = (KIND >> 12) & 0xFF
        HAS_INF: tl.constexpr = (KIND >> 21) & 1
        INF: tl.constexpr = LAST + 1 if HAS_INF else -1
        NAN: tl.constexpr = 0x80 if (KIND >> 20) & 1 else -1
        return _decode_byte(raw, KIND & 0xF, (KIND >> 4) & 0xFF, INF, LAST + HAS_INF, NAN)


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
    """Return the exact float64 of decoded bits: no conversion flushes subnormals.

    The compile test looks for those.
    """
    if WIDE:
        return bits.to(tl.float64, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True).to(tl.float64)
