"""That a loop written for `torch.amp.GradScaler` runs with ours: the cases of PyTorch's own tests of it.

Each trains a control without scaling beside a twin with it, one step of which overflows.
"""

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.scaling import DynamicScaler, LossScaler, StaticScaler
from tests.support.cases import each
from tests.support.scaling.steps import weight

SKIPPED = 2
FUSED = [
    (torch.optim.Adam, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.0}), (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    (torch.optim.Adagrad, {}),
]  # fmt: skip
ours = pytest.mark.parametrize("make", [DynamicScaler, partial(DynamicScaler, regrowth_interval=None)])


class Case:
    """A control and a twin, with the same weights, data, loss and optimizer."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, **arguments: Any) -> None:
        self.control = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.scaled = copy.deepcopy(self.control)
        self.by_control, self.by_scaled = (
            optimizer(model.parameters(), lr=0.5, **arguments) for model in (self.control, self.scaled)
        )
        self.data = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(4)]
        self.loss = nn.MSELoss()

    def train_control(self, step: Callable[[nn.Module, Any, Tensor], None], *, skips: bool) -> None:
        for i, (x, y) in enumerate(self.data):
            self.by_control.zero_grad()
            step(self.control, self.by_control, self.loss(self.control(x), y))
            if not (skips and i == SKIPPED):
                self.by_control.step()

    def train_scaled(
        self, scaler: Any, step: Callable[[Any, nn.Module, Any, Tensor, bool], None], each: Callable[[Any], Any]
    ) -> Any:
        for i, (x, y) in enumerate(self.data):
            self.by_scaled.zero_grad()
            step(scaler, self.scaled, self.by_scaled, self.loss(self.scaled(x), y), i == SKIPPED)
            scaler.step(self.by_scaled)
            scaler.update()
            scaler = each(scaler)
        return scaler

    def assert_same(self, tolerance: float = 1e-6) -> None:
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=tolerance)
        for a, b in zip(self.control.parameters(), self.scaled.parameters(), strict=True):
            close(a.grad, b.grad, equal_nan=True)
            close(a, b)
            for name, value in self.by_control.state[a].items():
                close(value, self.by_scaled.state[b][name])


def overflow(scaler: Any, model: nn.Module, here: bool) -> None:
    if here and scaler.is_enabled():
        model[1].weight.grad.fill_(torch.inf)


def plain(scaler: Any, model: nn.Module, optimizer: Any, loss: Tensor, overflows: bool) -> None:
    scaler.scale(loss).backward()
    overflow(scaler, model, overflows)


def scale_clipped(scaler: Any, model: nn.Module, optimizer: Any, loss: Tensor, overflows: bool) -> None:
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())
    overflow(scaler, model, overflows)


def unscaled_then_clipped(scaler: Any, model: nn.Module, optimizer: Any, loss: Tensor, overflows: bool) -> None:
    plain(scaler, model, optimizer, loss, overflows)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def penalised(scaler: Any, model: nn.Module, optimizer: Any, loss: Tensor, overflows: bool) -> None:
    scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    norm = sum((g / scaler.get_scale()).square().sum() for g in scaled).sqrt()
    plain(scaler, model, optimizer, loss + norm, overflows)


def control_plain(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    loss.backward()


def control_clipped(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)


def control_penalised(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients).sqrt()).backward()


LOOPS = {
    "plain": (plain, control_plain),
    "clipped with the scale": (scale_clipped, control_clipped),
    "clipped after unscale_": (unscaled_then_clipped, control_clipped),
    "gradient penalty": (penalised, control_penalised),
}


@each("pickled", [False, True])
@each("enabled", [True, False])
@each("loop", LOOPS)
@ours
def test_a_scaled_loop_trains_as_one_without(make: Any, loop: str, enabled: bool, pickled: bool) -> None:
    step, control = LOOPS[loop]
    case = Case()
    scaler = make("cpu", init_scale=128.0, growth_interval=1, enabled=enabled)
    case.train_control(control, skips=enabled)
    each = (lambda s: pickle.loads(pickle.dumps(s))) if pickled else (lambda s: s)
    scaler = case.train_scaled(scaler, step, each)
    assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
    for a, b in zip(case.control.parameters(), case.scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each("separate", [False, True])
@each(("kind", "arguments"), FUSED)
@ours
def test_fused_optimizers_step_as_the_others_do(
    make: Any, kind: Any, arguments: dict[str, Any], separate: bool
) -> None:
    case = Case(kind, fused=True, **arguments)
    case.by_control = kind(case.control.parameters(), lr=0.5, **arguments)
    scaler = make("cpu", init_scale=128.0, growth_interval=1)
    case.train_control(control_plain, skips=True)

    def step(scaler: Any, model: nn.Module, optimizer: Any, loss: Tensor, overflows: bool) -> None:
        plain(scaler, model, optimizer, loss, overflows)
        if separate:
            scaler.unscale_(optimizer)

    case.train_scaled(scaler, step, lambda s: s)
    case.assert_same(1e-5)
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5


@ours
def test_accumulation_over_micro_batches(make: Any) -> None:
    case = Case()
    scaler = make("cpu", init_scale=128.0, growth_interval=1)
    for model, optimizer in ((case.control, case.by_control), (case.scaled, case.by_scaled)):
        for i, (x, y) in enumerate(case.data):
            loss = case.loss(model(x), y) / 2
            (scaler.scale(loss) if model is case.scaled else loss).backward()
            if i % 2:
                (scaler.step if model is case.scaled else type(optimizer).step)(optimizer)
                if model is case.scaled:
                    scaler.update()
                optimizer.zero_grad()
    for a, b in zip(case.control.parameters(), case.scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("enabled", [True, False])
@ours
def test_two_models_two_optimizers_two_losses(make: Any, enabled: bool) -> None:
    first, second = Case(), Case()
    scaler = make("cpu", init_scale=128.0, growth_interval=1, enabled=enabled)
    for i, (x, y) in enumerate(first.data):
        for a, b, by_a, by_b, scaled in (
            (first.control, second.control, first.by_control, second.by_control, False),
            (first.scaled, second.scaled, first.by_scaled, second.by_scaled, True),
        ):
            by_a.zero_grad()
            by_b.zero_grad()
            one, other = a(x), b(x)
            losses = first.loss(0.3 * one + 0.7 * other, y), first.loss(0.6 * one - 0.4 * other, y)
            if not scaled:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
                by_a.step()
                if not (enabled and i == SKIPPED):
                    by_b.step()
                continue
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            overflow(scaler, b, i == SKIPPED)
            scaler.unscale_(by_a)
            scaler.step(by_a)
            scaler.step(by_b)
            if enabled:
                found = [list(scaler._found_inf_per_device(o).values()) for o in (by_a, by_b)]
                assert [len(f) for f in found] == [1, 1]
                assert [f[0].item() for f in found] == [0.0, float(i == SKIPPED)]
            assert scaler.outcome_of(by_a).stepped
            assert scaler.outcome_of(by_b).stepped is not (enabled and i == SKIPPED)
            scaler.update()
    assert scaler.get_scale() == (128.0 * 2.0**3 * 0.5 if enabled else 1.0)
    for case in (first, second):
        for a, b in zip(case.control.parameters(), case.scaled.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@each("bad", range(-1, 4))
def test_gradients_of_any_dtype_and_layout_are_unscaled_and_checked(bad: int) -> None:
    g = torch.full((20, 20), 4.0)
    gradients = [g.clone(), g.clone()[:, :5], g.half(), g.bfloat16().t()]
    if bad >= 0:
        gradients[bad][2, 2] = torch.inf
    parameters = [torch.empty_like(x) for x in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    inverse, found = torch.full((1,), 0.25), torch.zeros(1)
    per_device = DynamicScaler("cpu")._unscale_grads_(optimizer, inverse, found, True)
    assert [v.item() for v in per_device.values()] == [float(bad >= 0)]
    assert found.item() == 0.0
    if bad < 0:
        assert all(torch.equal(x, torch.ones_like(x)) for x in gradients)


@each("values", [[16.0, 32.0, 64.0], [16.0, 32.0, torch.inf], [16.0, 32.0, torch.nan]])
@each("dtype", [torch.float32, torch.float16])
def test_sparse_gradients(dtype: torch.dtype, values: list[float]) -> None:
    at = torch.tensor([[0, 1, 1], [2, 0, 2]])
    gradient = torch.sparse_coo_tensor(at, torch.tensor(values), (2, 3), dtype=dtype, check_invariants=True)
    parameter = torch.zeros(2, 3, dtype=dtype)
    parameter.grad = gradient.clone()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    per_device = DynamicScaler("cpu")._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
    finite = all(torch.isfinite(torch.tensor(values)))
    assert per_device[torch.device("cpu")].item() == float(not finite)
    if finite:
        assert torch.equal(parameter.grad.to_dense(), gradient.to_dense() / 4)


def test_float16_values_of_one_sparse_index_overflow_in_their_sum() -> None:
    at = torch.tensor([[0, 1, 0], [2, 0, 2]])
    parameter = torch.zeros(2, 3, dtype=torch.float16)
    parameter.grad = torch.sparse_coo_tensor(
        at, torch.tensor([64000.0, 32.0, 64000.0]), (2, 3), dtype=torch.float16, check_invariants=True
    )
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    per_device = DynamicScaler("cpu")._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
    assert per_device[torch.device("cpu")].item() == 1.0


def test_float16_gradients_are_refused_only_where_torchs_own_hook_asks_so() -> None:
    parameter = torch.zeros(2, dtype=torch.float16)
    parameter.grad = torch.ones(2, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients."):
        DynamicScaler("cpu")._unscale_grads_(optimizer, torch.ones(1), torch.zeros(1), False)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_state_moves_from_one_scaler_to_another(lazy: bool) -> None:
    source = DynamicScaler("cpu", 3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    target = DynamicScaler("cpu", 6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    target._init_growth_tracker = 7
    if lazy:
        target.scale(torch.full((1,), 4.0))
        assert target._scale.dtype == torch.float32 and target._growth_tracker.dtype == torch.int32
    target.load_state_dict(source.state_dict())
    assert target.get_scale() == 3.0 and target._init_growth_tracker == target._get_growth_tracker() == 0
    assert (target.get_growth_factor(), target.get_backoff_factor(), target.get_growth_interval()) == (4.0, 0.5, 2)


def test_scale_takes_nested_iterables() -> None:
    scaler = DynamicScaler("cpu", 2.0)

    def four() -> Tensor:
        return torch.full((1,), 4.0)

    scaled = scaler.scale([four(), (four(), four()), [four(), (four(), four())]])
    assert type(scaled) is list and type(scaled[1]) is tuple and type(scaled[2][1]) is tuple
    flat = [scaled[0], *scaled[1], scaled[2][0], *scaled[2][1]]
    assert [x.item() for x in flat] == [8.0] * 6
    lazy: Iterable[Tensor] = scaler.scale(four() for _ in range(2))
    assert [x.item() for x in lazy] == [8.0, 8.0]
    with pytest.raises(ValueError, match="scale: expected a tensor or an iterable of tensors; got float"):
        scaler.scale(1.0)


def test_a_scale_near_the_largest_float32_does_not_grow_to_inf() -> None:
    scaler = DynamicScaler("cpu", 1e38, growth_factor=2.0**4, growth_interval=1)
    optimizer = torch.optim.Adam([weight(1e-30)])
    scaler.scale(optimizer.param_groups[0]["params"][0].square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale.isfinite()


@each("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_gradients_that_are_broken_after_unscale_are_the_users(flags: dict[str, bool]) -> None:
    parameter = weight()
    optimizer, scaler = torch.optim.Adam([parameter], **flags), DynamicScaler("cpu", 128.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    parameter.grad.fill_(torch.nan)
    scaler.step(optimizer)
    assert parameter.isnan().all() and scaler.outcome.stepped


class _Asks(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self._step_supports_amp_scaling = True
        self.seen: list[Any] = []


class _TakesScaler(_Asks):
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        assert not hasattr(self, "grad_scale") and not hasattr(self, "found_inf")
        self.seen.append(grad_scaler)


class _ReadsAttributes(_Asks):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append((self.grad_scale, self.found_inf))


def test_optimizers_that_handle_the_scale_themselves() -> None:
    model = nn.Linear(4, 1)
    older, newer = _TakesScaler(model.parameters()), _ReadsAttributes(nn.Linear(2, 1).parameters())
    scaler = DynamicScaler("cpu", 2.0)
    newer_parameters = newer.param_groups[0]["params"]
    scaler.scale(model(torch.randn(4, 4)).mean() + newer_parameters[0].sum()).backward()
    with pytest.warns(FutureWarning, match="_TakesScaler.step takes the scaler as its argument `grad_scaler`"):
        scaler.step(older)
    scaler.step(newer)
    scaler.update()
    assert older.seen == [scaler] and isinstance(older.seen[0], torch.amp.GradScaler)
    (scale, found), gradient = newer.seen[0], newer_parameters[0].grad
    assert torch.equal(gradient / scale, torch.ones(1, 2)) and found.item() == 0.0
    assert not hasattr(newer, "grad_scale") and not hasattr(newer, "found_inf")


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_own_gradient_scale_is_kept(fused: bool) -> None:
    parameter = weight(8.0)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0, fused=fused), DynamicScaler("cpu", 4.0)
    if fused:
        optimizer.grad_scale = torch.tensor(2.0)
    scaler.scale(parameter.sum() * 4.0).backward()
    scaler.step(optimizer)
    assert parameter.item() == (6.0 if fused else 4.0)


def test_what_else_torchs_tests_touch() -> None:
    scaler = DynamicScaler("cpu", 4.0)
    assert scaler._get_scale_async() is None and scaler._get_growth_tracker() == 0 and scaler.get_scale() == 4.0
    assert scaler.is_enabled() and not scaler._per_optimizer_states
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._get_scale_async() is scaler._scale and scaler._scale.shape == ()
    assert scaler._check_scale_growth_tracker("step") == (scaler._scale, scaler._growth_tracker)
    parameter = weight()
    parameter.grad = torch.tensor([1.0, torch.nan])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    assert scaler._check_inf_per_device(optimizer) is scaler._found_inf_per_device(optimizer)
    assert scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item() == 1.0
    assert parameter.grad[0].item() == 1.0
    before = scaler._scale
    scaler.update(new_scale=torch.tensor([16.0]))
    assert scaler._scale is before and scaler.get_scale() == 16.0


def test_ours_are_grad_scalers_to_every_check() -> None:
    scalers = [DynamicScaler("cpu"), StaticScaler(2.0, device="cpu")]
    assert all(isinstance(s, torch.amp.GradScaler) and isinstance(s, LossScaler) for s in scalers)
    assert pl.scaling.DynamicScaler is DynamicScaler
    with pytest.raises(TypeError, match="abstract"):
        LossScaler("cpu")
