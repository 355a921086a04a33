"""What a scaler must withstand: runs in which nothing goes as it should."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.scaling import DynamicScaler, LayerScaler, LossScaler, SpectralScaler, StaticScaler
from tests.support.cases import each
from tests.support.scaling.steps import mlp, outcomes, take, weight

SCALERS = [
    lambda: DynamicScaler("cpu"),
    lambda: DynamicScaler("cpu", regrowth_interval=None),
    lambda: DynamicScaler("cpu", hysteresis=5, backoff_factor=0.01, min_scale=2.0**-126),
    lambda: DynamicScaler("cpu", sync_free=True),
    lambda: StaticScaler(1024.0, device="cpu"),
]


@each("make", SCALERS)
def test_a_thousand_non_finite_steps_and_then_finite_ones(make: type[LossScaler]) -> None:
    parameter = weight(1.0, 2.0)
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=True)
    scaler = make()
    floor = scaler._min_scale
    found = outcomes(scaler, optimizer, [True] * 1000)
    assert scaler.get_scale() == floor > 0.0 and parameter.tolist() == [1.0, 2.0]
    assert not any(outcome.stepped for outcome in found)
    if not scaler._sync_free:
        reason = "non-finite gradients in 1 of 2 values of parameter 0 in group 0 of Adam"
        at_floor = "" if isinstance(scaler, StaticScaler) else f"; the scale is at its floor, {floor:g}"
        assert found[-1].reason == reason + at_floor
        assert found[0].reason == reason
    assert all(outcome.stepped for outcome in outcomes(scaler, optimizer, [False] * 3))
    assert parameter.isfinite().all() and (parameter < torch.tensor([1.0, 2.0])).all()
    take(scaler, optimizer, overflows=True)
    assert not scaler.outcome.stepped


def test_what_gradscaler_does_there() -> None:
    """The reason for the floor: without it the first finite gradient after 144 others writes -Inf."""
    stock, parameter = torch.amp.GradScaler("cpu"), weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(144):
        take(stock, optimizer, overflows=True)
    take(stock, optimizer, overflows=False)
    assert not parameter.isfinite().all()


def test_the_loss_is_nan_from_the_start() -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, scaler = torch.optim.AdamW(model.parameters()), DynamicScaler("cpu")
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 8), torch.nan)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "the loss itself was nan, before scaling; the scale is at its floor" in scaler.outcome.reason
    assert not optimizer.state


@pytest.mark.parametrize("fused", [False, True])
def test_no_parameter_has_a_gradient(fused: bool) -> None:
    """Frozen weights, or a backward that was forgotten: an error, after which all goes on."""
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, fused=fused), DynamicScaler("cpu")
    scaler.scale(parameter.sum())
    with pytest.raises(StateError, match="step: expected a gradient on at least one parameter; got none on any of SGD"):
        scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0] and not optimizer.state
    with pytest.raises(StateError, match="update: expected a step of some optimizer before it"):
        scaler.update()


def test_a_step_without_backward_after_steps_with_one() -> None:
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DynamicScaler("cpu")
    take(scaler, optimizer, overflows=False)
    optimizer.zero_grad()
    with pytest.raises(StateError, match="expected a gradient on at least one parameter"):
        scaler.step(optimizer)
    # The same iteration, done properly: nothing was unscaled, so that what was called in vain is forgotten.
    take(scaler, optimizer, overflows=False)
    assert parameter.tolist() == [0.5, 0.5] and scaler._get_growth_tracker() == 2


def test_some_parameters_have_no_gradient() -> None:
    used, idle = weight(), weight()
    optimizer, scaler = torch.optim.SGD([idle, used], lr=1.0), DynamicScaler("cpu")
    scaler.scale(used.sum()).backward()
    used.grad[0] = math.inf
    scaler.step(optimizer)
    assert idle.grad is None and "parameter 1 in group 0" in scaler.outcome.reason


def test_zero_gradients_for_a_thousand_steps() -> None:
    parameter = weight(3.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    scaler = DynamicScaler("cpu", growth_interval=5, max_scale=2.0**30)
    for _ in range(1000):
        optimizer.zero_grad()
        scaler.scale((parameter * 0.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome.stepped
    assert scaler.get_scale() == 2.0**30 and parameter.item() == 3.0


def test_the_largest_scale_there_is() -> None:
    parameter = weight(2.0**-100)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DynamicScaler("cpu", 2.0**120, growth_interval=1, regrowth_interval=None)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale((parameter * 0.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127 and parameter.item() == 2.0**-100


class _Wild(LossScaler):
    """A scaler whose rule has gone wrong."""

    answer: object = math.nan

    def _next_scale(self, found_inf: torch.Tensor) -> float | torch.Tensor:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize("tensors", [False, True])
def test_whatever_a_rule_answers_the_scale_stays_within_its_bounds(tensors: bool) -> None:
    scaler, optimizer = _Wild("cpu", 4.0, min_scale=0.5, max_scale=64.0), torch.optim.SGD([weight()], lr=0.0)
    for answer, kept in ((math.nan, 0.5), (0.0, 0.5), (-3.0, 0.5), (math.inf, 64.0), (-math.inf, 0.5), (8.0, 8.0)):
        scaler.answer = torch.tensor(answer) if tensors else answer
        take(scaler, optimizer, overflows=False)
        assert scaler.get_scale() == kept, answer


def test_hooks_are_called_once_each_with_what_they_are_promised() -> None:
    calls: list[str] = []

    class Hooked(LossScaler):
        def _start(self, device: torch.device) -> None:
            calls.append(f"start {device}")

        def _bank(self, optimizer: object, gradients: object) -> tuple[None, tuple[()]]:
            calls.append(f"bank {[g.index for g in gradients]}")  # type: ignore[attr-defined]
            return None, ()

        def _observe(self, optimizer: object, found_inf: torch.Tensor) -> None:
            calls.append(f"observe {found_inf.item():g}")

        def _grad_norm(self, optimizer: object) -> torch.Tensor:
            calls.append("norm")
            return torch.tensor(5.0)

        def _next_scale(self, found_inf: torch.Tensor) -> float:
            calls.append(f"next {found_inf.item():g} {found_inf.shape}")
            return 2.0

        def _scale_set(self) -> None:
            calls.append("set")

    scaler = Hooked("cpu")
    optimizer = torch.optim.SGD([weight(), nn.Parameter(torch.ones(3))], lr=0.0)
    take(scaler, optimizer, overflows=True)
    expected = ["start cpu", "bank [0, 1]", "observe 1", "norm", "next 1 torch.Size([])"]
    assert calls == expected and scaler.outcome.grad_norm == 5.0
    scaler.update(4.0)
    assert calls == [*expected, "set"] and scaler.get_scale() == 4.0


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_losses_of_any_structure_keep_it() -> None:
    scaler = DynamicScaler("cpu", init_scale=4.0)
    pair = scaler.scale(Pair(torch.ones(()), torch.ones(())))
    assert pair == Pair(torch.tensor(4.0), torch.tensor(4.0)) and type(pair) is Pair
    for wrong in ({"loss": torch.ones(())}, "loss"):
        with pytest.raises(ArgumentError, match=f"scale: expected a tensor .*; got {type(wrong).__name__}"):
            scaler.scale(wrong)


@each("make", [SpectralScaler, lambda device: LayerScaler(nn.Linear(2, 1), device=device)])
def test_what_measures_gradients_needs_float64(make: Any) -> None:
    with pytest.raises(ArgumentError, match="Scaler: expected a device with float64, .*; got device='mps'"):
        make("mps")


@each("kind", [DynamicScaler, SpectralScaler])
def test_gradients_that_are_stored_as_conjugates_are_unscaled(kind: Any) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), kind("cpu", init_scale=4.0)
    scaler.scale((parameter.conj() * (2 + 1j)).real.sum()).backward()
    assert parameter.grad is not None and parameter.grad.is_conj()
    scaler.step(optimizer)
    assert parameter.tolist() == [-1 - 1j] * 2
