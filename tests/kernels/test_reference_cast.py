"""Every backend's casts against the scalar reference and ml_dtypes: every 16-bit pattern, every boundary, every mode.

The same tests run on each backend that is usable here, through the public `cast` and `pack`. Triton's runs in its
interpreter, which takes some 30 ms a launch: it gets every 61st pattern, and the same boundaries.
"""

import functools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from plimsoll import cast, kernels, pack
from plimsoll.formats import BLOCKS, E4M3, E8M0, ELEMENTS, NVFP4, NVFP4_SINGLE, BlockFormat, Format, get, get_element
from plimsoll.kernels import philox
from tests.support.cases import each
from tests.support.formats import scalar_reference as scalar
from tests.support.formats.edge_values import edges

GENERIC = [get_element(name, "test") for name in ("e5m7", "e8m5", "e3m4", "e4m0", "e2m0", "e6m9", "e11m4", "e11m40")]
MX = [fmt for fmt in BLOCKS if not fmt.scale.signed]
RULES: tuple[scalar.Rule, ...] = ("floor", "ceil", "rceil", "even")
OVERFLOWS = [
    (fmt, saturate)
    for fmt in (*ELEMENTS, *GENERIC)
    for saturate in (True, False)
    if saturate or fmt.has_inf or fmt.has_nan
]
TRITON_STRIDE = 61


BACKENDS = [status.name for status in kernels.report() if status.available]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with kernels.use(request.param):
        yield request.param


def name_of(value):
    if isinstance(value, Format | BlockFormat):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def spec_of(fmt: Format) -> scalar.Spec:
    return scalar.CATALOGUE.get(fmt.name) or scalar.ieee(fmt.exponent_bits, fmt.mantissa_bits)


def same(found: torch.Tensor, expected) -> None:
    """Assert that all bits are equal, with any NaN equal to any other."""
    values, wanted = found.to(torch.float64).numpy(), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(np.signbit(values) & ~np.isnan(values), np.signbit(wanted) & ~np.isnan(wanted))


def every_pattern(dtype: torch.dtype, backend: str) -> torch.Tensor:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return patterns[::TRITON_STRIDE] if backend == "triton" else patterns


@functools.cache
def every_expected(fmt: Format, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The scalar reference's nearest-even results for all patterns: saturating, and not."""
    spec = spec_of(fmt)
    values = every_pattern(dtype, "all").to(torch.float64).numpy()
    overflowing = scalar.round_all(spec, values, saturate=False)
    beyond = ~np.isfinite(overflowing) & (np.abs(values) > float(spec.max)) & (spec.signed | (values > 0))
    return np.where(beyond, np.copysign(float(spec.max), values), overflowing), overflowing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@each("fmt", ELEMENTS, ids=name_of)
def test_every_16_bit_pattern(backend, fmt, dtype):
    x = every_pattern(dtype, backend)
    for saturate, expected in zip((True, False), every_expected(fmt, dtype), strict=True):
        if not saturate and not (fmt.has_inf or fmt.has_nan):
            continue
        wanted = expected[::TRITON_STRIDE] if backend == "triton" else expected
        same(cast(x, fmt, saturate=saturate, dtype=torch.float64), wanted)


ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16, "e5m2": ml_dtypes.float8_e5m2, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz, "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn, "e2m1": ml_dtypes.float4_e2m1fn, "e3m4": ml_dtypes.float8_e3m4,
}  # fmt: skip


@each("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@each("name", ML_DTYPES)
def test_every_16_bit_pattern_is_as_ml_dtypes_has_it(backend, name, dtype):
    """But for NaN where the format has none: ml_dtypes makes it zero. (E8M0: see tests/formats/test_oracles.py.)"""
    fmt = get_element(name, "test")
    x = every_pattern(dtype, backend)
    exact = x.to(torch.float64).numpy()
    narrow = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16
    with np.errstate(over="ignore", invalid="ignore"):
        expected = exact.astype(narrow).astype(ML_DTYPES[name]).astype(np.float64)
    expected = np.where(np.isnan(exact), np.nan, expected)
    saturate = None if fmt.specials == "none" else False
    same(cast(x, fmt, saturate=saturate, dtype=torch.float64), expected)


@functools.cache
def boundary_values(fmt: Format, carrier: type) -> torch.Tensor:
    return torch.from_numpy(edges(spec_of(fmt), carrier))


@functools.cache
def boundary_expected(fmt: Format, carrier: type, rounding: scalar.Mode, saturate: bool) -> np.ndarray:
    spec, values = spec_of(fmt), boundary_values(fmt, carrier).to(torch.float64).tolist()
    words = philox.words(torch.tensor(99), len(values)).tolist()
    pairs = zip(values, words, strict=True)
    return np.array([scalar.round_value(spec, value, rounding, saturate, word) for value, word in pairs])


@pytest.mark.parametrize("rounding", [*scalar.MODES, "stochastic"])
@each(("fmt", "saturate"), OVERFLOWS, ids=name_of)
def test_every_boundary_in_every_mode(backend, fmt, saturate, rounding):
    x = boundary_values(fmt, np.float32)
    generator = 99 if rounding == "stochastic" else None
    found = cast(x, fmt, rounding=rounding, saturate=saturate, generator=generator, dtype=torch.float64)
    same(found, boundary_expected(fmt, np.float32, rounding, saturate))


@each("rounding", [*scalar.MODES, "stochastic"])
@each("fmt", [*ELEMENTS[:5], E4M3, E8M0, GENERIC[-1]], ids=name_of)
def test_float64_is_rounded_once(backend, fmt, rounding):
    x = boundary_values(fmt, np.float64)
    generator = 99 if rounding == "stochastic" else None
    found = cast(x, fmt, rounding=rounding, saturate=True, generator=generator)
    assert found.dtype == torch.float64
    same(found, boundary_expected(fmt, np.float64, rounding, True))


@each("fmt", [get("bf16"), get("fp16"), E4M3, get("e5m2"), get("e2m1")], ids=name_of)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_the_result_is_in_the_dtype_of_the_input(backend, fmt, dtype):
    x = boundary_values(fmt, np.float32).to(dtype)
    found = cast(x, fmt)
    assert found.dtype == dtype
    wide = cast(x, fmt, dtype=torch.float64)
    carrier = spec_of(get_element(dtype, "test"))
    same(found, [scalar.round_value(carrier, value, "nearest_even", False) for value in wide.tolist()])


CARRIERS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@each("carrier", CARRIERS, ids=name_of)
def test_the_carrier_rounds_the_result_once_more_and_once_only(backend, carrier):
    """A value just above a tie of the carrier would be lost on the way through float32."""
    held = get_element(carrier, "test")
    x = boundary_values(held, np.float64)
    found = cast(x, "fp64", dtype=carrier)
    assert found.dtype == carrier
    same(found, boundary_expected(held, np.float64, "nearest_even", not held.has_inf))


@each("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=name_of)
@each("fmt", [E4M3, get("e5m2"), get("e3m2"), get("e2m1"), get("e5m7")], ids=name_of)
def test_every_8_bit_code_as_input(backend, fmt, dtype):
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    expected = [scalar.round_value(spec_of(fmt), v, "nearest_even", True) for v in x.to(torch.float64).tolist()]
    same(cast(x, fmt, saturate=True, dtype=torch.float32), expected)


@each("scale", [1.0, 0.25, 2.0**20, 2.0**-20, 3.7, 1e-5])
@each("fmt", [E4M3, get("e5m2"), get("fp16"), get("e5m7")], ids=name_of)
def test_a_scale_multiplies_before_and_divides_after_in_float64(backend, fmt, scale):
    x = boundary_values(fmt, np.float32)
    scaled = (x.to(torch.float64) * scale).tolist()
    held = np.array([scalar.round_value(spec_of(fmt), value, "nearest_even", True) for value in scaled])
    same(cast(x, fmt, saturate=True, scale=scale, dtype=torch.float64), held / scale)


@each("fmt", [f for f in (*ELEMENTS, *GENERIC) if f.bits <= 16], ids=name_of)
def test_pack_gives_the_codes_that_encode_gives(backend, fmt):
    x = boundary_values(fmt, np.float32)
    x = x if fmt.has_nan else x[~x.isnan()]
    codes = pack(x, fmt).single_codes()
    np.testing.assert_array_equal(codes.numpy(), fmt.encode(x.numpy()))


@each("fmt", [E4M3, get("fp16"), get("e2m1")], ids=name_of)
@each("start", [0, 1, 2])
def test_the_noise_itself_is_the_threshold(backend, fmt, start):
    words = philox.words(torch.tensor(8), 3000).to(torch.float64)
    quantum = fmt.smallest_subnormal
    stays = cast(quantum * (start + words / 2**32), fmt, rounding="stochastic", generator=8)
    leaves = cast(quantum * (start + (words + 1) / 2**32), fmt, rounding="stochastic", generator=8)
    same(stays, np.full(3000, start * quantum))
    same(leaves, np.full(3000, (start + 1) * quantum))


@each("fraction", [0.5, 0.03, 2.0**-20, 1 - 2.0**-12])
@each("start", ["normal", "subnormal", "zero"])
@each("fmt", [E4M3, get("fp16"), get("e2m1")], ids=name_of)
def test_stochastic_rounding_is_unbiased(backend, fmt, start, fraction):
    quantum = fmt.smallest_subnormal
    low = {"normal": fmt.smallest_normal, "subnormal": quantum, "zero": 0.0}[start]
    value = low + fraction * quantum
    count = 1 << (12 if backend == "triton" else 17)
    x = torch.full((count,), value, dtype=torch.float64)
    ups = (cast(x, fmt, rounding="stochastic", generator=11) > low).sum().item()
    # The count of roundings away is binomial; the noise resolves fractions to 2**-32.
    assert abs(ups - fraction * count) <= 5 * math.sqrt(count * fraction * (1 - fraction)) + count * 2.0**-32


@functools.cache
def adversarial(fmt: BlockFormat) -> torch.Tensor:
    """Rows of one whole block and a ragged one, in float32: each row a way to get the scale or an element wrong."""
    rng = np.random.default_rng(4)
    f32, element = np.float32, fmt.element
    maxima: list[float] = []
    for exponent in (-149, -140, -127, -126, -30, -2, -1, 0, 1, 2, 3, 8, 9, 15, 60, 126, 127):
        power = 2.0**exponent
        full = element.max * 2.0 ** (exponent - element.max_exponent)
        to_even = power * (2 - 2.0 ** -(element.mantissa_bits + 1))
        for value in (power, full, to_even, power * 1.5):
            around = (np.nextafter(f32(value), f32(0)), f32(value), np.nextafter(f32(value), f32(np.inf)))
            maxima += [float(v) for v in around if 0 < v <= np.finfo(f32).max]
    rows = []
    for absmax in maxima:
        spread = rng.uniform(-1, 1, fmt.block + 5)
        ties = [fmt.element.magnitude(code) + fmt.element.magnitude(code + 1) for code in range(4)]
        row = (absmax * spread).astype(f32)
        row[3:7] = [f32(tie / 2 * 2.0 ** (math.frexp(absmax)[1] - 1 - element.max_exponent)) for tie in ties]
        row[:3] = [f32(absmax) * rng.choice([-1, 1]), 0.0, -0.0]
        row[fmt.block + 1] = f32(absmax)
        rows.append(np.clip(row, -f32(absmax), f32(absmax)))
    width = fmt.block + 5
    rows += [np.zeros(width), -np.zeros(width), np.full(width, 2.0**-149), np.full(width, -(2.0**-130))]
    for poison in (np.nan, np.inf, -np.inf):
        for place in (0, fmt.block - 1, fmt.block, width - 1):
            row = rng.standard_normal(width)
            row[place] = poison
            rows.append(row)
    rows += [rng.standard_normal(width) * np.exp(5 * rng.standard_normal(width)) for _ in range(20)]
    return torch.from_numpy(np.array(rows).astype(f32))


def split(x: torch.Tensor, block: int) -> list[list[list[float]]]:
    return [[row[i : i + block] for i in range(0, len(row), block)] for row in x.to(torch.float64).tolist()]


@functools.cache
def mx_expected(fmt: BlockFormat, rule: scalar.Rule, mode: scalar.Mode) -> list[list[scalar.Block]]:
    element = spec_of(fmt.element)
    return [
        [scalar.quantize_mx(block, element, rule, mode) for block in row] for row in split(adversarial(fmt), fmt.block)
    ]


def check_blocks(x, fmt, rule, expected, *, rounding="nearest_even") -> None:
    found = cast(x, fmt, rounding=rounding, scale_rule=rule, dtype=torch.float64)
    same(found, [[value for block in row for value in block.values] for row in expected])

    packed = pack(x, fmt, rounding=rounding, scale_rule=rule)
    assert packed.scales is not None
    scales = fmt.scale.decode(packed.scales.numpy())
    np.testing.assert_array_equal(scales, [[block.scale for block in row] for row in expected])
    elements = fmt.element.decode(packed.single_codes().numpy())
    wanted = [[0.0 if math.isnan(block.scale) else e for block in row for e in block.elements] for row in expected]
    same(torch.from_numpy(elements), wanted)


@pytest.mark.parametrize("rule", RULES)
@each("fmt", MX, ids=name_of)
def test_adversarial_mx_blocks(backend, fmt, rule):
    check_blocks(adversarial(fmt), fmt, rule, mx_expected(fmt, rule, "nearest_even"))


@pytest.mark.parametrize("rounding", scalar.MODES)
def test_mx_elements_round_in_every_mode(backend, rounding):
    fmt = get("mxfp4")
    check_blocks(adversarial(fmt), fmt, "floor", mx_expected(fmt, "floor", rounding), rounding=rounding)


@functools.cache
def nvfp4_tensors() -> dict[str, torch.Tensor]:
    hard = adversarial(NVFP4)
    finite = hard[hard.isfinite().all(dim=1)]
    ordinary = finite[(finite.abs().amax(dim=1) < 2.0**10) & (finite.abs().amax(dim=1) > 2.0**-31)]
    return {
        "all": hard,
        "finite": finite,
        "ordinary": ordinary,
        "small": finite[finite.abs().amax(dim=1) < 2.0**-100],
        "subnormal": finite[finite.abs().amax(dim=1) < 2.0**-126],
        "so small that the tensor's scale underflows": finite[finite.abs().amax(dim=1) < 2.0**-139],
        "zeros": torch.zeros(3, 21),
        "poisoned only": torch.full((2, 21), math.nan),
        "one ulp below": torch.full((1, 16), float(np.nextafter(np.float32(2688), np.float32(0)))),
        "noise": torch.from_numpy(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)),
    }


@functools.cache
def nvfp4_expected(name: str, rule: scalar.Rule) -> list[list[scalar.Block]]:
    x = nvfp4_tensors()[name]
    scale = scalar.tensor_scale(x.to(torch.float64).flatten().tolist())
    return [[scalar.quantize_nvfp4(block, scale, rule) for block in row] for row in split(x, 16)]


@pytest.mark.parametrize("rule", RULES)
@each("name", nvfp4_tensors())
def test_adversarial_nvfp4_tensors(backend, name, rule):
    x = nvfp4_tensors()[name]
    check_blocks(x, NVFP4, rule, nvfp4_expected(name, rule))
    assert pack(x, NVFP4).tensor_scale == scalar.tensor_scale(x.to(torch.float64).flatten().tolist())


@functools.cache
def without_tensor_scale(rule: scalar.Rule) -> list[list[scalar.Block]]:
    return [[scalar.quantize_nvfp4(block, 1.0, rule) for block in row] for row in split(nvfp4_tensors()["all"], 16)]


@each("rule", RULES)
def test_adversarial_blocks_without_a_tensor_scale(backend, rule):
    x = nvfp4_tensors()["all"]
    check_blocks(x, NVFP4_SINGLE, rule, without_tensor_scale(rule))
    assert pack(x, NVFP4_SINGLE).tensor_scale is None


def test_blocks_without_a_tensor_scale_follow_the_published_formula(backend):
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((32, 64)).astype(np.float32))
    blocks = x.reshape(32, 4, 16)
    scales = (blocks.abs().amax(dim=2) / 6).to(torch.float8_e4m3fn)
    packed = pack(x, NVFP4_SINGLE)
    assert torch.equal(packed.scales, scales.view(torch.uint8))
    assert packed.codes.shape == (32, 32) and packed.nbytes == 32 * 64 * 4.5 / 8
    held = cast(x, NVFP4_SINGLE).reshape(32, 4, 16) / scales.float()[:, :, None]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    wanted = blocks / scales.float()[:, :, None]
    nearest = (wanted.abs()[..., None] - values).abs().amin(dim=-1)
    torch.testing.assert_close((held - wanted).abs(), torch.maximum(nearest, wanted.abs() - 6))


@each("fmt", [get("mxfp8_e4m3"), get("mxfp4"), NVFP4, NVFP4_SINGLE], ids=name_of)
@each("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=name_of)
def test_blocks_of_other_dtypes_have_the_values_that_float32_has(backend, fmt, dtype):
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((8, 69)).astype(np.float32)).to(dtype)
    found = cast(x, fmt, dtype=torch.float64)
    same(found, cast(x.to(torch.float32), fmt, dtype=torch.float64))


@pytest.mark.parametrize("fmt", [get("mxfp8_e5m2"), NVFP4], ids=name_of)
def test_stochastic_blocks_take_the_noise_of_the_unpadded_index(backend, fmt):
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((40, 37)).astype(np.float32))
    words = philox.words(torch.tensor(5), x.numel()).reshape(x.shape).tolist()
    scale = scalar.tensor_scale(x.to(torch.float64).flatten().tolist())
    expected = []
    for row, noise in zip(split(x, fmt.block), words, strict=True):
        values: list[float] = []
        for block in row:
            nearest = (
                scalar.quantize_nvfp4(block, scale, "floor")
                if fmt is NVFP4
                else scalar.quantize_mx(block, spec_of(fmt.element), "floor")
            )
            divisor = nearest.scale * (scale if fmt is NVFP4 else 1.0)
            for value in block:
                word = noise[len(values)]
                held = scalar.round_value(spec_of(fmt.element), value / divisor, "stochastic", True, word)
                values.append(held * divisor)
        expected.append(values)
    same(cast(x, fmt, rounding="stochastic", generator=5, dtype=torch.float64), expected)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    exponent_bits=st.integers(2, 11),
    mantissa_bits=st.integers(0, 52),
    value=st.floats(allow_nan=True),
    rounding=st.sampled_from(scalar.MODES),
    saturate=st.booleans(),
)
def test_any_format_any_value_any_mode(exponent_bits, mantissa_bits, value, rounding, saturate):
    fmt = get_element(f"e{exponent_bits}m{mantissa_bits}", "test")
    if not fmt.has_inf:
        saturate = True
    expected = scalar.round_value(spec_of(fmt), value, rounding, saturate)
    x = torch.tensor([value], dtype=torch.float64)
    for name in BACKENDS:
        if name != "triton":
            with kernels.use(name):
                same(cast(x, fmt, rounding=rounding, saturate=saturate), [expected])
