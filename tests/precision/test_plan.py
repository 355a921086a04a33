"""Plans that `prepare` applies: formats both ways, scales of casts, of the loss, per layer; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.formats import Plan
from plimsoll.precision import prepare
from plimsoll.scaling import DynamicScaler, LayerScaler
from tests.support.cases import each

EIGHT = {"weights": 2.0**6, "activations": 2.0**3, "gradients": 2.0**20}


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def plan(**fields: Any) -> Plan:
    return Plan(**{"target": "x", "formats": {"0": "e4m3"}, **fields})


def step(loop: Any, x: Tensor) -> Tensor:
    with loop.forward():
        loss = loop.model(x).float().square().mean()
    loop.step(loss)
    return loss


def test_operands_are_cast_at_the_plans_scales_in_both_directions() -> None:
    net, x = model(), torch.randn(5, 8) * 1e-3
    seen: dict[str, Tensor] = {}
    with prepare(net, sgd(net), plan(scales={"0": EIGHT})) as loop:
        assert loop.scaler is None
        weight, bias = net[0].weight.detach().clone(), net[0].bias.detach().clone()
        with loop.forward():
            h = net[0](x)
            h.register_hook(lambda g: seen.__setitem__("out", g.clone()))
            net[0].weight.register_hook(lambda g: seen.__setitem__("weight", g.clone()))
            loss = net[2](net[1](h)).square().mean()
        held = pl.cast(x, "e4m3", scale=8.0), pl.cast(weight, "e4m3", scale=64.0)
        assert torch.equal(h.detach(), held[0] @ held[1].mT + bias)
        assert not torch.equal(pl.cast(x, "e4m3"), held[0]) and not torch.equal(pl.cast(weight, "e4m3"), held[1])
        loop.step(loss)
        gradient = pl.cast(seen["out"], "e5m2", scale=2.0**20)
        assert (gradient != seen["out"]).any()
        assert torch.equal(seen["weight"], gradient.mT @ held[0])


def test_the_backward_format_may_be_any_other() -> None:
    net, x, seen = model(), torch.randn(5, 8), {}
    by_hand = plan(formats={"0": "bf16"}, backward={"0": "e2m1"}, scales={"0": {"gradients": 2.0**4}})
    with prepare(net, sgd(net), by_hand) as loop:
        with loop.forward():
            h = net[0](x)
            h.register_hook(lambda g: seen.__setitem__("out", g.clone()))
            net[0].bias.register_hook(lambda g: seen.__setitem__("bias", g.clone()))
            net[0].weight.register_hook(lambda g: seen.__setitem__("weight", g.clone()))
            loss = net[2](net[1](h)).square().mean()
        assert h.dtype == torch.float32  # rounded operands, and not BF16's own products
        loop.step(loss)
    held = pl.cast(seen["out"], "e2m1", scale=16.0)
    assert torch.equal(seen["weight"], held.mT @ pl.cast(x, "bf16"))
    assert torch.equal(seen["bias"], seen["out"].sum(0))  # no operand of a product


def test_a_loss_scale_begins_where_the_plan_says() -> None:
    net = model()
    with prepare(net, sgd(net), plan(formats={"0": "fp16"}, scale=2.0**9)) as loop:
        assert isinstance(loop.scaler, DynamicScaler) and loop.scaler.get_scale() == 2.0**9
        step(loop, torch.randn(5, 8))
        assert loop.scaler.outcome.stepped
    with prepare(net, sgd(net), plan(formats={"0": "fp16"})) as loop:
        assert loop.scaler.get_scale() == 2.0**16
    with prepare(net, sgd(net), plan(formats={"0": "bf16"}, scale=4.0)) as loop:
        assert loop.scaler.get_scale() == 4.0  # asked for, though nothing needs it
    given = DynamicScaler("cpu", 2.0**5)
    with prepare(net, sgd(net), plan(formats={"0": "fp16"}, scale=2.0**9), scaler=given) as loop:
        assert loop.scaler is given and given.get_scale() == 2.0**5


@each("fmt", ["mxfp8_e4m3", "nvfp4", "bf16", "fp32"])
def test_formats_of_full_range_need_no_loss_scale(fmt: str) -> None:
    net = model()
    with prepare(net, sgd(net), plan(formats={"0": fmt})) as loop:
        assert loop.scaler is None
        step(loop, torch.randn(5, 8))
    with prepare(net, sgd(net), plan(formats={"0": "e4m3"})) as loop:
        assert loop.scaler is not None  # gradients in e5m2, without a scale of their own


def test_a_schedule_goes_over_to_the_scale_of_each_plan() -> None:
    net = model()
    stages = [(0, "amp-bf16"), (1, plan(formats={"0": "fp16"}, scale=2.0**7)),
              (3, plan(formats={"0": "fp16"}, scale=2.0**4, target="y")), (5, plan(scales={"0": EIGHT}))]  # fmt: skip
    scales: list[float | None] = []
    with prepare(net, sgd(net), stages) as loop:
        for _ in range(6):
            scales.append(None if loop.scaler is None else loop.scaler.get_scale())
            step(loop, torch.randn(5, 8))
    assert scales == [None, 2.0**7, 2.0**7, 2.0**4, 2.0**4, None]


def test_a_change_of_plan_begins_at_its_scale_too() -> None:
    net = model()
    with prepare(net, sgd(net), "fp32") as loop:
        step(loop, torch.randn(5, 8))
        loop.change(plan(formats={"0": "fp16"}, scale=2.0**7))
        assert loop.scaler.get_scale() == 2.0**7
        with pytest.raises(
            pl.ArgumentError, match="prepare: expected a plan that has a scale for each layer from the sta"
        ):
            loop.change(plan(formats={"0": "fp16"}, scales={"0": {"gradients": 8.0}}))
        step(loop, torch.randn(5, 8))


# -- scales per layer --------------------------------------------------------------------------------------------------


class Branch(nn.Module):
    """A network one of whose layers has gradients far below the others'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.far, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h + self.far(h) * 2.0**-36)


def _gradients(precision: object, steps: int = 6) -> dict[str, Tensor]:
    net = Branch()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with prepare(net, optimizer, precision) as loop:
        kept: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(
            lambda *_: kept.update({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        )
        for seed in range(steps):
            step(loop, torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)))
        assert loop.scaler is None or loop.scaler.outcome.stepped
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    return kept


def test_each_layer_has_its_scale_where_the_plan_gives_them(tmp_path: Path) -> None:
    net = Branch()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with pl.watch(net, optimizer, run=tmp_path / "run", every=1):
        for seed in range(6):
            loss = net(torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    made = pl.diagnosis.plan(tmp_path / "run", "fp16")
    assert set(made.formats.values()) == {"fp16"} and set(made.scales) == {"a", "far", "b"}
    wide, planned, single = _gradients("fp32"), _gradients(made), _gradients("amp-fp16")
    assert (wide["far.weight"] != 0).all() and (single["far.weight"] == 0).all()
    assert (planned["far.weight"] != 0).all()
    assert (planned["far.weight"] - wide["far.weight"]).norm() < 0.01 * wide["far.weight"].norm()

    other = Branch()
    with prepare(other, torch.optim.SGD(other.parameters(), lr=1e-3), made) as loop:
        assert isinstance(loop.scaler, LayerScaler)
        whole = {name: scale * loop.scaler.get_scale() for name, scale in loop.scaler.scales.items()}
        assert whole == {name: table["gradients"] for name, table in made.scales.items()}


def test_layer_scales_resume() -> None:
    layered = plan(formats={"0": "fp16", "2": "fp16"}, scales={"0": {"gradients": 2.0**20}, "2": {"gradients": 2.0**4}})
    weights = []
    for stop in (None, 3):
        net = model()
        loop = prepare(net, sgd(net), layered)
        for number in range(6):
            if number == stop:
                state = loop.state_dict()
                loop.close()
                net = model(7)
                loop = prepare(net, sgd(net), layered)
                loop.load_state_dict(state)
            step(loop, torch.randn(5, 8, generator=torch.Generator().manual_seed(number)))
        weights.append(net[0].weight.detach().clone())
        loop.close()
    assert torch.equal(*weights)


def test_a_loaded_scale_is_not_set_back_to_the_plans() -> None:
    stages = [(0, plan(formats={"0": "fp16"}, scale=2.0**3)), (1, plan(formats={"0": "fp16"}, scale=2.0**7))]
    net = model()
    with prepare(net, sgd(net), stages) as loop:
        for _ in range(3):
            step(loop, torch.randn(5, 8))
        loop.scaler.update(2.0**11)
        state = loop.state_dict()
    with prepare(net, sgd(net), stages) as loop:
        loop.load_state_dict(state)
        assert loop.scaler.get_scale() == 2.0**11


# -- recomputation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_modules_in_their_formats(reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.inner, self.again = model(), again

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.again else self.inner(x)

    gradients = []
    for again in (False, True):
        net = Recomputed(again)
        by_hand = plan(formats={"inner.0": "e4m3", "inner.2": "bf16"}, scales={"inner.0": EIGHT})
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        net.inner[0].weight.register_hook(lambda g: gradients.append(g.clone()))
        with prepare(net, sgd(net), by_hand) as loop:
            step(loop, x)
    assert torch.equal(*gradients)


# -- refusals ----------------------------------------------------------------------------------------------------------

LAYERED = plan(formats={"0": "fp16"}, scales={"0": {"gradients": 8.0}})


@each(
    ("by_hand", "arguments", "message"),
    [
        (
            plan(formats={"1": "e4m3"}),
            {},
            "for modules that multiply matrices; got '1' = 'e4m3', a Tanh, which multiplies",
        ),
        (plan(formats={"encoder": "e4m3"}), {}, "expected each module of the plan to be in the model; got 'encoder'"),
        (
            plan(formats={"0": "fp16"}, scales={"0": {"weights": 2.0}}),
            {},
            "expected scales of weights with formats that values are cast to; got 0 in fp16",
        ),
        (
            plan(formats={"0": "e4m3", "2": "fp16"}, scales={"0": EIGHT}),
            {},
            "whose gradients are scaled in one way; got a scale of the cast for '0', .* and '2' needs a loss scale",
        ),
        (
            plan(scale=8.0, scales={"0": EIGHT}),
            {},
            "a scale of the cast for '0', which is of true gradients, and a loss",
        ),
        (
            plan(formats={"0": "e4m3", "2": "bf16"}, scales={"0": EIGHT, "2": {"gradients": 2.0}}),
            {},
            "and '2' has one per layer",
        ),
        (plan(scales={"0": EIGHT}), {"scaler": DynamicScaler("cpu")}, "no scaler with a plan whose scales are of true"),
        (LAYERED, {"scaler": DynamicScaler("cpu")}, "no scaler with a plan that has a scale for each layer; got a Dyn"),
        ([(0, "fp32"), (5, LAYERED)], {}, r"to hold for the whole training; got a schedule of fp32, plan \(x\)"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name_and_nothing_changes(
    by_hand: Any, arguments: dict, message: str
) -> None:
    net = model()
    with pytest.raises(pl.ArgumentError, match=f"prepare: .*{message}"):
        prepare(net, sgd(net), by_hand, **arguments)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    prepare(net, sgd(net), "fp32").close()


def test_the_weight_inside_an_attention_is_not_a_module_that_is_called() -> None:
    net = nn.MultiheadAttention(8, 2)
    with pytest.raises(
        pl.ArgumentError, match="expected modules that are called; got 'out_proj', whose weight the att"
    ):
        prepare(net, sgd(net), plan(formats={"out_proj": "bf16"}))


def test_a_layer_scaler_that_cannot_be_leaves_the_model_as_it_was() -> None:
    net = model()
    net[0].compile()
    with pytest.raises(pl.ArgumentError, match="LayerScaler: expected a model that runs eagerly; got 0, compiled"):
        prepare(net, sgd(net), LAYERED)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_two_names_of_one_module_may_not_say_different_things() -> None:
    net = model()
    net.again = net[0]
    with pytest.raises(
        pl.ArgumentError, match="expected one format for a module that has two names; got '0' and 'again'"
    ):
        prepare(net, sgd(net), plan(formats={"0": "e4m3", "again": "bf16"}))
    with prepare(net, sgd(net), plan(formats={"again": "bf16"})) as loop, loop.forward():
        y = net[0](torch.randn(2, 8))
        assert torch.equal(y, y.bfloat16().float())
