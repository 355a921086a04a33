"""The product against its reference, what devices ask of operands, and torch's own product for CPUs beside it."""

import pytest
import torch
from torch import Tensor

from plimsoll import fp8
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.fp8 import products
from plimsoll.fp8.casting import by_formula
from plimsoll.kernels import fp8_cast
from tests.support.cases import each

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [(E4, E4), (E5, E4), (E4, E5)]


def codes(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each("pair", PAIRS, ids=str)
def test_one_rounding_after_sums_in_float32(pair: tuple[torch.dtype, torch.dtype], out: torch.dtype) -> None:
    a, b, bias = codes(16, 64, pair[0]), codes(32, 64, pair[1], 1), torch.randn(32)
    scales = torch.tensor(0.37), torch.tensor(2.0**-4)
    found = products.product(a, b, *scales, bias, out, fast=True)
    sums = a.float() @ b.float().t()
    assert torch.equal(found, (sums * (scales[0] * scales[1]) + bias.to(out)).to(out))
    exact = a.double() @ b.double().t() * scales[0].double() * scales[1].double() + bias.to(out).double()
    size = a.double().abs() @ b.double().abs().t() * 0.37 / 16 + bias.abs().double()
    assert ((found.double() - exact).abs() <= size * (64 * 2.0**-24 + torch.finfo(out).eps)).all()


@each("pair", PAIRS, ids=str)
def test_torchs_own_product_for_cpus_is_near(pair: tuple[torch.dtype, torch.dtype]) -> None:
    a, b = codes(16, 64, pair[0]), codes(32, 64, pair[1], 1)
    one, scale = torch.ones(()), torch.tensor(0.37)
    ours = products.reference(a, b, scale, one, None, torch.float32)
    for other in (products.scaled_mm, products.public_scaled_mm):
        if other is products.public_scaled_mm and not hasattr(torch.nn.functional, "scaled_mm"):
            continue
        found = other(a, b.t(), scale, one, None, torch.float32, False)
        torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5)


def test_empty_products() -> None:
    one, bias = torch.ones(()), torch.arange(16.0)
    found = products.product(codes(16, 0, E4), codes(16, 0, E4), one, one, bias, torch.bfloat16, fast=False)
    assert torch.equal(found, bias.bfloat16().expand(16, 16))
    assert products.product(codes(0, 16, E4), codes(32, 16, E4), one, one, None, torch.float32, fast=False).shape == (
        0,
        32,
    )


@each("dtype", [E4, E5], ids=str)
@each("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_formula_is_the_operator(source: torch.dtype, dtype: torch.dtype) -> None:
    if source == torch.float32:
        x = torch.randn(60, 100) * torch.exp2(torch.randint(-25, 20, (60, 100)).float())
    else:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source).reshape(256, 256)[:250]
    for scale in (None, torch.tensor(0.3), torch.tensor(2.0**-9)):
        found = by_formula(x, dtype, scale, "both")
        expected = fp8_cast(x, dtype, 1.0 if scale is None else scale)
        for mine, other in zip(found, expected, strict=True):
            assert mine is not None and other is not None and mine.shape == other.shape and mine.is_contiguous()
            same = (mine.view(torch.uint8) == other.view(torch.uint8)) | (mine.isnan() & other.isnan())
            assert same.all(), "but for the sign of NaN"
    assert by_formula(x, dtype, None, "rows")[1] is None and by_formula(x, dtype, None, "columns")[0] is None


def test_the_formula_compiles_to_the_same_bits() -> None:
    x, scale = torch.randn(40, 33) * 300, torch.tensor(1.7)

    def step(x: Tensor, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return by_formula(torch.relu(x) * 2, E4, scale, "both")

    for found, expected in zip(torch.compile(step, fullgraph=True)(x, scale), step(x, scale), strict=True):
        assert found is not None and expected is not None
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_what_every_device_asks() -> None:
    a, b = codes(3, 32, E4), codes(48, 32, E5)
    fp8.check(a, b.t())
    fp8.check(codes(16, 32, E5), codes(48, 32, E4).t())
    with pytest.raises(UnsupportedTensorError, match="at most one operand in E5M2; got a=.3, 32. of torch.float8_e5m2"):
        fp8.check(a.float().to(E5), b.t())
    with pytest.raises(
        UnsupportedTensorError, match="expected b to be a matrix of float8_e4m3fn or float8_e5m2; got b="
    ):
        fp8.check(a, b.t().float())
    with pytest.raises(UnsupportedTensorError, match="expected a to be a matrix"):
        fp8.check(a[0], b.t())
    with pytest.raises(ArgumentError, match=r"expected a of \(M, K\) and b of \(K, N\) on one device"):
        fp8.check(a, b)
    with pytest.raises(ArgumentError, match="on cpu, b=.32, 48. of torch.float8_e5m2 on meta. Change shapes"):
        fp8.check(a, b.t().to("meta"))
    with pytest.raises(
        ArgumentError, match="expected a to be contiguous by rows; got a=.3, 32. .* with strides .1, 3."
    ):
        fp8.check(a.t().contiguous().t(), b.t())
    with pytest.raises(ArgumentError, match="expected b to be contiguous by columns"):
        fp8.check(a, b.t().contiguous())
    for wrong in (codes(40, 32, E4), codes(48, 40, E4)):
        with pytest.raises(ArgumentError, match="expected K and N divisible by 16; got b="):
            fp8.check(codes(16, wrong.shape[1], E4), wrong.t())


def test_all_products_of_a_layer_keep_to_what_devices_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def strict(a: Tensor, b: Tensor, *rest: object) -> Tensor:
        fp8.check(a, b.t())
        checked.append((a.dtype, b.dtype))
        return original(a, b, *rest)

    original = products.reference
    monkeypatch.setattr(products, "reference", strict)
    for sizes in ((64, 32), (50, 21), (1, 1)):
        for batch in (16, 7, 1):
            x = torch.randn(batch, sizes[0], requires_grad=True)
            fp8.Linear(*sizes)(x).sum().backward()
    assert checked == [(E4, E4), (E5, E4), (E5, E4)] * 9
