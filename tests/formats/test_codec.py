"""decode and encode against the scalar reference: every code of every format that they take."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import BF16, E2M1, E4M3, E4M3FNUZ, E8M0, ELEMENTS, FP16, FP32, FP64, TF32, Format, codec, get
from tests.support.cases import each
from tests.support.formats import scalar_reference as scalar
from tests.support.formats.edge_values import edges

NARROW = [fmt for fmt in ELEMENTS if fmt.bits <= 16]
GENERIC = ["e2m0", "e4m0", "e2m2", "e3m4", "e5m1", "e5m7", "e8m5", "e6m9", "e11m4", "e11m0"]
CUSTOM = [
    Format(name="e4m3b11fnuz", exponent_bits=4, mantissa_bits=3, bias=11, specials="fnuz"),
    Format(name="high", exponent_bits=4, mantissa_bits=3, bias=-900, specials="none"),
    Format(name="low", exponent_bits=4, mantissa_bits=3, bias=1000, specials="fn"),
    Format(name="e1m2", exponent_bits=1, mantissa_bits=2, bias=1, specials="none"),
    Format(name="e5m0", exponent_bits=5, mantissa_bits=0, bias=15, specials="fn", signed=False),
]
FORMATS = [*NARROW, *map(get, GENERIC), *CUSTOM]
TOPS = {"ieee": "inf and nan", "fn": "one nan", "fnuz": "numbers, nan at -0", "none": "numbers"}

each_format = each("fmt", FORMATS, ids=lambda fmt: fmt.name)


def spec_of(fmt: Format) -> scalar.Spec:
    known = scalar.CATALOGUE.get(fmt.name)
    return known or scalar.Spec(fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, TOPS[fmt.specials], fmt.signed)


def same(found, expected) -> None:
    """Equal bit for bit, one NaN being as good as another."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found) & ~np.isnan(found), np.signbit(expected) & ~np.isnan(expected))


@each_format
def test_every_code_has_the_value_that_the_specification_gives(fmt):
    spec = spec_of(fmt)
    expected = [value for _, value in scalar.codes(spec)]
    same(fmt.decode(np.arange(1 << fmt.bits)), expected)
    assert fmt.max == float(spec.max) == max(v for v in expected if math.isfinite(v))
    assert fmt.has_inf == any(map(math.isinf, expected))
    assert fmt.has_nan == any(map(math.isnan, expected)) == spec.has_nan


@each_format
def test_every_code_comes_back_from_its_value(fmt):
    codes = np.arange(1 << fmt.bits)
    values = fmt.decode(codes)
    nan = np.isnan(values)
    back = fmt.encode(values[~nan])
    assert back.dtype == (np.uint8 if fmt.bits <= 8 else np.uint16)
    np.testing.assert_array_equal(back, codes[~nan])
    if fmt.has_nan:
        canonical = np.unique(fmt.encode(values[nan]))
        assert canonical.size == 1
        assert np.isnan(fmt.decode(canonical)).all()


@each("rounding", scalar.MODES)
@each(
    ("fmt", "saturate"),
    [(fmt, saturate) for fmt in FORMATS for saturate in (True, False) if saturate or fmt.has_inf or fmt.has_nan],
    ids=lambda value: value.name if isinstance(value, Format) else "saturating" if value else "overflowing",
)
def test_encode_rounds_as_the_reference_at_every_boundary(fmt, saturate, rounding):
    spec = spec_of(fmt)
    values = edges(spec, np.float64)
    if not fmt.has_nan:
        values = values[~np.isnan(values)]
    expected = [scalar.round_value(spec, value, rounding, saturate) for value in values.tolist()]
    same(fmt.decode(fmt.encode(values, rounding=rounding, saturate=saturate)), expected)


@each_format
def test_stochastic_rounding_compares_the_fraction_with_the_noise(fmt):
    spec = spec_of(fmt)
    values = np.concatenate([edges(spec, np.float64)[:-1], np.linspace(-3, 3, 1500) * fmt.smallest_normal])
    words = codec.words(-77, values.size).tolist()
    expected = [scalar.round_value(spec, v, "stochastic", True, w) for v, w in zip(values.tolist(), words, strict=True)]
    same(fmt.decode(fmt.encode(values, rounding="stochastic", saturate=True, generator=-77)), expected)


@each("fmt", [E4M3, FP16, E2M1], ids=lambda fmt: fmt.name)
@each("start", [0, 1, 2])
def test_the_noise_itself_is_the_threshold(fmt, start):
    words = codec.words(8, 3000).astype(np.float64)
    values = fmt.smallest_subnormal * (start + np.stack([words, words + 1]) / 2**32)
    stays, leaves = (fmt.encode(row, rounding="stochastic", generator=8) for row in values)
    assert (stays == start).all()
    assert (leaves == start + 1).all()


@each("value", [1.03, 0.9 * E4M3.smallest_subnormal, 2.7 * E4M3.smallest_subnormal])
def test_stochastic_rounding_is_unbiased(value):
    count = 1 << 16
    held = E4M3.decode(E4M3.encode(np.full(count, value), rounding="stochastic", generator=1))
    low, high = held.min(), held.max()
    assert low < value < high
    spread = math.sqrt((value - low) * (high - value) / count)  # of the mean of a two-point distribution
    assert abs(held.mean() - value) < 5 * spread


@each(
    ("values", "shape"),
    [
        (1.5, ()),
        (np.float16(1.5), ()),
        ([[1, 2, 3], [4, 5, 6]], (2, 3)),
        ([], (0,)),
        (np.zeros((2, 0, 3)), (2, 0, 3)),
        (np.arange(12.0).reshape(3, 4).T[::2], (2, 3)),
        (np.broadcast_to(np.float32(7), (2, 2)), (2, 2)),
        (np.arange(4, dtype=np.int8), (4,)),
        (np.array([True, False]), (2,)),
        (np.arange(3).astype(ml_dtypes.bfloat16), (3,)),
        (np.arange(3).astype(ml_dtypes.float8_e5m2), (3,)),
    ],
)
def test_encode_takes_what_numpy_takes_as_numbers(values, shape):
    codes = E4M3.encode(values)
    assert isinstance(codes, np.ndarray)
    assert (codes.shape, codes.dtype) == (shape, np.uint8)
    same(E4M3.decode(codes), np.asarray(values).astype(np.float64))
    assert E4M3.decode(codes).shape == shape


@each("codes", [0x38, [0x38], np.uint16(0x38), np.array([[0x38]], np.int8), np.array(0x38)])
def test_decode_takes_any_integers(codes):
    decoded = E4M3.decode(codes)
    assert isinstance(decoded, np.ndarray)
    assert decoded.shape == np.shape(codes)
    assert decoded.dtype == np.float64
    assert (decoded == 1.0).all()


def test_decode_of_nothing_is_nothing():
    assert E4M3.decode([]).shape == (0,)


def test_negative_zero_goes_where_the_format_can_keep_it():
    assert E4M3.encode(-0.0) == 0x80
    assert E4M3FNUZ.encode(-0.0) == 0
    assert E4M3FNUZ.encode(-1e-30) == 0
    assert E8M0.encode([0.0, -0.0]).tolist() == [0, 0]
    assert E8M0.encode([-1e-300, -np.inf]).tolist() == [255, 255]


@each(
    ("call", "message"),
    [
        (lambda: E4M3.decode([1, 256]), r"expected codes of e4m3 from 0 to 255; got 256 at index 1\. Mask the codes"),
        (lambda: E4M3.decode([[1, 2], [3, -1]]), r"from 0 to 255; got -1 at index \(1, 1\)"),
        (lambda: E4M3.decode(256), r"got 256\. Mask"),
        (lambda: E2M1.decode(16), "from 0 to 15; got 16"),
        (lambda: FP16.decode(1 << 16), "from 0 to 65535; got 65536"),
        (lambda: E4M3.decode([1.0]), "expected integer codes; got dtype float64"),
        (lambda: E4M3.decode([[1], [1, 2]]), "expected integer codes; got list"),
        (lambda: E4M3.encode(torch.ones(1, requires_grad=True)), "Format.encode: expected numbers; got Tensor"),
        (lambda: E4M3.decode([True]), "expected integer codes; got dtype bool"),
        (
            lambda: E2M1.encode([[1, np.nan], [np.nan, 2]]),
            r"expected no NaN, for which e2m1 has no code; got 2 of 4 values, the first at index \(0, 1\)\. Replace",
        ),
        (lambda: get("e5m0").encode(np.nan), r"e5m0 has no code; got 1 of 1 values, the first\. Replace"),
        (lambda: E2M1.encode(1.0, saturate=False), "expected True or None for e2m1"),
        (
            lambda: E4M3.encode(1.0, rounding="nearest"),
            r"expected rounding to be 'nearest_even', .*; got rounding='nearest'",
        ),
        (
            lambda: E4M3.encode(1.0, generator=3),
            r"generator with stochastic rounding only; got rounding='nearest_even'",
        ),
        (
            lambda: E4M3.encode(1.0, "stochastic", generator=True),
            r"expected generator to be an int, a numpy.*; got True \(bool\)",
        ),
        (lambda: E4M3.encode(1.0, "stochastic", generator=1.5), r"Generator or None; got 1\.5"),
        (lambda: E4M3.encode("1.5"), "expected real numbers that float64 holds; got dtype <U3"),
        (lambda: E4M3.encode([1j]), "got dtype complex128"),
        (lambda: E4M3.encode(np.longdouble(1)), r"got dtype .*128\. Convert them first"),
        (lambda: E4M3.encode([None]), "got dtype object"),
        (lambda: E4M3.encode([[1.0], [1.0, 2.0]]), "expected numbers; got list"),
        (lambda: E4M3.encode((1 << 53) + 1), r"expected integers up to 2\*\*53.*got int64 up to 9007199254740993"),
        (lambda: E4M3.encode(np.array([-(1 << 63)])), "up to 9223372036854775808"),
    ],
)
def test_refused_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_format_without_sign_and_nan_refuses_negative_values():
    fmt = Format(name="scale", exponent_bits=4, mantissa_bits=0, bias=7, specials="none", signed=False)
    with pytest.raises(ArgumentError, match=r"expected no negative values, for which scale has no code; got 1 of 2"):
        fmt.encode([1.0, -1.0])
    assert fmt.decode(fmt.encode([0.0, 3.5, 1e9])).tolist() == [2.0**-7, 4.0, 2.0**8]


@each(("fmt", "remedy"), [(TF32, r"plimsoll\.cast"), (FP32, r"numpy\.float32 and \.view"), (FP64, r"numpy\.float64")])
def test_wide_formats_say_what_to_use_in_their_place(fmt, remedy):
    for operation, call in (("encode", lambda: fmt.encode(1.0)), ("decode", lambda: fmt.decode(1))):
        with pytest.raises(
            FormatError, match=rf"Format\.{operation}: expected a format of at most 16 bits; .*{remedy}"
        ):
            call()


def test_generators_give_keys():
    values = np.linspace(-2, 2, 4096)

    def codes(generator):
        return E4M3.encode(values, rounding="stochastic", generator=generator).tolist()

    assert codes(5) == codes(5) != codes(6)
    assert codes(5) == codes(5 + (1 << 64))
    assert codes((1 << 64) - 1) == codes(-1)
    assert codes(np.random.default_rng(5)) == codes(np.random.default_rng(5)) != codes(np.random.default_rng(6))
    generator = np.random.default_rng(5)
    assert codes(generator) != codes(generator)
    assert codes(None) != codes(None)


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda fmt: fmt.name)
def test_encode_of_a_16_bit_format_is_the_machines_own(fmt):
    dtype = np.float16 if fmt is FP16 else ml_dtypes.bfloat16
    values = edges(spec_of(fmt), np.float32)[:-1]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(fmt.encode(values), values.astype(dtype).view(np.uint16))


@settings(max_examples=300, deadline=None)
@given(
    exponent_bits=st.integers(2, 11),
    mantissa_bits=st.integers(0, 9),
    value=st.floats(allow_nan=False),
    rounding=st.sampled_from(scalar.MODES),
)
def test_any_format_any_value_any_mode(exponent_bits, mantissa_bits, value, rounding):
    fmt = get(f"e{exponent_bits}m{min(mantissa_bits, 15 - exponent_bits)}")
    if not isinstance(fmt, Format):
        return
    spec = spec_of(fmt)
    expected = scalar.round_value(spec, value, rounding, saturate=not fmt.has_inf)
    same(fmt.decode(fmt.encode(value, rounding=rounding)), expected)
