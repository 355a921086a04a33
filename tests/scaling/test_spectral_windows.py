"""Windows of scales against scaling the gradient itself and counting what FP16 makes of it."""

import math

import numpy as np
import torch

from plimsoll import kernels
from plimsoll.formats import E5M2, FP16, Format
from plimsoll.scaling import ScaleReport, ScaleWindow
from plimsoll.scaling.spectral.scale_windows import scale_report
from tests.support.cases import each


def report(*tensors: torch.Tensor, scale: float = 1.0, fmt: Format = FP16, tolerance: float = 0.01) -> ScaleReport:
    bank = kernels.new_bank(len(tensors))
    kernels.measure_into(tensors, bank, range(len(tensors)))
    return scale_report(bank.numpy(), [f"t{i}" for i in range(len(tensors))], scale, fmt, tolerance)


def fits(gradient: torch.Tensor, exponent: int, tolerance: float) -> bool:
    held = (gradient.double() * 2.0**exponent).to(torch.float16)
    lost = int(((held == 0) & (gradient != 0)).sum()) / max(int((gradient != 0).sum()), 1)
    return bool(held.isfinite().all()) and lost < tolerance


@each("tolerance", [0.001, 0.01, 0.2])
@each("seed", range(4))
def test_the_window_is_what_scaling_the_gradient_shows(seed: int, tolerance: float) -> None:
    random = torch.Generator().manual_seed(seed)
    spread = torch.randn(5000, generator=random) * (1 + 2 * seed)
    gradient = torch.randn(5000, generator=random) * torch.exp2(spread - 10)
    (window,) = report(gradient, tolerance=tolerance).tensors
    assert fits(gradient, window.high, 1.1) and not fits(gradient, window.high + 1, 1.1)
    if window.low <= window.high:
        assert all(fits(gradient, k, tolerance) for k in range(window.low, window.high + 1))
    assert not fits(gradient, window.low - 2, tolerance), "at most one binade of caution"


def test_the_scale_in_the_gradients_is_undone() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    (bare,), (scaled,) = report(gradient).tensors, report(gradient * 2.0**12, scale=2.0**12).tensors
    assert bare == scaled


@each(
    ("value", "high"),
    [(65504.0, 0), (65519.99, 0), (65520.0, -1), (32760.0, 0), (32759.0, 1), (1.0, 15), (2.0**-140, 155)],
)
def test_the_upper_end_is_exact(value: float, high: int) -> None:
    assert report(torch.tensor([value], dtype=torch.float64)).tensors[0].high == high


def test_another_format() -> None:
    (window,) = report(torch.ones(10), fmt=E5M2).tensors
    assert (window.low, window.high) == (-16, 15)


def test_zeros_are_left_out_and_nothing_else_is() -> None:
    found = report(torch.zeros(5), torch.ones(5), torch.zeros(0))
    assert [t.name for t in found.tensors] == ["t1"]
    assert report(torch.zeros(3)).window is None and report(torch.zeros(3)).finding is None


def test_what_fp16_has_lost_already_asks_for_more() -> None:
    random = torch.Generator().manual_seed(0)
    true = torch.exp2(-30 + 9 * torch.rand(20_000, generator=random))  # a third of it is gone
    held = true.to(torch.float16)
    (seen,) = report(held, tolerance=0.01).tensors
    assert seen.low >= 4, "the values that are left would ask for 0"
    assert report(held[held != 0]).tensors[0].low <= 0, "no zeros, nothing lost"


def test_finding_names_the_tensors_that_span_too_far() -> None:
    wide = torch.cat([torch.full((50,), 2.0**-40), torch.full((50,), 2.0**10)])
    wider = torch.cat([torch.full((50,), 2.0**-50), torch.full((50,), 2.0**10)])
    found = report(torch.ones(10), wide, wider)
    assert found.window is None
    assert [(t.name, t.excess) for t in found.too_wide] == [("t2", 21), ("t1", 11)]
    assert found.finding == (
        "no scale fits: the gradients of 2 of 3 tensors span more binades than fp16 has: t2 by 21, t1 by 11"
    )


def test_finding_names_the_pair_that_has_no_scale_in_common() -> None:
    found = report(torch.full((10,), 2.0**-30), torch.ones(10), torch.full((10,), 2.0**12))
    assert found.window is None and not found.too_wide
    assert found.finding == (
        "no single scale fits: in fp16 the gradient of t0 needs at least 2**6, and that of t2 at most 2**3, "
        "3 binades less"
    )


def test_joint_window_and_text() -> None:
    found = report(torch.ones(10), torch.full((10,), 2.0**-20), scale=1.0)
    assert found.window == (-4, 15) and found.finding is None
    assert str(found).splitlines() == [
        "fp16, scale 2**0, scales that fit all 2: 2**-4 to 2**15",
        "  t0: 2**-24 to 2**15",
        "  t1: 2**-4 to 2**35",
    ]
    assert ScaleWindow(name="x", low=3, high=5).excess == 0


def test_a_random_bank_agrees_with_a_scalar_reference() -> None:
    random = np.random.default_rng(0)
    tensors = [torch.from_numpy(2.0 ** random.uniform(-60, 10, 300)) for _ in range(30)]
    for tensor, window in zip(tensors, report(*tensors).tensors, strict=True):
        values = sorted(tensor.tolist())
        binades = [math.floor(math.log2(value)) for value in values]
        low = next(k for k in range(-300, 300) if sum(b + k < -24 for b in binades) < 3)
        assert window.low == low
