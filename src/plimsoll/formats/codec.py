"""Codes and values in numpy: arithmetic of `Format.decode` and `Format.encode`."""

from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll import checks
from plimsoll.errors import ArgumentError, FormatError

# -- Philox4x32-10: the noise of stochastic rounding, equal to the kernels' --------------------------------------------

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFF_FFFF


# The counter layout is that of `plimsoll.kernels.philox`: value i of the flattened array takes word `(i >> 8) & 3` of
# the Philox block (Salmon et al., SC 2011) with counter `(i >> 10) * 256 + (i & 255)`. The low and high halves of the
# key are its two key words. This form exists since formats import no torch. `tests/formats/test_noise.py` compares the
# two with each other, and both with the published test vectors.
def words(key: int, count: int) -> NDArray[np.uint64]:
    """Return the words, 0 to 2**32 - 1, of values 0 to `count`, for a key mod 2**64."""
    index = np.arange(count, dtype=np.uint64)
    counter = (index >> np.uint64(10)) * np.uint64(256) + (index & np.uint64(255))
    zeros = np.zeros_like(counter)
    state = philox((counter & np.uint64(_WORD), counter >> np.uint64(32), zeros, zeros), key)
    lane = (index >> np.uint64(8)) & np.uint64(3)
    return np.select([lane == word for word in range(3)], state[:3], state[3])


def philox(counter: tuple[NDArray[np.uint64], ...], key: int) -> tuple[NDArray[np.uint64], ...]:
    """Return four output words of each counter, given as four arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    low, high = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(low)
        c2 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(high)
        c1, c3 = product1 & np.uint64(_WORD), product0 & np.uint64(_WORD)
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


# -- codes -------------------------------------------------------------------------------------------------------------


class _Layout(Protocol):
    """Properties of `Format` on which codes depend."""

    # `Format` itself is not imported, since it imports this module.

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> int: ...

    @property
    def exponent_bits(self) -> int: ...

    @property
    def mantissa_bits(self) -> int: ...

    @property
    def bias(self) -> int: ...

    @property
    def signed(self) -> bool: ...

    @property
    def specials(self) -> str: ...

    @property
    def max_code(self) -> int: ...

    @property
    def min_exponent(self) -> int: ...

    @property
    def has_inf(self) -> bool: ...

    @property
    def has_nan(self) -> bool: ...

    @property
    def has_negative_zero(self) -> bool: ...

    def saturates(self, saturate: bool | None) -> bool: ...


Rounding = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Codes = NDArray[np.uint8 | np.uint16]

_WIDEST_BITS = 16
_TINY = float(np.finfo(np.float64).tiny)  # far below the fractions between which rounding modes distinguish
_WIDEST_INTEGER = 1 << 53  # up to here every integer is a float64 value
_NATIVE = {"fp32": "numpy.float32 and .view(numpy.uint32)", "fp64": "numpy.float64 and .view(numpy.uint64)"}


def decode(fmt: _Layout, codes: ArrayLike) -> NDArray[np.float64]:
    """Return the values of codes, as `Format.decode` documents."""
    code = _checked_codes(fmt, codes)
    return np.asarray(_values(fmt)[code])


@lru_cache(maxsize=64)
def _values(fmt: _Layout) -> NDArray[np.float64]:
    """Return the values of all codes of a format, in their order."""
    code = np.arange(1 << fmt.bits)
    magnitude = code & ((1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1)
    field, fraction = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    subnormal = (field == 0) & fmt.signed
    significand = np.where(subnormal, fraction, fraction + (1 << fmt.mantissa_bits))
    exponent = np.where(subnormal, 1, field) - fmt.bias - fmt.mantissa_bits
    finite = magnitude <= fmt.max_code
    value = np.ldexp(significand.astype(np.float64), np.where(finite, exponent, 0))
    if fmt.has_inf:
        value = np.where(magnitude == fmt.max_code + 1, np.inf, value)
    value = np.where(magnitude > fmt.max_code + fmt.has_inf, np.nan, value)
    if not fmt.signed:
        return value
    negative = (code >> (fmt.bits - 1)) == 1
    if fmt.specials == "fnuz":
        value = np.where(negative & (magnitude == 0), np.nan, value)
    return np.where(negative, -value, value)


def encode(
    fmt: _Layout,
    values: ArrayLike,
    rounding: Rounding = "nearest_even",
    saturate: bool | None = None,
    generator: "int | np.random.Generator | None" = None,
) -> Codes:
    """Return the codes of values, as `Format.encode` documents."""
    _check_width(fmt, "encode")
    _check_rounding(rounding, generator)
    saturates = fmt.saturates(saturate)
    value = _as_float64(fmt, values)
    _refuse_what_it_lacks(fmt, value)
    negative, magnitude = np.signbit(value), np.abs(value)
    finite = np.isfinite(magnitude)
    code, fraction = _truncate(fmt, np.where(finite, magnitude, 0.0))
    code = code + _rounds_away(rounding, code, fraction, negative, generator)

    returns = finite & _is_toward_zero(rounding, negative)
    overflow = fmt.max_code if saturates else fmt.max_code + 1 if fmt.has_inf else nan_code(fmt)
    code = np.where((code > fmt.max_code) | ~finite, np.where(returns, fmt.max_code, overflow), code)
    if fmt.signed:
        keeps_sign = negative & ((code != 0) | fmt.has_negative_zero)
        code = code | (keeps_sign.astype(np.int64) << (fmt.bits - 1))
    else:
        code = np.where(negative & (magnitude != 0), nan_code(fmt), code)
    code = np.where(np.isnan(value), nan_code(fmt), code)
    return code.astype(np.uint8 if fmt.bits <= 8 else np.uint16)


def nan_code(fmt: _Layout) -> int:
    """Return the code of the positive, quiet NaN, or 0 if the format has none."""
    match fmt.specials:
        case "fnuz":
            return 1 << (fmt.bits - 1)
        case "fn":
            return fmt.max_code + 1
        case "ieee" if fmt.has_nan:
            return fmt.max_code + 1 + (1 << (fmt.mantissa_bits - 1))
        case _:
            return 0


# The codec is float64 arithmetic (frexp, ldexp, floor) and shares nothing with the integer arithmetic of the kernels,
# so each checks the other. It is exact: a value divided by the format's spacing at it (a power of two) loses no bit,
# its whole part is the code up to an offset, and its fraction decides the rounding.
def _truncate(fmt: _Layout, magnitude: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return codes rounded toward zero, and the fractions of a spacing cut off."""
    exponent = np.frexp(magnitude)[1].astype(np.int64) - 1
    exponent = np.where(magnitude > 0, np.maximum(exponent, fmt.min_exponent), fmt.min_exponent)
    in_spacings = np.ldexp(magnitude, fmt.mantissa_bits - exponent)
    in_spacings = np.where(magnitude > 0, np.maximum(in_spacings, _TINY), 0.0)  # a positive value stays inexact
    whole = np.floor(in_spacings)
    fraction = in_spacings - whole
    code = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + whole.astype(np.int64)
    if fmt.signed:
        return code, fraction
    # A pure exponent: all smaller values, zero included, become code 0, the smallest value.
    return np.maximum(code - 1, 0), np.where(whole == 0, 0.0, fraction)


def _rounds_away(
    rounding: Rounding,
    code: NDArray[np.int64],
    fraction: NDArray[np.float64],
    negative: NDArray[np.bool_],
    generator: "int | np.random.Generator | None",
) -> NDArray[np.bool_]:
    match rounding:
        case "nearest_even":
            return (fraction > 0.5) | ((fraction == 0.5) & (code % 2 == 1))
        case "nearest_away":
            return fraction >= 0.5
        case "up":
            return (fraction > 0) & ~negative
        case "down":
            return (fraction > 0) & negative
        case "stochastic":
            noise = words(_key(generator), code.size).reshape(code.shape)
            return noise < np.floor(np.ldexp(fraction, 32))
        case _:
            return np.zeros(code.shape, dtype=np.bool_)


def _is_toward_zero(rounding: Rounding, negative: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of values that round back to the largest in any overflow rule."""
    if rounding == "up":
        return negative
    if rounding == "down":
        return ~negative
    return np.full_like(negative, rounding == "toward_zero")


def _key(generator: "int | np.random.Generator | None") -> int:
    if isinstance(generator, int):
        return generator
    source = np.random.default_rng() if generator is None else generator
    return int(source.integers(-(1 << 63), (1 << 63) - 1, dtype=np.int64, endpoint=True))


def _check_width(fmt: _Layout, operation: str) -> None:
    if fmt.bits > _WIDEST_BITS:
        remedy = f"Use {_NATIVE[fmt.name]}" if fmt.name in _NATIVE else "Use plimsoll.cast for its values"
        raise FormatError(
            f"Format.{operation}: expected a format of at most {_WIDEST_BITS} bits; got {fmt.name} ({fmt.bits} bits). "
            f"{remedy}."
        )


def _check_rounding(rounding: Rounding, generator: object) -> None:
    checks.one_of("Format.encode", "rounding", rounding, get_args(Rounding))
    if generator is not None and rounding != "stochastic":
        raise ArgumentError(
            f"Format.encode: expected a generator with stochastic rounding only; got rounding={rounding!r}. "
            "Leave generator out."
        )
    known = isinstance(generator, int | np.random.Generator) and not isinstance(generator, bool)
    if generator is not None and not known:
        raise ArgumentError(
            "Format.encode: expected generator to be an int, a numpy.random.Generator or None; "
            f"got {generator!r} ({type(generator).__name__}). Use a seed, such as 0."
        )


def _checked_codes(fmt: _Layout, codes: ArrayLike) -> NDArray[np.int64]:
    _check_width(fmt, "decode")
    array = _as_array(codes, "decode", "integer codes")
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(
            f"Format.decode: expected integer codes; got dtype {array.dtype}. Format.encode makes codes of values."
        )
    outside = (array < 0) | (array >= 1 << fmt.bits)
    if outside.any():
        raise ArgumentError(
            f"Format.decode: expected codes of {fmt.name} from 0 to {(1 << fmt.bits) - 1}; "
            f"got {array[outside].flat[0]}{_place(outside)}. Mask the codes to {fmt.bits} bits."
        )
    return array.astype(np.int64)


def _as_float64(fmt: _Layout, values: ArrayLike) -> NDArray[np.float64]:
    """Return the values as float64, or raise if float64 would round one."""
    array = _as_array(values, "encode", "numbers")
    kind = array.dtype.kind
    # The floats of ml_dtypes have kind V and convert to float64. A structured dtype has kind V too, and does not.
    if kind not in "biufV" or array.dtype.names is not None or array.dtype.itemsize > 8:
        raise ArgumentError(
            f"Format.encode: expected real numbers that float64 holds; got dtype {array.dtype}. Convert them first."
        )
    largest = max(-int(array.min()), int(array.max())) if kind in "iu" and array.size else 0
    if largest > _WIDEST_INTEGER:
        raise ArgumentError(
            f"Format.encode: expected integers up to 2**53, which float64 holds, to round them once to {fmt.name}; "
            f"got {array.dtype} up to {largest}. Convert them first."
        )
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return array.astype(np.float64)


def _as_array(values: ArrayLike, operation: str, what: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    # Ragged lists, dtypes of torch that numpy lacks, and tensors that require a gradient.
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"Format.{operation}: expected {what}; got {type(values).__name__}. {error}") from error


def _refuse_what_it_lacks(fmt: _Layout, value: NDArray[np.float64]) -> None:
    if fmt.has_nan:
        return
    _refuse(fmt, np.isnan(value), "NaN", "Replace them, as by numpy.nan_to_num")
    if not fmt.signed:
        _refuse(fmt, value < 0, "negative values", "Take their absolute values")


def _refuse(fmt: _Layout, lacking: NDArray[np.bool_], what: str, remedy: str) -> None:
    count = int(np.count_nonzero(lacking))
    if count:
        raise ArgumentError(
            f"Format.encode: expected no {what}, for which {fmt.name} has no code; "
            f"got {count} of {lacking.size} values, the first{_place(lacking)}. {remedy}."
        )


def _place(where: NDArray[np.bool_]) -> str:
    index = tuple(int(i) for i in np.argwhere(where)[0])
    return f" at index {index[0] if len(index) == 1 else index}" if index else ""
