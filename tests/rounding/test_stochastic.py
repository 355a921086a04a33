"""Stochastic rounding: seeded, the same everywhere, and without bias beyond a computed bound."""

import math

import numpy as np
import pytest
import torch

from plimsoll import cast, kernels, pack, unpack
from plimsoll.formats import E4M3
from plimsoll.kernels import philox
from plimsoll.kernels.numba_backend.casting import launch
from plimsoll.kernels.operators.cast_spec import STOCHASTIC, CastSpec
from tests.support.cases import each

BACKENDS = [status.name for status in kernels.report() if status.available]
FORMATS = ["e4m3", "fp16", "bf16", "e2m1", "e5m7", "mxfp8_e5m2", "nvfp4"]
SIGMAS = 5.0  # a right implementation fails such a test less than once in a million


@each("fmt", FORMATS)
def test_one_seed_gives_one_result_on_every_backend(fmt):
    x = torch.randn(37, 97)
    results = []
    for name in BACKENDS:
        with kernels.use(name):
            results.append(cast(x, fmt, rounding="stochastic", generator=1234))
            results.append(unpack(pack(x, fmt, rounding="stochastic", generator=1234)))
    for result in results:
        assert torch.equal(result, results[0])


def test_seed_key_and_generator():
    x = torch.randn(5000)

    def draw(generator=None):
        return cast(x, "e4m3", rounding="stochastic", generator=generator)

    assert torch.equal(draw(7), draw(torch.tensor(7))) and torch.equal(draw(-1), draw(2**64 - 1))
    assert not torch.equal(draw(7), draw(8)) and not torch.equal(draw(7), draw(7 + 2**40))
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    sequence = [draw(first), draw(first)]
    assert torch.equal(sequence[0], draw(second)) and not torch.equal(sequence[0], sequence[1])
    torch.manual_seed(5)
    default = draw()
    torch.manual_seed(5)
    assert torch.equal(default, draw()) and not torch.equal(default, draw())


@each("backend", [name for name in BACKENDS if name != "triton"])
@each("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@each(
    ("fmt", "low", "high"),
    [
        ("e4m3", 1.0, 1.125),  # a normal spacing
        ("e4m3", 2.0**-9, 2.0**-8),  # a subnormal one
        ("e4m3", 0.0, 2.0**-9),  # down to zero
        ("e4m3", 0.0, 2.0**-19),  # a thousandth of the smallest value: what nearest rounding loses whole
        ("fp16", 2.0**-24, 2.0**-23),
        ("bf16", 100.0, 100.5),
        ("e2m1", 4.0, 6.0),
    ],
)
def test_the_mean_error_is_within_its_bound(backend, dtype, fmt, low, high):
    """Each error has mean 0 and lies within one spacing q: the mean of n has a deviation of at most q/2 / sqrt(n).

    For the thousandth part p of a spacing, that of a coin with this p. The noise has 32 bits: 2**-32 q is added.
    """
    count = 1 << 18
    x = (low + (high - low) * torch.rand(count, dtype=torch.float64)).to(dtype)
    x[1::2] *= -1
    spacing = max(high - low, 2.0**-9 if fmt == "e4m3" else 0.0)
    with kernels.use(backend):
        found = cast(x, fmt, rounding="stochastic", generator=99, dtype=torch.float64)
    error = (found - x.double()) / spacing
    p = ((x.double().abs() - low) / spacing).clamp(0, 1)
    deviation = math.sqrt(float((p * (1 - p)).sum())) / count
    assert abs(float(error.mean())) <= SIGMAS * deviation + 2.0**-32
    outward = error * x.double().sign()
    assert abs(float(outward.mean())) <= SIGMAS * deviation + 2.0**-32
    assert float(error.abs().max()) < 1
    assert (fmt, dtype) == ("bf16", torch.bfloat16) or float((found != x.double()).double().mean()) > 0.0002


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_the_chance_of_rounding_up_is_the_discarded_part(backend):
    count = 1 << 17
    for eighths in range(9):
        x = torch.full((count,), 1 + eighths / 64)
        with kernels.use(backend):
            ups = float((cast(x, "e4m3", rounding="stochastic", generator=eighths) == 1.125).double().mean())
        p = eighths / 8
        assert abs(ups - p) <= SIGMAS * math.sqrt(p * (1 - p) / count)


def test_noise_is_independent_from_value_to_value():
    count = 1 << 16
    ups = (cast(torch.full((count,), 1 + 1 / 16), "e4m3", rounding="stochastic", generator=0) == 1.125).double() - 0.5
    for lag in (1, 2, 4, 64, 256, 512, 1024):
        correlation = float((ups[:-lag] * ups[lag:]).mean()) * 4
        assert abs(correlation) < SIGMAS / math.sqrt(count - lag)


def test_indices_beyond_32_bits_have_noise_of_their_own():
    """The CPU kernel at a place no test could fill memory up to, against the reference words of that place."""
    start, count = (1 << 33) + 700, 3000
    x, out = torch.full((count,), 1 + 1 / 16), torch.empty(count)
    spec = CastSpec.of(E4M3, STOCHASTIC, saturate=True)
    launch._cast_flat(x, out, spec, 1.0, np.uint64(42), start)
    up = philox.words(torch.tensor(42), count, start) < 1 << 31
    assert torch.equal(out, torch.where(up, 1.125, 1.0))
    assert not torch.equal(up, philox.words(torch.tensor(42), count))


def test_overflow_is_drawn_too():
    x = torch.full((4096,), 65504.0 + 16)
    found = cast(x, "fp16", rounding="stochastic", generator=1)
    infinite = float(found.isinf().double().mean())
    assert 0.45 < infinite < 0.55 and bool(((found == 65504) | found.isinf()).all())
    assert bool((cast(x, "fp16", rounding="stochastic", generator=1, saturate=True) == 65504).all())


def test_the_default_generator_under_compile_draws_anew_each_time():
    compiled = torch.compile(lambda x: cast(x, "e4m3", rounding="stochastic"), fullgraph=True)
    x = torch.randn(1000)
    assert not torch.equal(compiled(x), compiled(x))


def test_a_default_device_does_not_matter():
    x = torch.randn(40)
    expected = cast(x, "e4m3", rounding="stochastic", generator=torch.Generator().manual_seed(1))
    with torch.device("meta"):
        found = cast(x, "e4m3", rounding="stochastic", generator=torch.Generator(device="cpu").manual_seed(1))
    assert torch.equal(found, expected)
