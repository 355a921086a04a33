"""The record of a step: read late, equal by value, and never changed by what comes after."""

import pickle

import pytest
import torch

from plimsoll.errors import NotRecordedError
from plimsoll.scaling import DynamicScaler, StepOutcome
from tests.support.scaling.steps import host_reads_nothing, take, weight


def test_tensors_are_copied_when_the_outcome_is_made_and_read_when_asked() -> None:
    stepped, scale, norm = torch.tensor(True), torch.tensor(8.0), torch.tensor([3.0])
    with host_reads_nothing():
        outcome = StepOutcome(stepped=stepped, scale=scale, grad_norm=norm)
    stepped.fill_(False)
    scale.fill_(1.0)
    norm.fill_(1.0)
    assert (outcome.stepped, outcome.reason, outcome.scale, outcome.grad_norm) == (True, None, 8.0, 3.0)
    assert type(outcome.stepped) is bool and type(outcome.scale) is float and type(outcome.grad_norm) is float


def test_a_reason_is_for_skipped_steps_and_made_once() -> None:
    calls = []
    outcome = StepOutcome(stepped=torch.tensor(False), scale=1.0, reason=lambda: calls.append(1) or "an overflow")
    assert calls == []
    assert outcome.reason == outcome.reason == "an overflow"
    assert calls == [1]
    assert StepOutcome(stepped=True, scale=1.0, reason="an overflow").reason is None
    assert StepOutcome(stepped=False, scale=1.0).reason == "unknown"


def test_outcomes_are_equal_by_value_and_survive_pickling() -> None:
    lazy = StepOutcome(
        stepped=torch.tensor(False), scale=torch.tensor(4.0), reason=lambda: "why", grad_norm=torch.tensor(2.0)
    )
    plain = StepOutcome(stepped=False, scale=4.0, reason="why", grad_norm=2.0)
    assert lazy == plain and hash(lazy) == hash(plain)
    assert pickle.loads(pickle.dumps(lazy)) == plain
    assert lazy != plain.after_retries(1) and lazy != "why"
    expected = "StepOutcome(stepped=False, reason='why', scale=4.0, grad_norm=2.0, retries=0)"
    assert repr(lazy) == expected


def test_retries_and_norm_are_added_without_reading() -> None:
    with host_reads_nothing():
        outcome = StepOutcome(stepped=torch.tensor(True), scale=torch.tensor(4.0), retries=1)
        changed = outcome.after_retries(3).with_grad_norm(torch.tensor(0.5))
    assert changed == StepOutcome(stepped=True, scale=4.0, grad_norm=0.5, retries=3)
    assert outcome.retries == 1 and outcome.grad_norm is None


def test_a_scaler_has_no_outcome_before_its_first_step() -> None:
    scaler, optimizer = DynamicScaler("cpu"), torch.optim.SGD([weight()], lr=0.5)
    with pytest.raises(NotRecordedError, match="outcome: expected a step before; got none yet"):
        _ = scaler.outcome
    with pytest.raises(NotRecordedError, match="outcome_of: expected an optimizer that has stepped .* got SGD"):
        scaler.outcome_of(optimizer)
    take(scaler, optimizer, overflows=False)
    assert scaler.outcome == scaler.outcome_of(optimizer) == StepOutcome(stepped=True, scale=2.0**16)
    assert scaler.outcome.scale == 2.0**16
