"""A receipt changes nothing: neither the step that it records, nor what comes after it."""

import copy

import torch

from plimsoll.receipts.take import receipt
from tests.support.cases import each
from tests.support.receipts.steps import STEPS


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    return kept | {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@each("name", STEPS)
def test_sound_steps_have_no_deviation(name: str):
    model, step, declared = STEPS[name]()
    found = receipt(model, step=step, declared=declared)
    assert found.deviations == ()
    assert found.verdict == f"Declared {declared}. No deviations."
    assert {"forward", "backward"} <= set(found.did)
    assert any(row.kind == "product" for row in found.rows)


@each("name", STEPS)
def test_training_is_the_same_to_the_bit_with_and_without_receipts(name: str):
    torch.manual_seed(3)
    model, step, _ = STEPS[name]()
    torch.manual_seed(4)
    plain = [step() for _ in range(3)]
    reached = _state(model)
    torch.manual_seed(3)
    model, step, declared = STEPS[name]()
    torch.manual_seed(4)
    losses = []
    for _ in range(3):
        before, random = _state(model), torch.get_rng_state()
        inside: list[float] = []
        receipt(model, step=lambda kept=inside: kept.append(step()), declared=declared)
        assert _same(before, _state(model))
        assert torch.equal(random, torch.get_rng_state())
        losses.append(step())
        assert inside == losses[-1:]  # the recorded step computes what the real one does
    assert losses == plain
    assert _same(reached, _state(model))


def test_nothing_is_left_behind():
    model, step, declared = STEPS["autocast in bf16"]()
    backward, optimizer = torch.autograd.backward, torch.optim.Optimizer.step
    modules = {id(m): dict(vars(m)) for m in model.modules()}
    receipt(model, step=step, declared=declared)
    assert torch.autograd.backward is backward
    assert torch.optim.Optimizer.step is optimizer
    assert torch._C._len_torch_dispatch_stack() == 0
    assert {id(m): dict(vars(m)) for m in model.modules()} == modules
    copy.deepcopy(model)
