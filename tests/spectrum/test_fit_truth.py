"""Fits against the truth: real tensors, cast by the reference, must lose and overflow what the intervals say."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from plimsoll.formats import (
    BF16,
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    FP16,
    FP32,
    FP64,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    NVFP4_SINGLE,
    BlockFormat,
    Format,
    get,
)
from plimsoll.kernels import torch_backend
from plimsoll.kernels.operators.cast_spec import BlockSpec, CastArguments, CastSpec
from plimsoll.spectrum import Fit, Interval, Source, Spectrum, measure
from tests.support.cases import each

ELEMENTS = (FP16, BF16, E4M3, E5M2, E4M3FNUZ, E2M1, FP32, get("e5m0"), get("e3m1"))
MX = (MXFP4, MXFP6_E2M3, MXFP8_E4M3, MXFP8_E5M2)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float64)


class Truth:
    """What became of the nonzero finite values, as fractions of them."""

    def __init__(self, values: torch.Tensor, lost: torch.Tensor, subnormal: torch.Tensor, over: torch.Tensor) -> None:
        counted = values.isfinite() & (values != 0)
        number = int(counted.sum())
        self.lost, self.subnormal, self.overflow = (
            int((which & counted).sum()) / number if number else 0.0 for which in (lost, subnormal, over)
        )

    def check(self, fit: Fit) -> None:
        for name in ("lost", "subnormal", "overflow"):
            interval, truth = getattr(fit, name), getattr(self, name)
            assert interval.low - 1e-12 <= truth <= interval.high + 1e-12, (name, truth, fit)
            assert 0 <= interval.low <= interval.estimate <= interval.high <= 1, (name, fit)
        assert not math.isnan(fit.snr_db)


def element_truth(x: torch.Tensor, fmt: Format, shift: int) -> Truth:
    values = x.to(torch.float64) * 2.0**shift
    held = torch_backend.from_codes(torch_backend.to_codes(values, CastSpec.of(fmt, 0, saturate=True), None), fmt).abs()
    if fmt.has_inf or fmt.has_nan:
        beyond = torch_backend.to_codes(values, CastSpec.of(fmt, 0, saturate=False), None)
        over = ~torch_backend.from_codes(beyond, fmt).isfinite()
    else:
        over = values.abs() >= fmt.overflow_threshold
        assert fmt.overflow_at_threshold
    return Truth(x, held == 0, (held > 0) & (held < fmt.smallest_normal), over)


def mx_truth(x: torch.Tensor, fmt: BlockFormat, shift: int) -> Truth:
    return block_truth(x.to(torch.float64) * 2.0**shift, fmt, None)


def block_truth(values: torch.Tensor, fmt: BlockFormat, tensor_scale: torch.Tensor | None) -> Truth:
    spec = BlockSpec.of(fmt, 0, 0)
    out = torch.empty_like(values)
    arguments = CastArguments(spec, tensor_scale=tensor_scale)
    torch_backend.block_cast(values, out, arguments)
    _, _, divisor = torch_backend._quantize_blocks(values, arguments)
    width = values.shape[1]
    per_value = divisor.expand(-1, -1, fmt.block).flatten(1)[:, :width]
    element, scaled = fmt.element, (values / per_value).abs()
    held = (out / per_value).abs()
    over = out.isnan() | (scaled > element.overflow_threshold)
    if element.overflow_at_threshold:
        over |= scaled == element.overflow_threshold
    return Truth(values, out == 0, (held > 0) & (held < element.smallest_normal), over & (per_value != 0))


# Values of every size, with the ends and the ties of common formats among them.
EDGES = [448.0, 464.0, 464.5, 65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14, 2.0**-149, 6.0,
         7.0, 0.25, 0.75, 2.0**-9, 2.0**-10, 57344.0, 61440.0, 0.0, -0.0, math.inf, -math.inf, math.nan]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn, widest: float = 40.0, columns: int = 1) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    seed, spread = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 1.0, 4.0, widest]))
    centre = draw(st.integers(-30, 20))
    size = columns * draw(st.integers(1, 6)) if columns > 1 else draw(st.integers(1, 60))
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size) * np.exp2(rng.normal(centre, spread, size))
    values = np.concatenate(
        [values, draw(hnp.arrays(np.float64, draw(st.integers(0, 3)), elements=st.sampled_from(EDGES)))]
    )
    rng.shuffle(values)
    return torch.from_numpy(values).to(dtype)


@settings(max_examples=200)
@given(x=tensors(), fmt=st.sampled_from((*ELEMENTS, FP64)), shift=st.integers(-40, 40))
@example(x=torch.tensor([464.0, 448.0]), fmt=E4M3, shift=0)
@example(x=torch.tensor([65520.0, 65519.0]), fmt=FP16, shift=0)
@example(x=torch.tensor([1e300, 5e-324, 1e-200, 2.0**-150], dtype=torch.float64), fmt=FP32, shift=3)
@example(x=torch.tensor([1e300, 5e-324, 1e-200, 2.0**-150], dtype=torch.float64), fmt=FP64, shift=-3)
def test_the_truth_lies_within_an_element_fit(x: torch.Tensor, fmt: Format, shift: int) -> None:
    element_truth(x, fmt, shift).check(uncensored(measure(x)).fit(fmt, shift))


@settings(max_examples=100)
@given(x=tensors(), y=tensors(), fmt=st.sampled_from(ELEMENTS), shift=st.integers(-30, 30))
def test_the_truth_lies_within_the_fit_of_a_merged_spectrum(
    x: torch.Tensor, y: torch.Tensor, fmt: Format, shift: int
) -> None:
    both = torch.cat([x.to(torch.float64), y.to(torch.float64)])
    element_truth(both, fmt, shift).check(uncensored(measure(x) + measure(y)).fit(fmt, shift))


@settings(max_examples=120)
@given(
    x=tensors(widest=60.0, columns=32),
    fmt=st.sampled_from(MX),
    shift=st.sampled_from([0, 0, 0, 1, -7, 100, -100, -140]),
    columns=st.sampled_from([32, 40]),
)
@example(x=torch.full((64,), 1e-40), fmt=MXFP8_E5M2, shift=0, columns=32)
@example(x=torch.full((64,), 1e300, dtype=torch.float64), fmt=MXFP4, shift=0, columns=32)
@example(x=torch.tensor([1e-60, 1e-50, 3e-45], dtype=torch.float64), fmt=MXFP4, shift=140, columns=32)
def test_the_truth_lies_within_an_mx_fit(x: torch.Tensor, fmt: BlockFormat, shift: int, columns: int) -> None:
    x = torch.nn.functional.pad(x.double(), (0, -x.numel() % columns)).reshape(-1, columns).to(x.dtype)
    mx_truth(x, fmt, shift).check(uncensored(measure(x, block=32)).fit(fmt, shift))


@settings(max_examples=120)
@given(x=tensors(widest=12.0, columns=16), columns=st.sampled_from([16, 20, 48]))
def test_the_truth_lies_within_an_nvfp4_fit(x: torch.Tensor, columns: int) -> None:
    x = torch.nn.functional.pad(x.double(), (0, -x.numel() % columns)).reshape(-1, columns).to(x.dtype)
    s = measure(x, block=16)
    if s.nonzero:
        tensor_scale = torch.tensor(s.absmax / 2688, dtype=torch.float32)
        block_truth(x.to(torch.float64), NVFP4, tensor_scale).check(uncensored(s).fit(NVFP4))


@settings(max_examples=200)
@given(
    x=tensors(widest=30.0, columns=16),
    shift=st.sampled_from([0, 0, 0, 1, -7, 9, -20, 25]),
    columns=st.sampled_from([16, 20, 48]),
)
@example(x=torch.tensor([3136.0, 3135.0, 2688.0, 6.0]), shift=0, columns=16)
@example(x=torch.tensor([6 * 2.0**-10, 6 * 2.0**-9, 1.0]), shift=0, columns=16)
@example(x=torch.tensor([1e300, 1e-300], dtype=torch.float64), shift=0, columns=16)
def test_the_truth_lies_within_a_fit_without_a_tensor_scale(x: torch.Tensor, shift: int, columns: int) -> None:
    x = torch.nn.functional.pad(x.double(), (0, -x.numel() % columns)).reshape(-1, columns).to(x.dtype)
    s = measure(x, block=16)
    if s.nonzero:
        truth = block_truth(x.to(torch.float64) * 2.0**shift, NVFP4_SINGLE, torch.ones(()))
        truth.check(uncensored(s).fit(NVFP4_SINGLE, shift))


def uncensored(s: Spectrum) -> Spectrum:
    """The spectrum with its grid, and a source that says nothing was lost before: zeros count nowhere."""
    return Spectrum.from_dict({**s.to_dict(), "source": {"format": "fp32", "scale": 1.0}})


def noise_db(x: torch.Tensor, held: torch.Tensor) -> float:
    noise = (held - x).square().sum().item()
    return 10 * math.log10(x.square().sum().item() / noise) if noise else math.inf


GENERATOR = torch.Generator().manual_seed(5)
EVEN = (
    16 * torch.rand(2**15, dtype=torch.float64, generator=GENERATOR) - 8
)  # even within every binade, as estimates take it
GAUSSIAN = torch.randn(2**16, dtype=torch.float64, generator=GENERATOR)


@each("fmt", [FP16, E4M3, E5M2, E2M1])
@each("shift", [-28, -24, -14, -6, 0, 6, 14])
@each("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_estimates_and_noise_come_close_on_even_values(fmt: Format, shift: int, dtype: torch.dtype) -> None:
    x = EVEN.to(dtype)
    fit, truth = measure(x).fit(fmt, shift), element_truth(x, fmt, shift)
    for name in ("lost", "subnormal", "overflow"):
        assert getattr(fit, name).estimate == pytest.approx(getattr(truth, name), abs=0.01)
    scaled = x.double() * 2.0**shift
    held = torch.empty_like(scaled)
    torch_backend.cast(scaled, held, CastArguments(CastSpec.of(fmt, 0, saturate=True)))
    truth_db = noise_db(scaled, held)
    # Above 100 dB a handful of values makes all the noise; rounding to FP8 leaves no even spread over its few numbers.
    tolerance = 3.5 if truth_db > 100 else 1.0 if dtype == torch.float8_e5m2 else 0.35
    assert fit.snr_db == pytest.approx(truth_db, abs=tolerance)


@each("fmt", [*MX, NVFP4, NVFP4_SINGLE])
@each(("data", "fraction", "decibels"), [(EVEN, 0.02, 0.5), (GAUSSIAN, 0.025, 3.5)])
def test_estimates_and_noise_come_close_in_blocks(
    fmt: BlockFormat, data: torch.Tensor, fraction: float, decibels: float
) -> None:
    x = data.float().double().reshape(64, -1)
    s = measure(x.float(), block=fmt.block)
    tensor_scale = torch.tensor(s.absmax / 2688) if fmt.tensor_scale else torch.ones(()) if fmt.scale.signed else None
    fit, truth = s.fit(fmt), block_truth(x, fmt, tensor_scale)
    for name in ("lost", "subnormal", "overflow"):
        assert getattr(fit, name).estimate == pytest.approx(getattr(truth, name), abs=fraction)
    held = torch.empty_like(x)
    torch_backend.block_cast(x, held, CastArguments(BlockSpec.of(fmt, 0, 0), tensor_scale=tensor_scale))
    assert fit.snr_db == pytest.approx(noise_db(x, held), abs=decibels)


def test_nvfp4_blocks_far_below_the_largest_are_estimated_to_be_lost() -> None:
    x = torch.randn(64, 256, dtype=torch.float64)
    x[::2] *= 2.0**-30
    s = measure(x, block=16)
    fit, truth = s.fit("nvfp4"), block_truth(x, NVFP4, torch.tensor(s.absmax / 2688, dtype=torch.float32))
    assert truth.lost > 0.5
    assert fit.lost.estimate == pytest.approx(truth.lost, abs=0.02)
    truth.check(fit)


def test_the_e4m3_tie_at_464_goes_down_and_the_next_value_over() -> None:
    assert measure(torch.tensor([464.0])).fit("e4m3").overflow == Interval(low=0.0, high=0.0, estimate=0.0)
    above = torch.tensor(464.0).nextafter(torch.tensor(math.inf))
    assert measure(above).fit("e4m3").overflow == Interval(low=1.0, high=1.0, estimate=1.0)


def test_fp16_overflows_from_65520() -> None:
    assert measure(torch.tensor([65520.0])).fit("fp16").overflow.low == 1.0
    assert measure(torch.tensor([65519.996])).fit("fp16").overflow.high == 0.0


def test_the_source_grid_decides_what_binades_alone_cannot() -> None:
    x = torch.full((8,), 2.0**-24, dtype=torch.float16)
    x[:2] = 1.0
    tie = measure(x).fit("fp16", -1).lost
    assert tie.low == tie.estimate == tie.high == 0.75
    # The same values, carried by FP32 with no word of where they come from: the tie stays open.
    unknown = measure(torch.cat([x.float(), torch.tensor([1.9 * 2.0**-24])])).fit("fp16", -1).lost
    assert (unknown.low, unknown.high) == (1 / 9, 7 / 9)
    assert unknown.estimate == pytest.approx(1 / 9)


def test_a_declared_source_lends_its_grid_and_is_not_believed_against_the_extremes() -> None:
    x = torch.arange(1, 100).half() * 2.0**-24
    unscaled = x.float() / 1024
    s = measure(unscaled, source=Source("fp16", 1024.0))
    assert s.grid == Source("fp16", 1024.0).grid
    assert s.fit("fp16", 9).lost.exact
    assert s.fit("fp16", 9).lost.low == 1 / 99
    added_up = measure(unscaled + 1e-9, source=Source("fp16", 1024.0))
    assert added_up.grid == Source("fp32").grid
    assert added_up.source == Source("fp16", 1024.0)


def test_zeros_of_a_censored_spectrum_count_in_the_upper_bound_of_lost_only() -> None:
    x = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float16)
    assert measure(x).fit("bf16").lost == Interval(low=0.0, high=0.5, estimate=0.0)
    assert measure(x.float()).fit("bf16").lost == Interval(low=0.0, high=0.0, estimate=0.0)
    assert measure(x).window("bf16") is None
