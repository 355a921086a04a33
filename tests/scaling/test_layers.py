"""What layer scales are for: gradients that no single scale holds; and how they fare over the steps of a training."""

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.errors import ArgumentError, StateError
from plimsoll.precision.weights.master_weights import MasterWeights
from plimsoll.scaling import LayerScaler
from plimsoll.scaling.layerwise.forward_mode import marked
from tests.support.scaling.layer_models import D, Written, linears, made, needs_wide_gradients

DEPTH, WIDTH, SHRINK = 10, 32, 50.0


class Chain(nn.Module):
    """Layers whose gradients shrink 50 times from each to the next, while activations stay of the same size."""

    def __init__(self, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=1 / SHRINK / width**0.5)
            nn.init.normal_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Adding(torch.optim.SGD):
    """SGD that leaves the weights as they are, so that steps can be compared."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)


def batch() -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def trained(model: nn.Module, scaler: Any, x: Tensor, steps: int, optimizer: Any = None) -> Iterator[int]:
    """Steps of a training; what follows the yield comes between the unscaling and the step."""
    optimizer = optimizer or Adding(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        yield step
        scaler.step(optimizer)
        scaler.update()


def reference() -> tuple[Chain, Tensor]:
    torch.manual_seed(0)
    model = Chain().half().double()  # weights that float16 has, so that rounding the gradients is all that differs
    model(batch().half().double()).square().mean().backward()
    gradient = model.layers[0].weight.grad
    model.zero_grad()
    return model, gradient


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@needs_wide_gradients
def test_a_chain_that_shrinks_50_times_a_layer_keeps_its_first_gradient_in_float16() -> None:
    model, expected = reference()
    half = copy.deepcopy(model).half()
    scaler = LayerScaler(half)
    errors = []
    for _ in trained(half, scaler, batch().half(), 6):
        gradient = half.layers[0].weight.grad
        assert gradient.dtype is torch.float32
        errors.append(error(gradient / scaler.get_scale(), expected))
    assert errors[0] == 1  # nothing is known yet
    assert max(errors[3:]) < 1e-2
    assert scaler.outcome.stepped
    assert scaler.scales["layers.0"] > 2.0**50


def test_one_scale_loses_it_wholly_whichever_it_is() -> None:
    model, expected = reference()
    half = copy.deepcopy(model).half()
    survivors = 0
    for shift in range(-14, 60):
        half.zero_grad()
        (loss_of(half, batch().half()) * 2.0**shift).backward()
        gradients = [p.grad for p in half.parameters()]
        if all(g.isfinite().all() for g in gradients):
            survivors += 1
            assert error(half.layers[0].weight.grad.double() / 2.0**shift, expected) == 1
    assert survivors > 20


def test_under_autocast_the_parameters_are_float32_and_so_are_their_gradients() -> None:
    model, expected = reference()
    single = copy.deepcopy(model).float()
    scaler = LayerScaler(single, init_scale=2.0**10)
    optimizer = Adding(single.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(single, batch())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found = error(single.layers[0].weight.grad, expected)
        scaler.step(optimizer)
        scaler.update()
    assert found < 1e-2


@needs_wide_gradients
def test_a_tied_weight_adds_up_its_uses_in_float32() -> None:
    """Undone in float16, or added up before it is undone, the gradient of the use that carries 2**30 would be zero."""
    torch.manual_seed(0)
    x = torch.randn(4, 8).half()

    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.a(x)
        return first.double().sum() * 2.0**-30 + m.b(first.detach()).double().sum() * m.factor

    half = Written(forward, a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 8, bias=False), factor=0.0).half()
    half.b.weight = half.a.weight
    double = copy.deepcopy(half).double()
    scaler = LayerScaler(half, init_scale=1.0)
    for factor in (0.0, 1e-7):
        half.factor = double.factor = factor
        half.zero_grad()
        double.zero_grad()
        scaler._layers.exponents = [30, 14]
        scaler.scale(half(x)).backward()
        double(x.double()).backward()
        assert error(half.a.weight.grad, double.a.weight.grad) < 1e-2


def test_what_is_made_of_weights_pulls_no_activation_down() -> None:
    """At the loss scale alone, where it was made, the activation's gradient would be flushed."""
    found: list[int] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.scale * 2.0  # before any activation: at exponent 0
        y = m.a(x) * w + m.scale
        found.append(marked(y).exponent)
        found.append(marked(m.b(x) + y).exponent)
        return y

    scaler = LayerScaler(model := Written(forward, **linears(2), scale=nn.Parameter(torch.rand(D))))
    scaler._layers.exponents = [20, 3]
    model(torch.randn(6, D))
    assert found == [20, 3]  # and of two activations the lower one counts


def test_a_network_that_needs_no_layer_scales_gets_one_for_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())))
    scaler = LayerScaler(model)
    for _ in trained(model, scaler, batch(), 12):
        pass
    assert len(set(scaler.scales.values())) <= 2


def test_the_largest_gradient_lies_a_margin_below_the_end() -> None:
    model, _ = reference()
    single = copy.deepcopy(model).float()
    scaler = LayerScaler(single, margin_binades=3, slack_binades=0, every=1)
    for _ in trained(single, scaler, batch(), 8):
        pass
    for name, spectrum in scaler.spectra.items():
        carried = spectrum.absmax * scaler.scales[name] * scaler.get_scale()
        assert 2.0**12 <= carried < 2.0**13, name


def poison(unit: nn.Module) -> Any:
    """What breaks the gradient inside of a module, once."""

    def broken(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda g: g * math.inf)

    return unit.register_forward_hook(broken)


@needs_wide_gradients
def test_an_overflow_lowers_the_layer_and_those_after_it_in_the_backward() -> None:
    model, expected = reference()
    half = copy.deepcopy(model).half()
    scaler = LayerScaler(half, slack_binades=0)
    optimizer = Adding(half.parameters())
    for _ in trained(half, scaler, batch().half(), 8, optimizer):
        pass
    before, scale = scaler.scales, scaler.get_scale()
    handle = poison(half.layers[4])
    for _ in trained(half, scaler, batch().half(), 1, optimizer):
        pass
    handle.remove()
    assert not scaler.outcome.stepped and "non-finite" in scaler.outcome.reason
    after = scaler.scales
    assert scaler.get_scale() == scale
    for index in range(DEPTH):
        name = f"layers.{index}"
        assert (after[name] < before[name]) == (index <= 4), name
    steps = trained(half, scaler, batch().half(), 100, optimizer)
    errors = [error(half.layers[0].weight.grad / scaler.get_scale(), expected) for _ in steps]
    assert scaler.scales == before  # one step is forgotten again
    assert errors[-1] < 1e-2


@needs_wide_gradients
def test_a_loss_that_is_not_finite_blames_no_layer() -> None:
    model, _ = reference()
    half = copy.deepcopy(model).half()
    scaler, optimizer = LayerScaler(half, slack_binades=0), Adding(half.parameters())
    for _ in trained(half, scaler, batch().half(), 8, optimizer):
        pass
    whole = {name: scale * scaler.get_scale() for name, scale in scaler.scales.items()}
    for _ in trained(half, scaler, batch().half() * math.nan, 20, optimizer):
        pass
    assert "the loss itself was nan" in scaler.outcome.reason
    assert scaler.get_scale() == 2.0**-4
    assert {name: scale * scaler.get_scale() for name, scale in scaler.scales.items()} == whole
    for _ in trained(half, scaler, batch().half(), 200, optimizer):
        pass
    assert scaler.get_scale() == 2.0**16


def test_a_thousand_steps_that_are_not_finite_leave_it_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scaler, optimizer = LayerScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    handle = poison(model[1])
    for _ in trained(model, scaler, x, 1000, optimizer):
        pass
    handle.remove()
    assert scaler.get_scale() == 2.0**-14
    for _ in trained(model, scaler, x, 2, optimizer):
        pass
    assert scaler.outcome.stepped
    assert all(p.isfinite().all() for p in model.parameters())
    for _ in trained(model, scaler, x, 400, optimizer):
        pass
    assert scaler.get_scale() == 2.0**16


def test_zero_gradients_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scaler, optimizer = LayerScaler(model), Adding(model.parameters())
    for _ in range(30):
        scaler.scale(model(torch.randn(2, 4)).sum() * 0.0).backward()
        scaler.step(optimizer)
        scaler.update()
    assert set(scaler.scales.values()) == {1.0} and scaler.get_scale() == 2.0**16


def test_measuring_is_rare_once_the_factors_stand() -> None:
    model = made("residual")
    scaler = LayerScaler(model, every=10)
    measured = [scaler._layers.meter.measuring for _ in trained(model, scaler, torch.randn(6, D), 40)]
    assert measured[0] and sum(measured[5:]) <= 4


@needs_wide_gradients
@pytest.mark.parametrize(("kind", "settings"), [(torch.optim.SGD, {}), (torch.optim.Adam, {"eps": 1e-4})])
def test_float16_parameters_are_stepped_with_float16_gradients(kind: Any, settings: dict[str, float]) -> None:
    torch.manual_seed(0)
    half = Chain(4).half()
    start = copy.deepcopy(half.state_dict())
    optimizer, scaler = kind(half.parameters(), lr=1e-2, **settings), LayerScaler(half)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(half, batch().half())).backward()
        assert half.layers[0].weight.grad.dtype is torch.float32
        scaler.unscale_(optimizer)
        assert half.layers[0].weight.grad.dtype is torch.float16  # as the optimizer's state
        scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in half.parameters())
    assert not torch.equal(half.layers[3].weight, start["layers.3.weight"])


@needs_wide_gradients
def test_master_weights_get_the_float32_gradients() -> None:
    model, expected = reference()
    half = copy.deepcopy(model).half()
    optimizer, scaler = MasterWeights(Adding(half.parameters())), LayerScaler(half)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(half, batch().half())).backward()
        scaler.unscale_(optimizer)
        found = optimizer.param_groups[0]["params"][0].grad.clone()
        scaler.step(optimizer)
        scaler.update()
    assert found.dtype is torch.float32
    assert error(found, expected) < 1e-2


@needs_wide_gradients
def test_a_state_resumes_bit_for_bit() -> None:
    def run(steps: int, saved: Any = None, rule: Any = "spectra") -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = Chain(6).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = LayerScaler(model, every=3, rule=rule)
        if saved is not None:
            model.load_state_dict(saved["model"])
            scaler.load_state_dict(saved["scaler"])
        start = 0 if saved is None else saved["step"]
        for step in range(start, steps):
            optimizer.zero_grad()
            x = batch().half() * (math.inf if step in (5, 6) else 1.0)
            handle = poison(model.layers[2]) if step == 4 else None
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            if handle is not None:
                handle.remove()
        weights = copy.deepcopy(model.state_dict())
        state = {"model": weights, "scaler": copy.deepcopy(scaler.state_dict()), "step": steps}
        return state, list(weights.values())

    for rule in ("spectra", "zhao"):
        whole, expected = run(14, rule=rule)
        half, _ = run(6, rule=rule)
        resumed, got = run(14, pickle.loads(pickle.dumps(half)), rule=rule)
        assert resumed["scaler"] == whole["scaler"]
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_states_of_other_scalers_and_other_models() -> None:
    scaler = LayerScaler(Chain(3))
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=2.0**8).state_dict())
    assert scaler.get_scale() == 2.0**8
    other = LayerScaler(nn.Sequential(nn.Linear(2, 2))).state_dict()
    with pytest.raises(StateError, match="a model with the same modules; got a state that differs in 0, layers.0"):
        scaler.load_state_dict(other)
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(scaler.state_dict())
    assert plain.get_scale() == 2.0**8


@needs_wide_gradients
def test_setting_the_scale_leaves_the_layers_what_they_carry() -> None:
    model, _ = reference()
    half = copy.deepcopy(model).half()
    scaler = LayerScaler(half)
    for _ in trained(half, scaler, batch().half(), 6):
        pass
    carried = {name: scale * scaler.get_scale() for name, scale in scaler.scales.items()}
    scaler.update(2.0**4)
    assert scaler.get_scale() == 2.0**4
    assert {name: scale * scaler.get_scale() for name, scale in scaler.scales.items()} == carried


def test_accumulation_several_losses_and_several_optimizers() -> None:
    def run(scaled: bool) -> list[Tensor]:
        model = made("branching")
        x = torch.randn(6, D, generator=torch.Generator().manual_seed(1))
        optimizers = [torch.optim.SGD([*model.a.parameters()], lr=0.0), Adding([*model.b.parameters()])]
        scaler = LayerScaler(model, enabled=scaled)
        scaler._layers.exponents = [3, -5, 12, 7]
        for part in x.chunk(3):
            out = model(part)
            first, second = scaler.scale([out.mean(), out.square().mean()])
            first.backward(retain_graph=True)
            second.backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        gradients = [p.grad.clone() for o in optimizers for p in o.param_groups[0]["params"]]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return gradients

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_a_watch_hears_of_it(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scaler, optimizer = LayerScaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for _ in trained(model, scaler, torch.randn(2, 4), 3, optimizer):
            pass
    steps, scales = pl.Run(tmp_path / "run").scalars("scale")
    assert list(scales) == [2.0**16] * 3 and len(steps) == 3


def test_bad_arguments_say_so() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="expected rule to be .spectra. or .zhao."):
        LayerScaler(model, rule="other")
    with pytest.raises(ArgumentError, match="every to be an integer of at least 1"):
        LayerScaler(model, every=0)
    with pytest.raises(ArgumentError, match="margin_binades to be an integer of at least 0; got margin_binades=-1"):
        LayerScaler(model, margin_binades=-1)
    with pytest.raises(ArgumentError, match="modules to scale; got ReLU, of which none is chosen"):
        LayerScaler(nn.ReLU())
    with pytest.raises(ArgumentError, match="history to be an integer of at least 1"):
        LayerScaler(model, history=0)
    assert not model._forward_hooks


@needs_wide_gradients
def test_residual_branches_meet_at_a_scale_that_both_can_carry() -> None:
    """The input needs no gradient: still the stream is made of activations, and its sums keep their scale."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h = h + torch.tanh(m.b(h))
        h = h + torch.tanh(m.c(h))
        return m.e(m.d(h))

    double = Written(forward, **linears(5))
    for last in (double.d, double.e):
        nn.init.normal_(last.weight, std=2.0**-13)
    double = double.half().double()
    half = copy.deepcopy(double).half()
    x = torch.randn(6, D).half()
    double(x.double()).square().sum().backward()
    scaler, optimizer = LayerScaler(half, init_scale=1.0), Adding(half.parameters())
    found: list[float] = []
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(half(x).double().square().sum()).backward()
        found.append(error(half.a.weight.grad, double.a.weight.grad))
        scaler.step(optimizer)
        scaler.update()
    assert found[0] > 0.5 and found[-1] < 1e-2


class Steep(nn.Module):
    """A unit that divides by the size of its input, so that its gradient alone overflows, and layers after it."""

    class First(nn.Module):
        """x W / |x W|, as a unit of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.normalize(torch.nn.functional.linear(x, self.weight), dim=-1, eps=1e-8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Steep.First(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_a_repeated_batch_lowers_the_layer_that_overflowed_and_not_the_loss_scale() -> None:
    torch.manual_seed(0)
    model = Steep()
    scaler = LayerScaler(model)
    loop = pl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), scaler=scaler, max_retries=24)
    x = batch()
    for _ in range(4):
        assert loop.step(lambda: loss_of(model, x)).retries == 0
    before, dark = dict(scaler.scales), x.clone()
    dark[0] = 0.0
    outcome = loop.step(lambda: loss_of(model, dark))
    assert outcome.stepped and outcome.retries > 0
    assert scaler.get_scale() == 2.0**16 == outcome.scale
    assert scaler.scales["first"] < before["first"] and scaler.scales["last"] == before["last"]
    assert not scaler.layers_lowered  # of the last run, which did not overflow
    loop.close()
    scaler.close()
