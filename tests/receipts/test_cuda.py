"""On a GPU: the rules for accumulators and TF32 against what the kernels do, and autocast's own steps."""

import pytest
import torch
from torch import nn

from plimsoll.receipts.recording.operations import Switches, product_arithmetic, sum_accumulator
from plimsoll.receipts.take import receipt
from tests.support.cases import each
from tests.support.receipts.ones import COUNT, PRODUCTS, SUMS, ones

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="asks CUDA's kernels, which needs a GPU")

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@each("dtype", [FP16, BF16])
@each("base", PRODUCTS)
def test_products_are_added_up_in_fp32(dtype: torch.dtype, base: str):
    result = PRODUCTS[base](ones(dtype, "cuda")).flatten()[0].item()
    assert product_arithmetic(base, dtype, CUDA, COUNT, Switches.now()).accumulate == "fp32" and result >= COUNT


@each("dtype", [FP16, BF16])
@each("base", SUMS)
def test_sums_that_are_said_to_be_in_fp32_are(dtype: torch.dtype, base: str):
    if sum_accumulator(base, dtype, CUDA) == "fp32":
        assert SUMS[base](ones(dtype, "cuda")).flatten()[0].item() == COUNT


@each("asked", ["ieee", "tf32"])
def test_tf32_is_said_where_operands_lose_its_bits(asked: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", asked)
    layer = nn.Linear(256, 256, bias=False, device="cuda")
    with torch.no_grad():
        layer.weight.copy_(torch.eye(256))
    x = torch.full((256, 256), 1 + 2.0**-12, device="cuda")  # TF32 has 10 bits of mantissa
    found = receipt(layer, x, declared="fp32")
    product = next(row for row in found.rows if row.kind == "product" and row.phase == "forward")
    assert (product.values[0] == "tf32") == bool((layer(x) != x).any())
    assert {deviation.kind for deviation in found.deviations} == ({"tf32"} if "tf32" in product.values else set())


@each("dtype", [FP16, BF16])
def test_a_step_of_autocast_is_clean_and_a_loss_in_16_bits_is_found(dtype: torch.dtype):
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).cuda()
    x, y = torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")
    level = "amp-fp16" if dtype == FP16 else "amp-bf16"
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == FP16)

    def step(*, wide: bool = True):
        with torch.autocast("cuda", dtype):
            out = model(x)
        scaler.scale(((out.float() if wide else out) - y.to(FP32 if wide else dtype)).abs().mean()).backward()

    assert not receipt(model, step=step, declared=level).deviations
    assert {found.kind for found in receipt(model, step=lambda: step(wide=False), declared=level).deviations} == {
        "loss"
    }
