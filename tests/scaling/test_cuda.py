"""On a GPU: nothing waits in sync-free mode, and nothing more than with GradScaler in the other."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from plimsoll.scaling import DynamicScaler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def waiting_fails() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_sync_free_steps_wait_for_nothing_from_the_first_one_on(kind: type, waiting_fails: None) -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([weight], lr=0.1, fused=True, **arguments)
    scaler, outcomes = DynamicScaler("cuda", growth_interval=2, sync_free=True), []
    trace = [True, False, False, True, False]
    for overflows in trace:
        optimizer.zero_grad()
        scaler.scale((weight * (torch.inf if overflows else 0.25)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        outcomes.append(scaler.outcome)
    torch.cuda.set_sync_debug_mode("default")
    assert [outcome.stepped for outcome in outcomes] == [not overflows for overflows in trace]
    assert outcomes[0].reason == f"non-finite gradients in {kind.__name__}"
    reference, held = DynamicScaler("cpu", growth_interval=2), nn.Parameter(torch.ones(4))
    by_reference = kind([held], lr=0.1, fused=True, **arguments)
    for overflows in trace:
        by_reference.zero_grad()
        reference.scale((held * (torch.inf if overflows else 0.25)).sum()).backward()
        reference.step(by_reference)
        reference.update()
    assert scaler.state_dict() == reference.state_dict()
    torch.testing.assert_close(weight.cpu(), held)


def test_steps_of_fused_optimizers_wait_for_nothing_by_themselves(waiting_fails: None) -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = torch.optim.Adam([weight], fused=True), DynamicScaler("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.set_sync_debug_mode("default")
    assert scaler.outcome.stepped and scaler.get_scale() == 2.0**16


def test_other_optimizers_step_and_skip() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = torch.optim.RMSprop([weight]), DynamicScaler("cuda")
    for overflows in (False, True):
        optimizer.zero_grad()
        scaler.scale((weight * (torch.inf if overflows else 1.0)).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before) is overflows is not scaler.outcome.stepped
    assert "4 of 4 values of parameter 0 in group 0 of RMSprop" in scaler.outcome.reason
