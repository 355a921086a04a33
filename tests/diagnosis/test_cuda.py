"""`locate` on a GPU: backward operations of the device's own thread, autocast, dropout, fused optimizers."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plimsoll.diagnosis import locate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its own backward thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x).relu())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.LayerNorm(16)).cuda()


def test_forward_and_backward_are_named():
    net, x = model(), torch.randn(4, 16, device="cuda")
    fault = locate(lambda: (net(x) * 1e30).exp().sum())
    assert fault is not None
    assert (fault.operation, fault.phase) == ("aten.exp", "forward")
    fault = locate(lambda: net[1](net[0](x)).mul(0).sqrt().sum())
    assert fault is not None
    assert (fault.phase, fault.forward, fault.kind) == ("backward", "aten.sqrt", "inf")
    assert fault.source is not None
    assert "mul(0).sqrt()" in fault.source.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool):
    net, x = model(), torch.randn(4, 16, device="cuda", requires_grad=True)

    def root(y: Tensor) -> Tensor:
        return net[0](y).mul(0).sqrt()

    fault = locate(lambda: checkpoint(root, x, use_reentrant=reentrant).sum())
    assert fault is not None
    assert (fault.phase, fault.forward) == ("backward", "aten.sqrt")
    assert fault.source is not None
    assert fault.source.text == "return net[0](y).mul(0).sqrt()"


@pytest.mark.parametrize("fused", [True, False])
def test_scaled_gradients_under_autocast(fused: bool):
    net, scaler = model(), torch.amp.GradScaler("cuda", init_scale=2.0**24)
    optimizer = torch.optim.Adam(net.parameters(), fused=fused)
    x = torch.randn(4, 16, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    before = [p.detach().clone() for p in net.parameters()]
    fault = locate(step, model=net)
    assert fault is not None
    assert (fault.phase, fault.scale, fault.kind) == ("backward", 2.0**24, "inf")
    assert scaler.get_scale() == 2.0**24
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_it_computes_the_same_and_puts_back_the_generator():
    net, x = model(), torch.randn(64, 16, device="cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = net(x).square().mean()
        losses.append(loss.detach().clone())
        loss.backward()
        losses.extend(p.grad.clone() for p in net.parameters() if p.grad is not None)
        optimizer.step()

    state = torch.cuda.get_rng_state()
    assert locate(step, model=net) is None
    assert torch.equal(torch.cuda.get_rng_state(), state)
    inside = list(losses)
    losses.clear()
    step()
    assert all(torch.equal(a, b) for a, b in zip(inside, losses, strict=True))


def test_a_causal_mask_in_fused_attention_is_no_fault():
    q = torch.randn(2, 2, 32, 16, device="cuda", dtype=torch.float16, requires_grad=True)
    mask = torch.zeros(32, 32, device="cuda", dtype=torch.float16).masked_fill(
        torch.ones(32, 32, device="cuda").triu(1).bool(), -torch.inf
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    assert locate(lambda: attend(q, q, q, is_causal=True).float().sum()) is None
    assert locate(lambda: attend(q, q, q, attn_mask=mask).float().sum()) is None
    fault = locate(lambda: attend(q * 400, q * 400, q * 6e4).float().sum())
    assert fault is not None
    assert fault.kind == "inf"
