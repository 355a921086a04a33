"""On a GPU: the lists against torch's own CUDA autocast, and the emulation against the GPU's arithmetic."""

import pytest
import torch

import plimsoll as pl
from plimsoll.emulate.autocast import Autocast
from plimsoll.emulate.casting import CUDA
from tests.support.cases import each
from tests.support.emulate.calls import HIGH, LOW, NO_CPU_KERNEL, PROMOTE

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compares with CUDA's autocast, which needs a GPU"
)

FP16, FP32 = torch.float16, torch.float32
CALLS = {**LOW, **HIGH} | {name: (lambda d, call=call: call(d, d)) for name, call in PROMOTE.items()}


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


@each("dtype", [FP16, FP32])
@each("name", sorted({name for name, _ in CUDA.rows()} - NO_CPU_KERNEL - CUDA.banned))
def test_the_lists_are_those_of_cuda_autocast(name: str, dtype: torch.dtype) -> None:
    call = CALLS[name]
    made = call.__globals__["made"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(call.__globals__, "made", lambda d, *shape: made(d, *shape).cuda())
        torch.manual_seed(0)
        with torch.autocast("cuda", dtype=FP16):
            expected = call(dtype)
        torch.manual_seed(0)
        with Autocast():
            got = call(dtype)
    assert got.dtype is expected.dtype and got.device.type == "cuda"
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("depth", [16, 1000])
def test_an_emulated_product_is_the_gpus_but_for_the_order_of_fp32_sums(depth: int) -> None:
    a, b = torch.randn(64, depth, device="cpu").half(), torch.randn(depth, 64, device="cpu").half()
    with pl.emulate("fp16"):
        emulated = a @ b
    real = (a.cuda() @ b.cuda()).cpu()
    off = (emulated != real).float().mean().item()
    assert off < 0.02
    torch.testing.assert_close(emulated, real, rtol=2**-10, atol=depth * 2.0**-22)
