"""Questions about formats: windows, best shifts, the published example, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from plimsoll.errors import ArgumentError, FormatError, NotRecordedError
from plimsoll.formats import E4M3
from plimsoll.spectrum import SHIFT_LIMIT, Fit, Interval, Source, Spectrum, measure
from tests.support.cases import each

NONE = Interval(low=0.0, high=0.0, estimate=0.0)
ALL = Interval(low=1.0, high=1.0, estimate=1.0)


@settings(max_examples=60)
@given(
    values=st.lists(st.tuples(st.floats(1.0, 1.999), st.integers(-30, 15)), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    fmt=st.sampled_from(["fp16", "e4m3", "e5m2", "e2m1", "bf16"]),
    tolerance=st.sampled_from([0.01, 0.3, 0.6, 1.0]),
)
@example(values=[(1.0, -24), (1.75, 8)], dtype=torch.float32, fmt="e4m3", tolerance=0.6)
def test_the_window_is_what_trying_every_shift_finds(
    values: list[tuple[float, int]], dtype: torch.dtype, fmt: str, tolerance: float
) -> None:
    s = measure(torch.tensor([f * 2.0**e for f, e in values], dtype=torch.float64).to(dtype))
    if not s.nonzero:
        return
    fits = {k: s.fit(fmt, k) for k in range(-190, 190)}
    serving = [k for k, fit in fits.items() if fit.overflow.high == 0 and fit.lost.high < tolerance]
    found = s.window(fmt, tolerance)
    assert found == ((serving[0], serving[-1]) if serving else None)
    assert not serving or serving == list(range(serving[0], serving[-1] + 1))
    best = s.best_shift(fmt, 0)
    assert best in (None, max(k for k, fit in fits.items() if fit.overflow.high == 0))


def test_best_shift_leaves_its_margin_and_no_more() -> None:
    s = measure(torch.tensor([1.0, 2.0**-3]))
    assert s.best_shift("fp16") == 14 and s.best_shift("fp16", 0) == 15 and s.best_shift("fp16", 5) == 10
    assert s.fit("fp16", 15).overflow == NONE and s.fit("fp16", 16).overflow.low == 0.5
    assert s.best_shift("e4m3", 0) == 8
    assert measure(torch.tensor([464.0 * 2.0**-8])).best_shift("e4m3", 0) == 8
    assert measure(torch.tensor([65520.0])).best_shift("fp16", 0) == -1


def test_best_shift_is_none_where_no_single_scale_serves() -> None:
    x = torch.cat([torch.full((50,), 2.0**-30), torch.full((50,), 2.0**14)])
    assert measure(x).best_shift("fp16") is None and measure(x).window("fp16") is None
    x = torch.cat([torch.full((1,), 2.0**-30), torch.full((199,), 2.0**14)])
    assert measure(x).best_shift("fp16") == 0 and measure(x).window("fp16") == (-38, 1)


def test_structural_zeros_of_fp16_do_not_forbid_a_best_shift() -> None:
    x = torch.tensor([0.0] * 9 + [1.0], dtype=torch.float16)
    assert measure(x).best_shift("fp16") == 14
    assert measure(x).window("fp16") is None


@each("x", [[], [0.0, -0.0], [math.nan, math.inf]])
@each("fmt", ["fp16", "mxfp4", "nvfp4"])
def test_without_nonzero_finite_values_nothing_is_lost(x: list[float], fmt: str) -> None:
    s = measure(torch.tensor(x))
    assert s.fit(fmt, 3) == Fit(format=fmt, shift=3, lost=NONE, subnormal=NONE, overflow=NONE, snr_db=math.inf)
    assert s.window("fp16") == (-SHIFT_LIMIT, SHIFT_LIMIT) == (-276, 276)
    assert s.best_shift("fp16") == 0


def test_zeros_alone_in_fp16_may_all_have_been_values() -> None:
    s = measure(torch.zeros(7, dtype=torch.float16))
    assert s.fit("bf16").lost == Interval(low=0.0, high=1.0, estimate=0.0)
    assert s.window("fp16") is None and s.best_shift("fp16") == 0


def test_activation_gradients_below_2_to_the_minus_27_do_not_matter_and_a_shift_of_3_rescues_the_others() -> None:
    """MISSION N3: of an SSD detector's gradients, those in [2^-27, 2^-24) are what FP16 needs a loss scale of 8 for."""
    generator = torch.Generator().manual_seed(3)

    def between(low: int, high: int, number: int) -> torch.Tensor:
        return torch.exp2(low + (high - low) * torch.rand(number, generator=generator, dtype=torch.float64)).float()

    negligible, rescued, held = between(-40, -27, 2000), between(-27, -24, 3000), between(-24, -8, 5000)
    negligible = negligible[negligible < 2.0**-28]
    s = measure(torch.cat([negligible, rescued, held, torch.zeros(20_000)]))
    total = len(negligible) + len(rescued) + len(held)
    before, after = s.fit("fp16"), s.fit("fp16", 3)
    assert before.lost.low * total >= len(negligible) + (rescued <= 2.0**-25).sum()
    assert after.lost.high * total == pytest.approx(len(negligible))
    assert after.lost.exact and after.overflow == NONE
    assert measure(rescued).fit("fp16", 3).lost == NONE
    assert measure(negligible).fit("fp16", 3).lost == ALL


def test_absmax_and_absmin_decide_the_binade_of_the_threshold() -> None:
    just_held, just_over = 65519.0, 65521.0
    assert measure(torch.tensor([40000.0, just_held])).fit("fp16").overflow == NONE
    one_over = measure(torch.tensor([40000.0, 40001.0, just_over])).fit("fp16").overflow
    assert (one_over.low, one_over.high) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert measure(torch.tensor([just_over, just_over + 1])).fit("fp16").overflow == ALL


def test_values_round_up_to_the_smallest_normal_one() -> None:
    quantum, normal = 2.0**-24, 2.0**-14
    s = measure(torch.tensor([normal - quantum / 2]))
    assert s.fit("fp16").subnormal == NONE
    assert measure(torch.tensor([normal - quantum])).fit("fp16").subnormal == ALL


def test_thresholds_beyond_float64_are_no_trouble() -> None:
    s = measure(torch.tensor([1.7e308, 5e-324], dtype=torch.float64))
    assert s.fit("fp64").overflow == NONE and s.fit("fp64").lost == NONE and s.fit("fp64").snr_db == math.inf
    assert s.fit("fp64", 1).overflow == Interval(low=0.5, high=0.5, estimate=0.5)
    assert s.fit("fp64", -1).lost == Interval(low=0.5, high=0.5, estimate=0.5)
    for shift in (-2200, 2200):
        fit = s.fit("fp16", shift)
        assert fit.lost.low + fit.overflow.low == 1
        assert math.isfinite(fit.snr_db)


def test_the_source_of_merged_tensors_is_the_narrowest_and_their_grid_the_finest() -> None:
    both = measure(torch.ones(1, dtype=torch.float16)) + measure(torch.ones(1))
    assert both.source == Source("fp16") and both.grid == Source("fp32").grid
    unknown = Spectrum.from_dict({**measure(torch.ones(1)).to_dict(), "source": None, "grid": None})
    assert (both + unknown).grid is None and (both + unknown).source == Source("fp16")


def test_a_name_a_format_and_a_dtype_ask_the_same() -> None:
    s = measure(torch.tensor([500.0, 1.0]))
    assert s.fit("E4M3") == s.fit(E4M3) == s.fit(torch.float8_e4m3fn)
    assert s.fit("e4m3").format == "e4m3"


@each("kind", [np.int8, np.int32, np.int64])
def test_a_shift_may_be_a_number_of_numpy(kind: type) -> None:
    s = measure(torch.randn(1000), block=32)
    shift = 2000 if kind is np.int64 else 3
    for fmt in ("fp16", "mxfp4"):
        assert s.fit(fmt, kind(shift)) == s.fit(fmt, shift)
    assert s.best_shift("fp16", kind(3)) == s.best_shift("fp16", 3)
    assert type(s.best_shift("fp16", kind(3))) is int
    assert s.scaled(kind(3)) == s.scaled(3)


def test_block_formats_need_their_block_record() -> None:
    x = torch.ones(64)
    message = r"Spectrum.fit: expected a spectrum measured with block=32 for mxfp4; got one {}\. "
    message += r"Measure with measure\(x, block=32\)"
    with pytest.raises(NotRecordedError, match=message.format("without a block record")):
        measure(x).fit("mxfp4")
    with pytest.raises(NotRecordedError, match=message.format("measured with block=16")):
        measure(x, block=16).fit("mxfp4")
    with pytest.raises(NotRecordedError, match="block=16 for nvfp4"):
        measure(x, block=32).fit("nvfp4")
    assert measure(x, block=32).fit("mxfp4").lost == NONE


def test_values_that_share_a_block_with_a_nan_or_inf_count_as_overflow() -> None:
    x = torch.ones(4, 32)
    x[0, 0] = math.nan
    fit = measure(x, block=32).fit("mxfp8_e4m3")
    assert fit.overflow.low == 31 / 127
    poisoned = measure(x[:1], block=32).fit("mxfp8_e4m3")
    assert poisoned.overflow == ALL and poisoned.lost == NONE


@each(
    ("ask", "error", "message"),
    [
        (
            lambda s: s.fit("e8m0"),
            FormatError,
            "Spectrum.fit: expected a format for values; got e8m0, which has no sign",
        ),
        (lambda s: s.window("e8m0"), FormatError, "Spectrum.window: expected a format for values; got e8m0"),
        (
            lambda s: s.window("mxfp4"),
            FormatError,
            "Spectrum.window: expected an element format; got the block format mxfp4",
        ),
        (
            lambda s: s.best_shift("nvfp4"),
            FormatError,
            "Spectrum.best_shift: expected an element format; got the block",
        ),
        (lambda s: s.fit("fp17"), FormatError, "formats.get: expected a format's name"),
        (
            lambda s: s.fit("fp16", 1.0),
            ArgumentError,
            r"Spectrum.fit: expected shift to be an integer .* got shift=1\.0",
        ),
        (lambda s: s.scaled(1.0), ArgumentError, r"Spectrum.scaled: expected shift to be an integer .* got shift=1\.0"),
        (lambda s: s.fit("fp16", True), ArgumentError, "got shift=True"),
        (lambda s: s.fit("fp16", 2201), ArgumentError, "from -2200 to 2200; got shift=2201. Shift k means"),
        (
            lambda s: s.window("fp16", 0),
            ArgumentError,
            "Spectrum.window: expected tolerance to be a number above 0 and of at most 1; got",
        ),
        (lambda s: s.window("fp16", math.nan), ArgumentError, "got tolerance=nan"),
        (
            lambda s: s.best_shift("fp16", -1),
            ArgumentError,
            "expected margin_binades to be an integer of at least 0; got margin_binades=-1",
        ),
        (lambda s: s.best_shift("fp16", 0.5), ArgumentError, "got margin_binades=0.5. It is the number of binades"),
    ],
)
def test_what_cannot_be_asked(ask: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(measure(torch.ones(3)))  # type: ignore[operator]


def test_an_interval_knows_what_it_holds() -> None:
    interval = Interval(low=0.25, high=0.5, estimate=0.3)
    assert 0.25 in interval and 0.5 in interval and 0.51 not in interval
    assert not interval.exact and NONE.exact
