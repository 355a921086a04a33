"""The casting kernels: values or codes, with or without blocks."""

import triton
import triton.language as tl

from plimsoll.kernels.triton_backend import input_bits
from plimsoll.kernels.triton_backend.casting.rounding import (
    NEAREST_EVEN,
    OVERFLOW_MAX,
    STOCHASTIC,
    encode,
    noise_at,
    philox,
)

# `cast_dense` gives each program some groups of 1,024 consecutive values, as `kernels.philox` numbers them: a Philox
# block is computed once, and its four words serve four runs of 256 values. Blocks of a power of two up to 256 lie
# inside such a run. `cast_ragged` is for blocks that do not: rows that end in a part of a block, or odd block lengths.
GROUPS = 4  # of 1,024 values to a program
WARPS = 4
RAGGED_VALUES = 1024  # to a program, at least one block

# How held values become the output's bits: they are them already, by an exact conversion, or by rounding into TARGET.
SAME, DOUBLE, ROUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_FP64 = input_bits.FP64
_RUNTIME = [
    "x", "out", "scales", "count", "n", "factor", "factor_at", "tensor_scale", "seed", "key", "m", "lowest", "max_code",
    "max_bits", "quantum", "nan_code", "nan_bits", "sign_shift", "top", "bump",
]  # fmt: skip


# Whole programs load and store without masks, since only these become 16-byte instructions.
@triton.jit(do_not_specialize=[name for name in _RUNTIME if name not in ("x", "out", "scales")])
def cast_dense(
    x, out, scales, count: tl.int64, factor: tl.int64, factor_at, tensor_scale, seed: tl.int64, key,
    m: tl.int64, lowest: tl.int64, max_code: tl.int64, max_bits: tl.int64, quantum: tl.int64, nan_code: tl.int64,
    nan_bits: tl.int64, sign_shift: tl.int64, top: tl.int64, bump: tl.int64,
    KIND: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
    SIGNED: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr, TARGET: tl.constexpr,
    CODES: tl.constexpr, NIBBLES: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Cast consecutive values, in blocks of BLOCK (0: none).

    BLOCK divides both 256 and the length of a row.
    """
    SPAN: tl.constexpr = GROUPS * 1024
    fmt = _format(m, lowest, max_code, max_bits, quantum, nan_code, nan_bits, sign_shift, WIDE)
    scale = _factor(factor, factor_at)
    start = tl.program_id(0).to(tl.int64) * SPAN
    group = tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, 256)[None, :]
    whole = start + SPAN <= count
    if ROUNDING == STOCHASTIC:
        words = philox(_key(seed, key), ((start >> 10) + group) * 256 + lane)
    for word in tl.static_range(4):
        local = group * 1024 + (word * 256 + lane)
        there = start + local < count
        if whole:
            raw = tl.load(x + start + local)
        else:
            raw = tl.load(x + start + local, mask=there, other=0)
        noise = None
        if ROUNDING == STOCHASTIC:
            noise = words[word]
        if BLOCK:
            if ROUNDING == STOCHASTIC:
                noise = noise.reshape(GROUPS * 256 // BLOCK, BLOCK)
            result, codes = _cast_blocks(
                raw.reshape(GROUPS * 256 // BLOCK, BLOCK), noise, fmt, scale, tensor_scale, top, bump,
                KIND, SCALED, ROUNDING, FNUZ, CARRIER, TARGET, CODES, SCALE,
            )  # fmt: skip
            result = result.reshape(GROUPS, 256)
            if CODES:
                block = tl.arange(0, 256 // BLOCK)[None, :]
                at = group * (1024 // BLOCK) + (word * (256 // BLOCK) + block)
                codes = codes.reshape(GROUPS, 256 // BLOCK).to(scales.dtype.element_ty)
                tl.store(scales + start // BLOCK + at, codes, mask=start + at * BLOCK < count)
        else:
            result = _cast_values(
                raw, noise, fmt, scale, KIND, WIDE, SCALED, ROUNDING, OVERFLOW, SIGNED, FNUZ, CARRIER, TARGET, CODES
            )
        if NIBBLES:
            low, high = tl.split(tl.where(there, result, 0).reshape(GROUPS, 128, 2))
            at = group * 512 + (word * 128 + tl.arange(0, 128)[None, :])
            pairs = (low | (high << 4)).to(out.dtype.element_ty)
            tl.store(out + start // 2 + at, pairs, mask=start + at * 2 < count)
        else:
            result = result.to(out.dtype.element_ty)
            if whole:
                tl.store(out + start + local, result)
            else:
                tl.store(out + start + local, result, mask=there)


@triton.jit(do_not_specialize=[name for name in _RUNTIME if name not in ("x", "out", "scales")])
def cast_ragged(
    x, out, scales, count: tl.int64, n: tl.int64, factor: tl.int64, factor_at, tensor_scale, seed: tl.int64, key,
    m: tl.int64, lowest: tl.int64, max_code: tl.int64, max_bits: tl.int64, quantum: tl.int64, nan_code: tl.int64,
    nan_bits: tl.int64, sign_shift: tl.int64, top: tl.int64, bump: tl.int64,
    KIND: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr,
    TARGET: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast `count` blocks along rows of n values, BLOCKS of them to a program.

    PADDED is the power of two from BLOCK on.
    """
    fmt = _format(m, lowest, max_code, max_bits, quantum, nan_code, nan_bits, sign_shift, True)
    across = tl.cdiv(n, BLOCK)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // across
    column = (block - row * across) * BLOCK
    width = tl.where(block < count, tl.minimum(n - column, BLOCK), 0)
    lane = tl.arange(0, PADDED)[None, :]
    index = (row * n + column)[:, None] + lane
    there = lane < width[:, None]
    raw = tl.load(x + index, mask=there, other=0)
    noise = None
    if ROUNDING == STOCHASTIC:
        noise = noise_at(_key(seed, key), index)
    result, codes = _cast_blocks(
        raw, noise, fmt, _factor(factor, factor_at), tensor_scale, top, bump,
        KIND, SCALED, ROUNDING, FNUZ, CARRIER, TARGET, CODES, SCALE,
    )  # fmt: skip
    tl.store(out + index, result.to(out.dtype.element_ty), mask=there)
    if CODES:
        tl.store(scales + block, codes.to(scales.dtype.element_ty), mask=block < count)


@triton.jit
def _format(m, lowest, max_code, max_bits, quantum, nan_code, nan_bits, sign_shift, WIDE: tl.constexpr):
    """The fields as a tuple, in the integer width that the kernel computes in."""
    INT: tl.constexpr = tl.int64 if WIDE else tl.int32
    return (
        m.to(INT), lowest.to(INT), max_code.to(INT), max_bits.to(INT), quantum.to(INT), nan_code.to(INT),
        nan_bits.to(INT), sign_shift.to(INT),
    )  # fmt: skip


@triton.jit
def _factor(factor, factor_at):
    if factor_at is None:
        return factor.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        return _load_double(factor_at)


@triton.jit
def _load_double(pointer):
    value = tl.load(pointer)
    if value.dtype != tl.float64:
        value = value.to(tl.float32).to(tl.float64)
    return value


@triton.jit
def _key(seed, key):
    if key is None:
        return seed.to(tl.int64)
    else:
        return tl.load(key)


@triton.jit
def _scaled_bits(raw, scale, KIND: tl.constexpr, SCALED: tl.constexpr):
    """The bits of the float64 to be cast."""
    values = input_bits.to_double(input_bits.decode(raw, KIND), KIND == _FP64)
    if SCALED:
        values = values * scale
    return values.to(tl.int64, bitcast=True)


@triton.jit
def _cast_values(
    raw, noise, fmt, scale,
    KIND: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, OVERFLOW: tl.constexpr,
    SIGNED: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr, TARGET: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    if WIDE:
        bits = _scaled_bits(raw, scale, KIND, SCALED)
    else:
        bits = input_bits.decode(raw, KIND)
    code, rounded = encode(bits, noise, fmt, ROUNDING, OVERFLOW, SIGNED, FNUZ, WIDE)
    if CODES:
        return code
    else:
        # NaN stays NaN also where the format has none.
        NAN: tl.constexpr = 0x7FF8000000000000 if WIDE else 0x7FC00000
        magnitude = bits & (0x7FFFFFFFFFFFFFFF if WIDE else 0x7FFFFFFF)
        rounded = tl.where(magnitude > (0x7FF0000000000000 if WIDE else 0x7F800000), NAN, rounded)
        if SCALED:
            rounded = (rounded.to(tl.float64, bitcast=True) / scale).to(tl.int64, bitcast=True)
        return _to_carrier(rounded, CARRIER, TARGET, WIDE)


@triton.jit
def _to_carrier(rounded, CARRIER: tl.constexpr, TARGET: tl.constexpr, WIDE: tl.constexpr):
    """Held values rounded once to nearest even into the output's dtype, as its bits."""
    if CARRIER == SAME:
        return rounded
    elif CARRIER == DOUBLE:
        return input_bits.to_double(rounded, WIDE).to(tl.int64, bitcast=True)
    else:
        code, _ = encode(rounded, None, TARGET, NEAREST_EVEN, TARGET[8], True, TARGET[9], WIDE)
        return code


@triton.jit
def _cast_blocks(
    raw, noise, fmt, scale, tensor_scale, top, bump,
    KIND: tl.constexpr, SCALED: tl.constexpr, ROUNDING: tl.constexpr, FNUZ: tl.constexpr, CARRIER: tl.constexpr,
    TARGET: tl.constexpr, CODES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """A matrix of one block a row: values or element codes, and the scales' codes."""
    bits = _scaled_bits(raw, scale, KIND, SCALED)
    largest = tl.max(bits & 0x7FFFFFFFFFFFFFFF, axis=1)
    scale_codes, divisor = _block_scales(largest, fmt, tensor_scale, top, bump, SCALE)
    poisoned = largest >= 0x7FF0000000000000
    scale_codes = tl.where(poisoned, SCALE[5], scale_codes)
    values = bits.to(tl.float64, bitcast=True)
    if tensor_scale is None:  # a power of two: so is its inverse, and one division serves the block
        scaled = values * (1.0 / divisor)[:, None]
    else:
        # A block so small beside the tensor's maximum that its scale is zero holds only zeros.
        zero = (divisor == 0.0)[:, None]
        scaled = tl.where(zero, values * 0.0, values / tl.where(zero, 1.0, divisor[:, None]))
    code, rounded = encode(scaled.to(tl.int64, bitcast=True), noise, fmt, ROUNDING, OVERFLOW_MAX, True, FNUZ, True)
    if CODES:
        return tl.where(poisoned[:, None], 0, code), scale_codes
    else:
        products = rounded.to(tl.float64, bitcast=True) * divisor[:, None]
        if SCALED:
            products = products / scale
        product_bits = tl.where(poisoned[:, None], 0x7FF8000000000000, products.to(tl.int64, bitcast=True))
        return _to_carrier(product_bits, CARRIER, TARGET, True), scale_codes


@triton.jit
def _block_scales(largest, fmt, tensor_scale, top, bump, SCALE: tl.constexpr):
    """Return the code of each block's scale, and the factor of its elements.

    OCP MX 1.0 section 6.3, and NVFP4. `bump` is the smallest fraction of the largest magnitude that takes the next
    exponent: it makes the rule.
    """
    if tensor_scale is None:
        exponent = (largest >> 52) - 1023 - top + ((largest & 0xFFFFFFFFFFFFF) >= bump).to(tl.int64)
        exponent = tl.minimum(tl.maximum(exponent, SCALE[8]), SCALE[9])
        return exponent + SCALE[10], ((exponent + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        whole = _load_double(tensor_scale)
        ideal = largest.to(tl.float64, bitcast=True) / (fmt[3].to(tl.float64, bitcast=True) * whole)
        ideal_bits = ideal.to(tl.int64, bitcast=True)
        codes, rounded = encode(ideal_bits, None, SCALE, SCALE[11], OVERFLOW_MAX, True, SCALE[12], True)
        return codes, rounded.to(tl.float64, bitcast=True) * whole
