"""On a GPU: codes bit for bit as on the CPU, products near, no host synchronisation, no reduction at unit scaling."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from plimsoll import fp8, kernels
from plimsoll.kernels import fp8_cast
from tests.support.cases import each

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: FP8 units are nowhere else")

KINDS: list[dict[str, Any]] = [
    {"scaling": "unit"},
    {"scaling": "tensor"},
    {"scaling": "tensor", "history": 2},
]


@each("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@each("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_and_counts(source: torch.dtype, dtype: torch.dtype) -> None:
    if source == torch.float32:
        x = torch.randn(300, 257) * torch.exp2(torch.randint(-30, 20, (300, 257)).float())
    else:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source).reshape(256, 256)
    for part in (x, x.t(), x[3:, 5:77]):
        bank, expected_bank = kernels.new_bank(1, device="cuda"), kernels.new_bank(1)
        found = fp8_cast(part.cuda(), dtype, torch.tensor(0.7, device="cuda"), bank=bank)
        bare = fp8_cast(part.cuda(), dtype, 0.7)
        expected = fp8_cast(part, dtype, 0.7, bank=expected_bank)
        for mine, unwatched, other in zip(found, bare, expected, strict=True):
            assert torch.equal(mine.cpu().view(torch.uint8), other.view(torch.uint8))
            assert torch.equal(unwatched.cpu().view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(bank[0, :8].cpu(), expected_bank[0, :8])
        assert torch.equal(bank[0, 11:].cpu(), expected_bank[0, 11:])


def train(kind: dict[str, Any], device: str, compiled: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    layer = fp8.Linear(512, 256, **kind).to(device)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(100, 512).to(device, torch.bfloat16)
    gradient = torch.randn(100, 256).to(device, torch.bfloat16)
    for _ in range(3):
        x = x.detach().requires_grad_()
        layer.zero_grad()
        y = call(x)
        y.backward(gradient)
    return [t.detach().float().cpu() for t in (y, x.grad, layer.weight.grad, layer.bias.grad)]


@each("compiled", [False, True], ids=["eager", "compiled"])
@each("kind", KINDS, ids=str)
def test_a_layer_is_near_the_reference(kind: dict[str, Any], compiled: bool) -> None:
    for found, expected in zip(train(kind, "cuda", compiled), train(kind, "cpu"), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 5e-3, "bfloat16's rounding, and sums in fewer bits"


@each("kind", KINDS, ids=str)
def test_a_step_never_waits_for_the_device(kind: dict[str, Any]) -> None:
    layer = fp8.Linear(256, 256, **kind).cuda()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")  # torch raises where the host would wait
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_unit_scaling_looks_for_no_magnitude() -> None:
    layer = fp8.Linear(1024, 1024, bias=False).cuda().bfloat16()
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    layer(x).backward(gradient)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        layer(x).backward(gradient)
    names = [event.key for event in found.key_averages()]
    assert not [name for name in names if "reduce" in name.lower() or "amax" in name.lower()], names
