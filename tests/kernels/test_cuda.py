"""The Triton kernels on a GPU against the CPU's: counts, extremes and codes bit for bit, sums to 1e-6."""

import math

import pytest
import torch
from torch import Tensor

import plimsoll as pl
from plimsoll import kernels
from tests.support.cases import each
from tests.support.spectra import assert_same_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: kernels run nowhere else")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
EDGES = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.5, 6e-8, 2.0**-133, -(2.0**-149), 65504.0, 3e38, 2.0**-14]


def values(dtype: torch.dtype, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator) * torch.exp2(
        torch.randint(-40, 20, (count,), generator=generator).float()
    )
    x[: len(EDGES)] = torch.tensor(EDGES)[:count]
    return x.to(dtype)


@each("dtype", DTYPES)
@each("block", [0, 32])
def test_measuring(dtype: torch.dtype, block: int) -> None:
    several = [values(dtype, count) for count in (1, 13, 1000, 4096, 100_001, 3_000_000)]
    matrix = values(dtype, 4096).reshape(64, 64)
    several += [matrix.t(), matrix[:, 3:50], matrix[:0]]
    rows = range(len(several))
    bank, expected = (kernels.new_bank(len(several), block, device) for device in ("cuda", "cpu"))
    kernels.measure_into([x.cuda() for x in several], bank, rows, block=block)
    kernels.measure_into(several, expected, rows, block=block)
    assert_same_rows(bank.cpu(), expected, 1e-6)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_updates_and_nonfinite_counts(dtype: torch.dtype) -> None:
    new = [values(dtype, count) for count in (5, 1000, 70_001)]
    old = [torch.where(torch.arange(len(x)) % 3 == 0, x, (x.double() * 1.01).to(dtype)) for x in new]
    push = [torch.where(torch.arange(len(x)) % 2 == 0, 0.0, 1.0) for x in new]
    results = []
    for device in ("cuda", "cpu"):
        bank, moves, counts = (
            kernels.new_bank(3, device=device),
            kernels.new_moves(3, device),
            kernels.new_counts(1, device),
        )
        here = [[x.to(device) for x in xs] for xs in (old, new, push)]
        kernels.update_into(*here, bank, range(3), moves)
        kernels.count_nonfinite_into(here[1], counts, 0)
        results.append((bank, moves.cpu(), counts.cpu()))
    (bank, moves, counts), (expected, expected_moves, expected_counts) = results
    assert_same_rows(bank.cpu(), expected, 1e-6)
    assert torch.equal(moves[:, :2], expected_moves[:, :2]) and torch.equal(counts, expected_counts)
    sumsq, expected_sumsq = (m[:, 2].view(torch.float64) for m in (moves, expected_moves))
    torch.testing.assert_close(sumsq, expected_sumsq, rtol=1e-6, atol=0, equal_nan=True)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("scale", [1.0, 2.0**-16, 0.3])
def test_unscaling(dtype: torch.dtype, scale: float) -> None:
    several = [values(dtype, count) for count in (1, 13, 1000, 4096, 100_001, 3_000_000)]
    matrix = values(dtype, 4096).reshape(64, 64)
    several += [matrix.t(), matrix[:, 3:50], matrix[:0]]
    finite = [x.nan_to_num(0.5, 2.0, -2.0).clamp(-1e4, 1e4) for x in several]
    for gradients, flag in ((several, 1.0), (finite, 0.0)):
        results = []
        for device in ("cuda", "cpu"):
            here = [x.clone().to(device) for x in gradients]
            bank, found = kernels.new_bank(len(here), device=device), torch.zeros(1, device=device)
            inverse = torch.tensor(scale, device=device)
            kernels.unscale_into(here, inverse, found, bank, range(len(here)))
            assert float(found) == flag
            results.append((here, bank))
        (here, bank), (expected, expected_bank) = results
        assert_same_rows(bank.cpu(), expected_bank, 1e-6)
        for one, other in zip(here, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("fmt", ["fp16", "bf16", "tf32", "e4m3", "e5m2", "e4m3fnuz", "e2m1", "e3m2", "e5m7"])
def test_casting(dtype: torch.dtype, fmt: str) -> None:
    x = values(dtype, 50_000)
    for rounding in ("nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"):
        arguments = {"rounding": rounding, "generator": 7 if rounding == "stochastic" else None}
        found, expected = pl.cast(x.cuda(), fmt, **arguments).cpu(), pl.cast(x, fmt, **arguments)
        same = (found == expected) | (found.isnan() & expected.isnan())
        assert same.all(), (rounding, x[~same][:3], found[~same][:3], expected[~same][:3])
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


@each("fmt", ["e4m3", "e2m1", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp4", "nvfp4"])
@each("dtype", [torch.float32, torch.bfloat16])
def test_packing_and_block_formats(fmt: str, dtype: torch.dtype) -> None:
    x = values(dtype, 64 * 96).reshape(64, 96).nan_to_num(0.5, 2.0, -2.0)
    on_gpu, on_cpu = pl.pack(x.cuda(), fmt), pl.pack(x, fmt)
    assert torch.equal(on_gpu.codes.cpu(), on_cpu.codes)
    if on_cpu.scales is not None:
        assert torch.equal(on_gpu.scales.cpu().view(torch.uint8), on_cpu.scales.view(torch.uint8))
    assert torch.equal(pl.unpack(on_gpu).cpu(), pl.unpack(on_cpu))
    assert torch.equal(pl.cast(x.cuda(), fmt).cpu(), pl.cast(x, fmt))
