"""The record: its fields, merging, scaling, and the round trip through JSON."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.kernels import torch_backend
from plimsoll.spectrum import BlockRecord, Grid, Source, Spectrum, measure
from tests.support.cases import each

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**-11, 1.0)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Whole multiples of 2^-11 up to 1, and the special values: sums of their fourth powers are exact in any order."""
    element = st.one_of(st.sampled_from(SPECIAL), st.integers(-(2**10), 2**10).map(lambda n: n * 2.0**-10))
    values = draw(st.lists(element, max_size=12))
    return torch.tensor(values, dtype=torch.float64).to(draw(st.sampled_from(DTYPES)))


@st.composite
def spectra(draw: st.DrawFn) -> Spectrum:
    source = draw(st.sampled_from([None, Source("fp16", 1024.0), Source("e4m3", 0.75), Source("bf16")]))
    s = measure(draw(tensors()), block=draw(st.sampled_from([None, 16, 32])), source=source)
    return dataclasses.replace(s, source=None, grid=None) if draw(st.booleans()) else s


@settings(max_examples=150)
@given(a=spectra(), b=spectra(), c=spectra())
def test_merging_is_associative_commutative_and_has_an_identity(a: Spectrum, b: Spectrum, c: Spectrum) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Spectrum.empty() == a == Spectrum.empty() + a
    assert sum([a, b, c]) == sum([a, b, c], Spectrum.empty()) == a + b + c


@settings(max_examples=60)
@given(x=tensors(), y=tensors(), block=st.sampled_from([None, 16]))
def test_merging_equals_measuring_together(x: torch.Tensor, y: torch.Tensor, block: int | None) -> None:
    merged = measure(x.double(), block=block) + measure(y.double(), block=block)
    # As rows of blocks that do not mix: the block record is then the same too.
    rows = [torch.nn.functional.pad(v.double(), (0, -len(v) % 16)) for v in (x, y)]
    if block is None:
        assert merged == measure(torch.cat([x.double(), y.double()]))
    else:
        padded = measure(rows[0], block=16) + measure(rows[1], block=16)
        assert padded == measure(torch.cat(rows), block=16)


@settings(max_examples=60)
@given(s=spectra())
def test_round_trips_keep_everything(s: Spectrum) -> None:
    text = json.dumps(s.to_dict(), allow_nan=False)
    for again in (Spectrum.from_dict(json.loads(text)), pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert again == s
        assert hash(again) == hash(s)
        assert not again.binades.flags.writeable


def full() -> Spectrum:
    """Every field differs from its default."""
    x = torch.tensor(
        [[1.5, -3.0, 0.0, math.inf] + [7.0] * 28, [math.nan, -math.inf, 0.1, 0.0] + [2.0] * 28, [0.0] * 32]
    )
    x = torch.cat([x, torch.full((1, 32), 0.3)])
    return measure(x, block=32, source=Source("fp32", 2.0))


def test_the_dictionary_holds_every_field_with_every_field_non_default() -> None:
    s, empty = full(), Spectrum.empty()
    for field in dataclasses.fields(Spectrum):
        value, default = getattr(s, field.name), getattr(empty, field.name)
        assert not np.array_equal(value, default), field.name
        assert field.name in s.to_dict()
    assert s.blocks is not None
    assert all(np.any(getattr(s.blocks, field.name)) for field in dataclasses.fields(BlockRecord))
    assert Spectrum.from_dict(json.loads(json.dumps(s.to_dict(), allow_nan=False))) == s
    assert s.to_dict()["version"] == 2


def test_equality_sees_every_field() -> None:
    s = full()
    for field in dataclasses.fields(Spectrum):
        value = getattr(s, field.name)
        other = value + 1 if isinstance(value, int | float) or field.name == "binades" else None
        assert dataclasses.replace(s, **{field.name: other}) != s, field.name
    assert s != "a spectrum"


def test_fields_are_plain_python_and_binades_cannot_be_written() -> None:
    s = full()
    for field in dataclasses.fields(Spectrum):
        if field.name not in ("binades", "source", "blocks", "grid"):
            assert type(getattr(s, field.name)) in (int, float), field.name
    for name in (
        "mean",
        "std",
        "rms",
        "norm",
        "absmean",
        "zero_fraction",
        "nonfinite",
        "finite",
        "nonzero",
        "kurtosis",
    ):
        assert type(getattr(s, name)) in (int, float), name
    with pytest.raises(ValueError, match="read-only"):
        s.binades[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.count = 1  # type: ignore[misc]
    assert s.binades.dtype == np.int64 and s.binades.shape == (277,)


def test_values_of_known_tensors() -> None:
    s = measure(torch.tensor([0.0, 1.0, -3.0, 0.5, math.nan, math.inf, -math.inf, -math.inf, -0.0]))
    assert (s.count, s.zeros, s.nans, s.pos_infs, s.neg_infs) == (9, 2, 1, 1, 2)
    assert (s.min, s.max, s.absmin, s.absmax) == (-3.0, 1.0, 0.5, 3.0)
    assert (s.sum, s.abssum, s.sumsq, s.sumfourth) == (-1.5, 4.5, 10.25, 82.0625)
    assert (s.finite, s.nonzero, s.nonfinite) == (5, 3, 4)
    assert (s.mean, s.absmean, s.rms, s.norm) == (-0.3, 0.9, math.sqrt(2.05), math.sqrt(10.25))
    assert s.std == pytest.approx(np.std([0.0, 1.0, -3.0, 0.5, 0.0]))
    assert s.zero_fraction == 2 / 9
    assert s.kurtosis == pytest.approx(82.0625 / 5 / 2.05**2, rel=1e-15)
    assert {i - 149: int(n) for i, n in enumerate(s.binades) if n} == {-1: 1, 0: 1, 1: 1}


@each(
    ("values", "expected"),
    [
        ([2.0, 3.0], (2.0, 3.0, 2.0, 3.0)),
        ([-2.0, -3.0], (-3.0, -2.0, 2.0, 3.0)),
        ([0.0, 3.0], (0.0, 3.0, 3.0, 3.0)),
        ([-0.0, -3.0], (-3.0, 0.0, 3.0, 3.0)),
        ([0.0, -0.0], (0.0, 0.0, math.nan, 0.0)),
        ([-0.0], (0.0, 0.0, math.nan, 0.0)),
        ([math.nan, math.nan], (math.nan,) * 4),
        ([math.inf, -math.inf], (math.nan,) * 4),
        ([], (math.nan,) * 4),
    ],
)
def test_extremes(values: list[float], expected: tuple[float, ...]) -> None:
    s = measure(torch.tensor(values, dtype=torch.float32))
    found = (s.min, s.max, s.absmin, s.absmax)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, expected, strict=True))
    assert all(math.copysign(1, x) == 1 for x in found if x == 0)
    assert (s.mean == s.mean) == bool(s.finite)
    assert s.norm == math.sqrt(sum(x * x for x in values if math.isfinite(x)))


def test_the_empty_spectrum() -> None:
    s = Spectrum.empty()
    assert (s.count, s.sum, s.abssum, s.sumsq, s.norm, s.source, s.blocks, s.grid) == (0, 0, 0, 0, 0, None, None, None)
    assert all(math.isnan(x) for x in (s.mean, s.std, s.rms, s.absmean, s.zero_fraction))
    assert measure(torch.empty(0), block=32).blocks is None


def test_norm_does_not_overflow_where_fp16_would() -> None:
    assert measure(torch.full((65536,), 300.0, dtype=torch.float16)).norm == 76800


def test_std_of_equal_and_of_huge_values() -> None:
    assert measure(torch.full((7,), 0.1)).std == 0
    assert measure(torch.full((2,), 1e200, dtype=torch.float64)).std == 0
    huge = measure(torch.tensor([1e200, -1e200], dtype=torch.float64))
    assert huge.sumsq == math.inf and huge.norm == math.inf and huge.std == 1e200
    assert Spectrum.from_dict(json.loads(json.dumps(huge.to_dict(), allow_nan=False))) == huge


@each(
    ("values", "expected"),
    [
        ([0.1] * 7, 1.0),
        ([-3.0, 3.0, 3.0], 1.0),
        ([5.0] + [0.0] * 99, 100.0),
        ([1.0, 2.0], 2 * 17 / 25),
        ([1.0, 2.0, math.nan, -math.inf], 2 * 17 / 25),
        ([2.0**-126, 2.0**127], 2.0),
        ([], math.nan),
        ([0.0, -0.0], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_kurtosis(values: list[float], expected: float) -> None:
    for factor in (1.0, 2.0**-20, 3.0):
        found = measure(torch.tensor(values, dtype=torch.float64) * factor).kurtosis
        assert found == pytest.approx(expected, rel=1e-14, nan_ok=True) and not found < 1


def test_kurtosis_of_normal_values_is_three() -> None:
    count = 100_000
    found = measure(torch.randn(count, generator=torch.Generator().manual_seed(0))).kurtosis
    assert abs(found - 3) < 5 * math.sqrt(24 / count)  # five standard errors


def test_kurtosis_is_not_known_where_fourth_powers_leave_the_range() -> None:
    for size in (1e78, 1e-82):
        s = measure(torch.tensor([size, 3 * size], dtype=torch.float64))
        assert math.isnan(s.kurtosis) and s.rms == pytest.approx(size * math.sqrt(5))
    assert measure(torch.tensor([1e76, 3e76], dtype=torch.float64)).kurtosis == pytest.approx(41 / 25)


def test_spectra_of_version_1_are_read_without_fourth_powers() -> None:
    s = full()
    old = {name: value for name, value in s.to_dict().items() if name != "sumfourth"} | {"version": 1}

    class OfVersion1:
        def __reduce__(self) -> tuple[object, tuple[object]]:
            return Spectrum.from_dict, (old,)

    for again in (Spectrum.from_dict(old), pickle.loads(pickle.dumps(OfVersion1()))):
        assert math.isnan(again.sumfourth) and math.isnan(again.kurtosis)
        assert dataclasses.replace(again, sumfourth=s.sumfourth) == s
        assert Spectrum.from_dict(json.loads(json.dumps(again.to_dict(), allow_nan=False))) == again
        assert math.isnan((again + s).sumfourth) and (again + s).sumsq == 2 * s.sumsq
        assert again.to_dict()["version"] == 2
    with pytest.raises(ArgumentError, match="expected version 2; got version=1"):
        Spectrum.from_dict({**old, "sumfourth": 1.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_subnormals_have_binades_of_their_own(dtype: torch.dtype) -> None:
    lowest = -149 if dtype == torch.float32 else -133
    x = torch.tensor([2.0**e for e in range(lowest, -125)], dtype=torch.float64).to(dtype)
    s = measure(x)
    assert s.binades[lowest + 149 : 149 - 125].tolist() == [1] * len(x)
    assert s.absmin == 2.0**lowest and int(s.binades.sum()) == len(x)


def test_float64_beyond_the_range_goes_to_the_end_binades() -> None:
    s = measure(torch.tensor([1e-300, 5e-324, 1e300, 2.0**128], dtype=torch.float64))
    assert s.binades[0] == 2 and s.binades[276] == 2
    assert (s.absmin, s.absmax) == (5e-324, 1e300)


def test_from_row_reads_every_word() -> None:
    bank = torch.zeros((2, row_layout.WIDE), dtype=torch.int64)
    torch_backend.measure([torch.tensor([[1.0, -4.0, 0.0, 0.5]])], bank, [1], True, 16)
    s = Spectrum.from_row(bank.numpy()[1], Source("bf16"), 16)
    assert (s.count, s.zeros, s.min, s.max, s.absmin, s.sum, s.sumsq, s.sumfourth) == (
        4, 1, -4.0, 1.0, 0.5, -2.5, 17.25, 257.0625
    )  # fmt: skip
    assert s.source == Source("bf16") and s.grid == Source("bf16").grid
    assert s.blocks is not None
    assert (s.blocks.block, s.blocks.blocks, s.blocks.depths[:4].tolist()) == (16, 1, [1, 0, 1, 1])
    assert Spectrum.from_row(bank.numpy()[0], None, 16) == Spectrum.empty()
    narrow = bank.numpy()[1, : row_layout.NARROW]
    assert Spectrum.from_row(narrow) == dataclasses.replace(s, source=None, grid=None, blocks=None)


def test_from_row_refuses_other_rows() -> None:
    with pytest.raises(ArgumentError, match=r"expected int64 words of shape \(289,\) for block=None; got float64"):
        Spectrum.from_row(np.zeros(289))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"shape \(848,\) for block=32; got int64 of shape \(289,\)"):
        Spectrum.from_row(np.zeros(289, dtype=np.int64), None, 32)
    damaged = np.zeros(289, dtype=np.int64)
    damaged[row_layout.COUNT] = 3
    with pytest.raises(ArgumentError, match=r"Spectrum.from_row: expected zeros \+ nans .* against count=3"):
        Spectrum.from_row(damaged)


def test_block_records_merge_only_with_their_like() -> None:
    x = torch.ones(64)
    with_16, with_32, without, none = measure(x, block=16), measure(x, block=32), measure(x), measure(x[:0])
    assert (with_32 + with_32).blocks is not None and (with_32 + with_32).blocks.blocks == 4
    assert (with_16 + with_32).blocks is None and (with_32 + without).blocks is None
    assert (with_32 + none).blocks == with_32.blocks == (none + with_32).blocks
    assert with_32.blocks not in (with_16.blocks, "a record")
    assert hash(with_32.blocks) == hash(measure(x, block=32).blocks)
    assert repr(with_32.blocks) == "BlockRecord(block=32, blocks=2, zero_blocks=0, nonfinite_blocks=0, poisoned=0)"


@each("shift", [-10, 0, 3, 120])
def test_scaled_is_measuring_the_scaled_tensor(shift: int) -> None:
    x = torch.tensor([0.0, 1.5, -3.0, 2.0**-24, math.nan], dtype=torch.float16)
    s = measure(x, block=16).scaled(shift)
    expected = measure(x.double() * 2.0**shift, block=16)
    assert dataclasses.replace(s, source=expected.source, grid=expected.grid) == expected
    assert s.source == Source("fp16", 2.0**-shift)
    assert s.grid == Grid(10, -24 + shift) == s.source.grid
    assert s.fit("fp16").subnormal == measure(x).fit("fp16", shift).subnormal


def test_scaled_fills_the_end_binades_and_does_not_come_back() -> None:
    s = measure(torch.tensor([1.0, 4.0]))
    assert s.scaled(-200).binades[0] == 2 and s.scaled(200).binades[276] == 2
    assert s.scaled(200).absmax == 2.0**202
    for away, back in ((-200, 200), (200, -1)):
        with pytest.raises(ArgumentError, match=r"Spectrum.scaled: expected values between 2\^-149 and 2\^128.*shift="):
            s.scaled(away).scaled(back)
    with pytest.raises(ArgumentError, match=r"expected a shift that keeps absmin=1.0 .* got shift=1023"):
        s.scaled(1023)


@each(
    ("x", "expected"),
    [
        ([], "<Spectrum: 0 values, from fp32>"),
        ([0.0, math.nan], "<Spectrum: 2 values, 50 % zero, 1 nonfinite, from fp32>"),
        ([1e-6, 1024.0], "<Spectrum: 2 values, |x| 2^-19.93 (1e-06) .. 2^10 (1024), 0 % zero, 0 nonfinite, from fp32>"),
    ],
)
def test_one_line_tells_what_is_there(x: list[float], expected: str) -> None:
    assert repr(measure(torch.tensor(x))) == str(measure(torch.tensor(x))) == expected


def test_small_fractions_are_not_shown_as_zero() -> None:
    x = torch.ones(10**6)
    x[0] = 0
    assert "0.0001 % zero" in repr(measure(x))
    assert "at scale 1024" in repr(measure(x, source=Source("fp16", 1024.0)))


def bad(**changes: object) -> dict[str, object]:
    return {**full().to_dict(), **changes}


def nested(part: str, **changes: object) -> dict[str, object]:
    data = full().to_dict()
    return {**data, part: {**data[part], **changes}}  # type: ignore[dict-item]


@each(
    ("data", "message"),
    [
        ("text", "expected a dictionary as of to_dict; got str"),
        ({}, "expected version 2; got version=None. Another version of plimsoll wrote it"),
        (bad(version=3), "expected version 2; got version=3"),
        (bad(extra=1), r"expected the keys of to_dict; got missing=\[\], unknown=\['extra'\]"),
        ({k: v for k, v in full().to_dict().items() if k != "sum"}, r"got missing=\['sum'\], unknown=\[\]"),
        (
            bad(count=5),
            r"expected zeros \+ nans \+ infs \+ sum\(binades\) to equal count; got 34 \+ 1 \+ 2 \+ .* count=5",
        ),
        (bad(count=-1), "expected a count of zero or more; got count=-1"),
        (bad(count=True), "expected an integer; got count=True"),
        (bad(nans=1.0), r"expected an integer; got nans=1\.0"),
        (bad(sum="many"), 'expected a number, "nan", "inf" or "-inf"; got sum=\'many\''),
        (bad(sum=None), "got sum=None"),
        (bad(sum=10**400), "got sum=1000"),
        (nested("grid", mantissa_bits=53, quantum_exponent=-(10**9)), "a grid of at most 52 mantissa bits"),
        (
            bad(binades=[[128, 1]]),
            r"expected binades as a list of \[exponent, count\], .* -149 to 127.* got \[128, 1\]",
        ),
        (bad(binades=[[0, 1], [0, 2]]), r"each exponent once .* got \[0, 2\]"),
        (bad(binades=[[0, 0]]), r"each count positive; got \[0, 0\]"),
        (bad(binades=[[0, 1, 2]]), r"got \[0, 1, 2\]"),
        (bad(binades={"0": 1}), r"got \{'0': 1\}"),
        (bad(min="nan"), "expected min, max and absmax where there are finite values"),
        (bad(absmin="nan"), "expected absmin where there are finite nonzero values"),
        (bad(min=8.0), "expected min <= max, and absmax the larger of their magnitudes"),
        (bad(absmin=2.0), "expected absmin and absmax in the first and the last binade with values"),
        (nested("grid", mantissa_bits=1), "expected extremes on the grid"),
        (nested("grid", quantum_exponent="1"), "from_dict: grid: expected an integer; got quantum_exponent='1'"),
        (nested("source", format=3), "from_dict: source: expected text; got format=3"),
        (nested("source", scale=-1.0), "Source: expected a positive, finite scale; got scale=-1.0"),
        (nested("blocks", blocks=9), r"expected zero_blocks \+ nonfinite_blocks \+ sum\(maxima\) to equal blocks"),
        (nested("blocks", poisoned=0), r"expected sum\(depths\) \+ poisoned to equal the nonzero finite values"),
        (nested("blocks", depths=[[-1, 1]]), r"blocks: expected depths as .* from 0 to 276"),
        (
            {**Spectrum.empty().to_dict(), "blocks": full().to_dict()["blocks"]},
            "expected no block record where there are no values",
        ),
    ],
)
def test_from_dict_refuses_what_cannot_be(data: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Spectrum.from_dict(data)


def test_adding_anything_else_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Spectrum.empty() + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        1 + Spectrum.empty()  # type: ignore[operator]
