"""decode and encode against two other libraries, ml_dtypes and gfloat, and what they are known to do otherwise."""

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from gfloat.types import Domain

from plimsoll.errors import ArgumentError
from plimsoll.formats import E4M3, E8M0, ELEMENTS, Format, get, get_element
from tests.support.cases import each
from tests.support.formats import scalar_reference as scalar
from tests.support.formats.edge_values import edges

E4M3_IEEE = Format(name="e4m3ieee", exponent_bits=4, mantissa_bits=3, bias=7)
E4M3B11 = Format(name="e4m3b11fnuz", exponent_bits=4, mantissa_bits=3, bias=11, specials="fnuz")
ML_DTYPES = [
    (get_element("bf16", "test"), ml_dtypes.bfloat16),
    (get_element("e5m2", "test"), ml_dtypes.float8_e5m2),
    (get_element("e4m3", "test"), ml_dtypes.float8_e4m3fn),
    (get_element("e5m2fnuz", "test"), ml_dtypes.float8_e5m2fnuz),
    (get_element("e4m3fnuz", "test"), ml_dtypes.float8_e4m3fnuz),
    (get_element("e3m2", "test"), ml_dtypes.float6_e3m2fn),
    (get_element("e2m3", "test"), ml_dtypes.float6_e2m3fn),
    (get_element("e2m1", "test"), ml_dtypes.float4_e2m1fn),
    (get_element("e8m0", "test"), ml_dtypes.float8_e8m0fnu),
    (get_element("e3m4", "test"), ml_dtypes.float8_e3m4),
    (E4M3_IEEE, ml_dtypes.float8_e4m3),
    (E4M3B11, ml_dtypes.float8_e4m3b11fnuz),
]
WIDE_TOO = [fmt for fmt in ELEMENTS if fmt.bits <= 16]
CARRIERS = [ml_dtypes.bfloat16, np.float16, np.float32]  # ml_dtypes takes float64 through float32: rounded twice

FORMATS = [*WIDE_TOO, E4M3_IEEE, E4M3B11, *map(get, ("e3m4", "e5m7", "e6m9"))]


def same(found, expected) -> None:
    """Assert equal values, zeros of equal signs."""
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found) & ~np.isnan(found), np.signbit(expected) & ~np.isnan(expected))


def word(fmt: Format) -> type:
    return np.uint8 if fmt.bits <= 8 else np.uint16


def inputs(fmt: Format, carrier: type) -> np.ndarray:
    """Every pattern of a 16-bit carrier; of the wider ones a seeded sample and the format's own edges."""
    if np.dtype(carrier).itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(carrier)
    bits = np.dtype(f"u{np.dtype(carrier).itemsize}")
    sample = np.random.default_rng(0).integers(0, np.iinfo(bits).max, 20_000, bits, endpoint=True).view(carrier)
    top = {"ieee": "inf and nan", "fn": "one nan", "fnuz": "numbers, nan at -0", "none": "numbers"}[fmt.specials]
    spec = scalar.Spec(fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, top, fmt.signed)
    with np.errstate(invalid="ignore"):
        return np.concatenate([sample, edges(spec, carrier)])


def as_float64(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaN
        return values.astype(np.float64)


@each(("fmt", "theirs"), ML_DTYPES)
def test_ml_dtypes_decodes_every_code_alike(fmt, theirs):
    codes = np.arange(1 << fmt.bits).astype(word(fmt))
    same(fmt.decode(codes), as_float64(codes.view(theirs)))


@each("carrier", CARRIERS, ids=lambda carrier: np.dtype(carrier).name)
@pytest.mark.parametrize(("fmt", "theirs"), ML_DTYPES, ids=lambda value: getattr(value, "name", ""))
def test_ml_dtypes_encodes_every_value_alike(fmt, theirs, carrier):
    values = inputs(fmt, carrier)
    exact = as_float64(values)
    if not fmt.has_nan:  # there ml_dtypes turns NaN into zero; encode refuses it
        values, exact = values[~np.isnan(exact)], exact[~np.isnan(exact)]
    if not fmt.signed:
        values, exact = values[~ml_dtypes_differs_on_e8m0(exact)], exact[~ml_dtypes_differs_on_e8m0(exact)]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = as_float64(values.astype(theirs))
    # ml_dtypes never saturates where there is an Inf or NaN to overflow to.
    saturate = None if fmt.specials == "none" else False
    same(fmt.decode(fmt.encode(values, saturate=saturate)), expected)


def ml_dtypes_differs_on_e8m0(values: np.ndarray) -> np.ndarray:
    """ml_dtypes makes zero NaN, rounds ties up whatever the code, and all between 2**-127 and 2**-126 up."""
    with np.errstate(invalid="ignore"):  # on some machines frexp warns of a signalling NaN
        fraction = np.abs(np.frexp(values)[0])
    return (values == 0) | (fraction == 0.75) | ((values > 2.0**-127) & (values < 1.5 * 2.0**-127))


def test_ml_dtypes_known_disagreements_still_stand():
    """Should one of these fail, ml_dtypes has changed: take its exception out above."""
    e8m0 = ml_dtypes.float8_e8m0fnu
    assert np.isnan(np.float32(0).astype(e8m0).astype(np.float32))
    ties = np.array([1.5, 3.0], np.float32)
    assert ties.astype(e8m0).astype(np.float32).tolist() == [2.0, 4.0]
    assert E8M0.decode(E8M0.encode(ties)).tolist() == [2.0, 2.0]  # codes 127 (odd) and 128 (even)
    assert E8M0.decode(E8M0.encode(ties, rounding="nearest_away")).tolist() == [2.0, 4.0]
    assert float(np.float32(1.01 * 2.0**-127).astype(e8m0)) == 2.0**-126
    assert E8M0.decode(E8M0.encode(1.01 * 2.0**-127)) == 2.0**-127
    above_a_tie = np.nextafter(np.float64(1 + 2.0**-4), 2)
    assert float(above_a_tie.astype(ml_dtypes.float8_e4m3fn)) == 1.0
    assert E4M3.decode(E4M3.encode(above_a_tie)) == 1.125
    with np.errstate(invalid="ignore"):
        assert float(np.float32(np.nan).astype(ml_dtypes.float4_e2m1fn)) == 0.0


def gfloat_format(fmt: Format) -> gfloat.FormatInfo:
    high_nans = {"ieee": (1 << fmt.mantissa_bits) - 1, "fn": 1, "fnuz": 0, "none": 0}[fmt.specials]
    return gfloat.FormatInfo(
        fmt.name,
        fmt.bits,
        fmt.mantissa_bits + 1,
        bias=fmt.bias,
        is_signed=fmt.signed,
        domain=Domain.Extended if fmt.has_inf else Domain.Finite,
        has_nz=fmt.has_negative_zero,
        num_high_nans=high_nans,
        has_subnormals=fmt.has_subnormals,
        is_twos_complement=False,
    )


GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


@each("fmt", FORMATS)
def test_gfloat_describes_the_format_alike(fmt):
    info = gfloat_format(fmt)
    assert (info.max, info.smallest, info.eps) == (fmt.max, fmt.smallest_subnormal, fmt.epsilon)
    for name in ("ocp_e5m2", "ocp_e4m3", "ocp_e3m2", "ocp_e2m3", "ocp_e2m1", "ocp_e8m0", "binary16", "bfloat16"):
        theirs = getattr(gfloat.formats, f"format_info_{name}")
        if theirs.name.split("_")[-1] == fmt.name:
            assert dataclass_fields(theirs) == dataclass_fields(info)


def dataclass_fields(info: gfloat.FormatInfo) -> dict[str, object]:
    return {name: value for name, value in vars(info).items() if name != "name"}


@each("fmt", FORMATS)
def test_gfloat_decodes_every_code_alike(fmt):
    codes = np.arange(1 << fmt.bits)
    same(fmt.decode(codes), gfloat.decode_ndarray(gfloat_format(fmt), codes))


@each("saturate", [True, False])
@each("rounding", GFLOAT_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_gfloat_rounds_alike(fmt, rounding, saturate):
    if not fmt.has_nan and not saturate:
        beyond = np.array([-2 * fmt.max, 2 * fmt.max])
        if rounding != "toward_zero":  # which stops at the largest value
            with pytest.raises(ValueError, match="No Infs or NaNs in format"):
                gfloat.round_ndarray(gfloat_format(fmt), beyond, GFLOAT_MODES[rounding], sat=False)
        with pytest.raises(ArgumentError, match="which has neither Inf nor NaN to overflow to; got saturate=False"):
            fmt.encode(beyond, rounding=rounding, saturate=False)
        return
    values = as_float64(np.concatenate([as_float64(inputs(fmt, c)) for c in (ml_dtypes.bfloat16, np.float64)]))
    values = values[gfloat_can_take(fmt, values)]
    with np.errstate(all="ignore"):
        expected = gfloat.round_ndarray(gfloat_format(fmt), values, GFLOAT_MODES[rounding], sat=saturate)
    same(fmt.decode(fmt.encode(values, rounding=rounding, saturate=saturate)), expected)


def gfloat_can_take(fmt: Format, values: np.ndarray) -> np.ndarray:
    """Without a sign bit gfloat still rounds negative values; without subnormals it keeps those below the smallest."""
    takes = ~np.isnan(values) | fmt.has_nan
    return takes if fmt.signed else takes & ~(values < fmt.smallest_normal)
