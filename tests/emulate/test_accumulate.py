"""emulate(accumulate=): products summed in a format, in a stated order, against a scalar loop."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from tests.support.cases import each


def scalar_sum(a: list[float], b: list[float], fmt: str, chunk: int) -> float:
    """The stated order, one number at a time."""
    held = pl.formats.get(fmt)
    total = 0.0
    for start in range(0, len(a), chunk):
        part = sum(x * y for x, y in zip(a[start : start + chunk], b[start : start + chunk], strict=True))
        total = float(held.decode(held.encode(np.array([total + part])))[0])
    return total


@each("fmt", ["fp16", "bf16", "e5m2", "e6m9"])
@each("chunk", [1, 4, 7, 100])
def test_a_product_is_the_scalar_loops(fmt: str, chunk: int) -> None:
    a, b = torch.randn(3, 30).half(), torch.randn(30, 2).half()
    with pl.emulate(accumulate=fmt, chunk=chunk):
        y = a.float() @ b.float()
    expected = [[scalar_sum(r.tolist(), c.tolist(), fmt, chunk) for c in b.double().T] for r in a.double()]
    assert y.tolist() == expected


def test_fp16_sums_stop_growing_and_fp32_sums_do_not() -> None:
    x = torch.full((1, 4096), 0.1)
    exact = 4096 * float(torch.tensor(0.1).half()) ** 2
    results = {}
    for accumulate, chunk in (("fp32", 1), ("fp16", 1), ("fp16", 16)):
        with pl.emulate("fp16", accumulate=accumulate, chunk=chunk):
            results[accumulate, chunk] = (x @ x.T).item()
    assert results["fp32", 1] == pytest.approx(exact, rel=2**-11)
    assert results["fp16", 1] == 32.0  # from here on one product is less than half of the last digit
    assert results["fp16", 1] < results["fp16", 16] != pytest.approx(exact, rel=2**-11)


def test_fp16_sums_overflow_on_the_way() -> None:
    a, b = torch.tensor([[60000.0, 60000.0]]), torch.tensor([[1.0], [1.0]])
    with pl.emulate("fp16", accumulate="fp16"):
        assert (a @ b).item() == torch.inf
        assert (torch.cat([a, -a], 1) @ torch.ones(4, 1)).item() == torch.inf  # and does not come back
    with pl.emulate("fp16"):
        assert (torch.cat([a, -a], 1) @ torch.ones(4, 1)).item() == 0.0


def test_backward_products_sum_likewise() -> None:
    x, w = torch.ones(4096, 1), torch.ones(1, 1, requires_grad=True)
    with pl.emulate("fp16", accumulate="fp16"):
        y = x @ w
    y.sum().backward()
    assert w.grad is not None and w.grad.item() == 2048.0


CONVOLUTIONS: list[tuple[Callable[..., Tensor], int, dict[str, Any]]] = [
    (convolve, dims, settings)
    for dims, plain, transposed in (
        (1, F.conv1d, F.conv_transpose1d), (2, F.conv2d, F.conv_transpose2d), (3, F.conv3d, F.conv_transpose3d)
    )
    for convolve in (plain, transposed)
    for settings in ({}, {"groups": 2, "stride": 2, "padding": 1}, {"dilation": 2, "padding": 3}, {"stride": 3})
]  # fmt: skip


@each(("convolve", "dims", "settings"), CONVOLUTIONS)
def test_unfolded_convolutions_are_the_convolutions(convolve: Any, dims: int, settings: dict[str, Any]) -> None:
    transposed = "transpose" in convolve.__name__
    groups = settings.get("groups", 1)
    weight = (4, 6 // groups) if transposed else (6, 4 // groups)
    x = torch.randn(2, 4, *(8, 7, 6)[:dims], dtype=torch.float64, requires_grad=True)
    w = torch.randn(*weight, *(3, 2, 3)[:dims], dtype=torch.float64, requires_grad=True)
    b = torch.randn(6, dtype=torch.float64, requires_grad=True)
    extra = {"output_padding": 1} if transposed and "stride" in settings else {}
    expected = convolve(x, w, b, **settings, **extra)
    with pl.emulate(accumulate="fp64", chunk=3):
        y = convolve(x, w, b, **settings, **extra)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    g = torch.randn_like(y)
    for got, wanted in zip(
        torch.autograd.grad(y, (x, w, b), g), torch.autograd.grad(expected, (x, w, b), g), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_convolution_sums_channels_then_window() -> None:
    x, w = torch.randn(1, 3, 6).half().float(), torch.randn(1, 3, 2).half().float()
    with pl.emulate(accumulate="e5m4"):
        y = F.conv1d(x, w)
    for position in range(5):
        window = x[0, :, position : position + 2].flatten().tolist()
        assert y[0, 0, position].item() == scalar_sum(window, w.flatten().tolist(), "e5m4", 1)


def test_a_whole_model_runs_with_narrow_sums() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    expected = model(x)
    with pl.emulate("fp16", accumulate="fp16"):
        y = model(x)
    y.sum().backward()
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    with pl.emulate("fp16"):
        assert not torch.equal(y, model(x))
