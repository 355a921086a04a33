"""`emulate` of a plan: the named modules in their formats while the context is open, and nowhere else."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.emulate import Emulation
from plimsoll.formats import Plan
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS

SCALES = {"weights": 2.0**6, "activations": 2.0**3, "gradients": 2.0**20}
PLAN = Plan(target="fp8", formats={"0": "e4m3", "2": "bf16"}, scales={"0": SCALES})


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def hooks(net: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules())


@pytest.mark.parametrize("where", ["object", "path", "name"])
def test_modules_compute_in_the_plans_formats_inside_only(where: str, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.toml")
    given = {"object": PLAN, "path": tmp_path / "plan.toml", "name": str(tmp_path / "plan.toml")}[where]
    net, x = model(), torch.randn(5, 8)
    plain = net(x)
    emulation = pl.emulate(given, model=net)
    assert isinstance(emulation, Emulation) and not hooks(net)
    with emulation:
        h, y = net[0](x), net(x)
        assert torch.equal(
            h, pl.cast(x, "e4m3", scale=8.0) @ pl.cast(net[0].weight, "e4m3", scale=64.0).mT + net[0].bias
        )
        z = net[2](net[1](h))
        assert torch.equal(y, z) and torch.equal(z, z.bfloat16().float()) and z.dtype == torch.float32
    assert not hooks(net) and torch.equal(net(x), plain) and not torch.equal(y, plain)
    assert emulation.operations.emulated == {"linear": 4}


def test_a_backward_after_the_context_casts_gradients_at_their_scale() -> None:
    net, x, seen = model(), torch.randn(5, 8), {}
    with pl.emulate(PLAN, model=net):
        h = net[0](x)
        h.register_hook(lambda g: seen.__setitem__("out", g.clone()))
        loss = h.square().mean() * 1e-3
    loss.backward()
    gradient = pl.cast(seen["out"], "e5m2", scale=2.0**20)
    assert (gradient != seen["out"]).any() and (pl.cast(seen["out"], "e5m2") != gradient).any()
    assert torch.equal(net[0].weight.grad, gradient.mT @ pl.cast(x, "e4m3", scale=8.0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_in_the_formats_after_the_context(reentrant: bool) -> None:
    gradients = []
    for again in (False, True):
        net, x = model(), torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with pl.emulate(PLAN, model=net):
            y = checkpoint(net, x, use_reentrant=reentrant) if again else net(x)
        assert not hooks(net)
        y.square().mean().backward()
        assert not hooks(net)
        gradients.append(net[0].weight.grad)
    assert torch.equal(*gradients)


def test_it_is_a_decorator_is_reentrant_and_ends_with_an_error() -> None:
    net, x = model(), torch.randn(5, 8)
    emulation = pl.emulate(PLAN, model=net)
    with emulation, emulation:
        y = net(x)
    assert torch.equal(emulation(lambda: net(x))(), y) and not hooks(net)
    with pytest.raises(ZeroDivisionError), emulation:
        _ = 1 / 0
    assert not hooks(net)


def test_it_holds_for_the_thread_that_opened_it() -> None:
    net, x, found = model(), torch.randn(5, 8), list[Tensor]()
    plain = net(x)
    with pl.emulate(PLAN, model=net):
        thread = threading.Thread(target=lambda: found.append(net(x)))
        thread.start()
        thread.join()
        assert not torch.equal(net(x), plain)
    assert torch.equal(found[0], plain)


def test_another_thread_may_run_the_model_meanwhile() -> None:
    class Meeting(nn.Module):
        """Its forward in one thread begins inside of that in another, and ends after it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is other:
                begun.set()
                ended.wait(HANG_SECONDS)
            elif other.ident is None:
                other.start()
                begun.wait(HANG_SECONDS)
            return self.linear(x)

    net, x, found = nn.Sequential(Meeting()), torch.randn(5, 8), list[Tensor]()
    begun, ended = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: found.append(net(x)))
    with pl.emulate(Plan(target="bf16", formats={"0": "bf16"}), model=net):
        net(x)
        ended.set()
        other.join()
        assert (x @ x.mT).dtype is torch.float32
    assert torch.equal(found[0], net(x))


@each("kind", ["conv", "addmm", "matmul"])
def test_weights_and_activations_have_their_own_scales_in_every_product(kind: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shape = (4, 8, 1) if kind == "conv" else (8, 4)
            self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "conv":
                return nn.functional.conv1d(x.mT[None], self.weight)[0].mT
            return torch.addmm(torch.zeros(4), x, self.weight) if kind == "addmm" else x @ self.weight

    net, x = Product(), torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 1e-2
    with pl.emulate(Plan(target="x", formats={"model": "e4m3"}, scales={"model": SCALES}), model=net):
        y = net(x)
    weight = net.weight[..., 0].mT if kind == "conv" else net.weight
    expected = pl.cast(x, "e4m3", scale=8.0) @ pl.cast(weight, "e4m3", scale=64.0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-9)


@each(
    ("arguments", "message"),
    [
        ({"precision": PLAN}, "emulate: expected the model of the plan; got NoneType. Write emulate"),
        (
            {"precision": "no.toml", "model": nn.Linear(2, 2)},
            "emulate: expected a plan file; got 'no.toml', which does not",
        ),
        (
            {"precision": PLAN, "model": model(), "forward": "e4m3"},
            "expected a plan with its model alone; got forward too",
        ),
        (
            {"precision": PLAN, "model": model(), "rounding": "up"},
            "expected a plan with its model alone; got rounding too",
        ),
        ({"precision": PLAN, "model": model(), "lists": None}, "expected a plan with its model alone; got lists too"),
        (
            {"precision": "fp16", "model": model()},
            "expected a model with a plan only; got Sequential with precision='fp16'",
        ),
        ({"precision": PLAN, "model": nn.Linear(2, 2)}, "expected each module of the plan to be in the model; got '0'"),
        (
            {"precision": Plan(target="x", formats={"0": "fp16"}, scales={"0": {"gradients": 2.0}}), "model": model()},
            "expected a plan without loss scales per layer; got one for 0, which needs a LayerScaler",
        ),
        (
            {"precision": Plan(target="x", formats={"0": "bf16"}, scales={"0": {"weights": 2.0}}), "model": model()},
            "expected scales of weights with formats that values are cast to; got 0 in bf16",
        ),
        (
            {"forward": "e4m3", "scale": {"input": 2.0}},
            "expected scale as a number, or a mapping by weights, activations",
        ),
        ({"forward": "e4m3", "scale": {"weights": -2.0}}, "cast: expected scale to be a number above 0"),
        (
            {"forward": "e4m3", "scale": {"weights": 2.0}, "operations": "all"},
            "expected scales by role where only products are rounded; got operations='all'",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.ArgumentError, match=message):
        pl.emulate(**arguments)
