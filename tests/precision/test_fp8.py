"""The levels fp8-unit and fp8-tensor: what runs in FP8, that all else stays, and that a model is given back whole."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll import fp8, unit
from plimsoll.precision import prepare
from plimsoll.scaling import DynamicScaler, LayerScaler
from tests.support.cases import each
from tests.support.precision.training import batches, contents, counted, loss_of, run

BF = torch.bfloat16


class Unit(nn.Module):
    """A unit-scaled model with hidden layers of several sizes, a readout, and a plain layer if asked."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.embed = unit.nn.Linear(8, 32)
        self.norm = unit.nn.LayerNorm(32)
        self.hidden = unit.nn.Linear(32, 16, bias=False)
        self.act = unit.nn.GELU()
        self.plain = nn.Linear(16, 16) if plain else nn.Identity()
        self.head = unit.nn.LinearReadout(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.plain(self.act(self.hidden(self.norm(self.embed(x))))))


def unit_model(seed: int = 0, plain: bool = False) -> Unit:
    torch.manual_seed(seed)
    return Unit(plain)


def plain_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


MODELS = {"fp8-unit": unit_model, "fp8-tensor": plain_model}
LEVELS = list(MODELS)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def eights(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, fp8.Linear)]


def fabric(model: nn.Module) -> list[Any]:
    """What a model is made of, but for the values: classes, attributes, buffers, hooks."""
    return [
        (name, type(module), sorted(vars(module)), sorted(module._buffers), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


def test_linear_layers_run_in_fp8_and_the_rest_in_bf16_by_the_lists() -> None:
    model = plain_model()
    twin, x = copy.deepcopy(model), batches(1)[0][0]
    with prepare(model, adamw(model), "fp8-tensor") as loop:
        assert eights(model) == ["0", "3"] and loop.scaler is None and loop.fp8_left == {}
        with loop.forward():
            hidden = model[0](x)
            y = model[3](model[2](model[1](hidden)))
        layer = fp8.convert(twin[0], "tensor")
        assert torch.equal(hidden, layer(x).to(BF)) and hidden.dtype == y.dtype == BF
        with torch.no_grad():
            expected = torch.nn.functional.layer_norm(hidden.float(), (32,), twin[1].weight, twin[1].bias)
            with loop.evaluate():
                assert torch.equal(model[1](hidden), expected)  # norms are on the lists' high side
        y.float().square().mean().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        loop.zero_grad()


@pytest.mark.parametrize("name", LEVELS)
def test_a_model_is_given_back_as_it_was(name: str) -> None:
    model = MODELS[name]()
    before, parameters = fabric(model), list(model.parameters())
    keys = list(model.state_dict())
    optimizer = adamw(model)
    called: list[str] = []
    model.get_submodule(eights_of(name)[0]).register_forward_hook(lambda *_: called.append("before"))
    before_hooks = fabric(model)
    loop = prepare(model, optimizer, name)
    model.get_submodule(eights_of(name)[0]).register_forward_hook(lambda *_: called.append("inside"))
    assert eights(model) == eights_of(name) and list(model.state_dict()) == keys
    run(loop, batches(2))
    assert called == ["before", "inside"] * 2
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    loop.close()
    assert fabric(model) == before_hooks == before and eights(model) == []
    loss_of(model, batches(1)[0]).backward()
    assert called[-2:] == ["before", "inside"]  # hooks stay with the module
    copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(model.state_dict())).keys() == dict.fromkeys(keys).keys()
    prepare(model, optimizer, name).close()


def eights_of(name: str) -> list[str]:
    return ["embed", "hidden"] if name == "fp8-unit" else ["0", "3"]


@pytest.mark.parametrize("name", LEVELS)
def test_it_trains(name: str) -> None:
    model = MODELS[name]()
    losses = run(prepare(model, adamw(model), name), batches(60))
    assert sum(losses[-5:]) < 0.35 * sum(losses[:5])


def test_constant_scales_need_no_loss_scale_and_leave_the_readout_in_bf16() -> None:
    model = unit_model(plain=True)
    with prepare(model, adamw(model), "fp8-unit") as loop:
        assert loop.scaler is None and loop.precision == "fp8-unit"
        for name in ("embed", "hidden"):
            casts = model.get_submodule(name).casts()
            assert {role: fmt for role, (fmt, _) in casts.items()} == {
                "activations": "e4m3",
                "weights": "e4m3",
                "gradients": "e5m2",
            }
            assert {scale for _, scale in casts.values()} == {1.0}
        assert loop.fp8_left == {
            "head": "a readout, whose gradients come straight from the loss; with_module(name, 'e4m3') takes it in",
            "plain": "it is not unit-scaled",
        }
        assert type(model.head) is unit.nn.LinearReadout and type(model.plain) is nn.Linear
    assert loop.fp8_left == {}


def test_unit_scaled_layers_keep_their_factors() -> None:
    model = unit_model()
    twin, (x, _) = copy.deepcopy(model), batches(1)[0]
    with torch.no_grad(), prepare(model, adamw(model), "fp8-unit") as loop, loop.forward():
        found, expected = model.embed(x).float(), twin.embed(x)
    assert float((found - expected).std() / expected.std()) < 0.06  # E4M3 rounds to 4 bits; another factor is 2.8 off


def test_a_converted_model_is_unit_scaled() -> None:
    torch.manual_seed(0)
    converted = unit.convert(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(4, 8))
    unit.tag(converted.get_submodule("2"), weight="readout")
    with prepare(converted, adamw(converted), "fp8-unit") as loop:
        assert eights(converted) == ["0"] and "a readout" in loop.fp8_left["2"]
        with loop.forward():
            loss = converted(torch.randn(16, 8)).float().square().mean()
        loop.step(loss)
    assert type(converted.get_submodule("0")) is unit.nn.Linear


def test_rules_of_a_policy_come_first() -> None:
    model = unit_model()
    policy = pl.Policy().with_module("embed", "fp32").with_module("head", "e4m3")
    with prepare(model, adamw(model), "fp8-unit", policy=policy) as loop:
        assert eights(model) == ["hidden", "head"] and loop.fp8_left == {"embed": "the policy has it in fp32"}
        with loop.forward():
            assert model.embed(batches(1)[0][0]).dtype == torch.float32
    stack = nn.Sequential(plain_model(), plain_model())
    with prepare(stack, adamw(stack), "fp8-tensor", policy=pl.Policy().with_module("0", "bf16")) as loop:
        assert eights(stack) == ["1.0", "1.3"] and set(loop.fp8_left) == {"0.0", "0.3"}
    everything = pl.Policy().with_module("*", "bf16")
    model = plain_model()
    with pytest.raises(pl.ArgumentError, match=r"can run in FP8 at fp8-tensor; got .* the policy has it in bf16. Use"):
        prepare(model, adamw(model), "fp8-tensor", policy=everything)
    assert eights(model) == []


def test_names_that_look_like_globs_are_names() -> None:
    model = nn.ModuleDict({"a[0]": nn.Linear(8, 8), "a0": nn.Linear(8, 8)})
    with prepare(model, adamw(model), "fp8-tensor", policy=pl.Policy().with_module("a0", "bf16")):
        assert eights(model) == ["a[0]"]


@pytest.mark.parametrize("name", LEVELS)
def test_a_schedule_goes_there_and_back(name: str) -> None:
    model = MODELS[name]()
    loop = prepare(model, adamw(model), [(0, "amp-bf16"), (2, name), (4, "amp-bf16"), (6, name)])
    seen = []
    for batch in batches(8):
        seen.append(bool(eights(model)))
        before = [p.detach().clone() for p in model.parameters()]
        run(loop, [batch])
        assert not all(map(torch.equal, before, model.parameters()))
    assert seen == [False, False, True, True, False, False, True, True]
    loop.change("fp32")
    assert eights(model) == [] and not model.state_dict().keys() ^ MODELS[name]().state_dict().keys()
    loop.change(name)
    assert eights(model) == eights_of(name)
    loop.close()


def test_weights_pass_exactly_between_levels() -> None:
    model = unit_model()
    loop = prepare(model, adamw(model), "fp8-unit")
    run(loop, batches(3))
    before = contents(model.state_dict())
    loop.change("fp32")
    assert contents(model.state_dict()) == before
    loop.close()
    assert contents(model.state_dict()) == before


@pytest.mark.parametrize("history", [0, 3])
@pytest.mark.parametrize("name", LEVELS)
def test_resumed_equals_uninterrupted(name: str, history: int, tmp_path: Path) -> None:
    policy = pl.Policy().with_fp8(history=history, margin=1) if name == "fp8-tensor" else None
    schedule = [(0, "amp-bf16"), (2, name)]

    def prepared(seed: int) -> Any:
        model = MODELS[name](seed)
        return prepare(model, adamw(model), schedule, policy=policy, accumulate=2)

    loop, data = prepared(0), batches(20)
    run(loop, data[:10])
    torch.save(loop.state_dict(), tmp_path / "state.pt")
    losses = run(loop, data[10:])
    other = prepared(1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.precision == name and run(other, data[10:]) == losses
    assert contents(other.model.state_dict()) == contents(loop.model.state_dict())


def test_delayed_scales_follow_the_last_steps() -> None:
    model = plain_model()
    policy = pl.Policy().with_fp8(history=4)
    assert [record for record in policy.records() if record.kind == "fp8"] == [("fp8", "history", "4 steps")]
    with prepare(model, adamw(model), "fp8-tensor", policy=policy) as loop:
        assert model[0].fp8_recipe.history == 4 and model[0].fp8_recipe.margin == 0
        run(loop, batches(3))
        loop.change(policy=policy.with_fp8(margin=2))
        assert (model[0].fp8_recipe.history, model[0].fp8_recipe.margin) == (4, 2)


@pytest.mark.parametrize("name", LEVELS)
def test_weights_are_cast_once_for_all_micro_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from plimsoll.fp8 import linear
    from plimsoll.precision.levels.fp8_layers import Layers

    cast, calls = counted(linear.to_codes)
    monkeypatch.setattr(linear, "to_codes", cast)
    found = []
    for held in (False, True):
        if not held:
            kept = Layers.hold_weights
            monkeypatch.setattr(Layers, "hold_weights", lambda _: None)
        else:
            monkeypatch.setattr(Layers, "hold_weights", kept)
        model = MODELS[name]()
        calls.clear()
        with prepare(model, adamw(model), name, accumulate=4) as loop:
            losses = run(loop, batches(8))
            assert len(calls) == (2 * 2 if held else 2 * 8)
            with loop.forward():
                model(batches(1)[0][0])
            loop.zero_grad()  # what was begun is dropped, and its weights with it
            found.append((losses, contents(model.state_dict()), losses_of(loop)))
    assert found[0] == found[1]


def losses_of(loop: Any) -> list[float]:
    return run(loop, batches(4, seed=9))


def test_a_checkpointed_part_is_recomputed_in_fp8() -> None:
    found = []
    for recompute in (False, True):
        model = unit_model()
        with prepare(model, adamw(model), "fp8-unit") as loop:
            x, y = batches(1)[0]
            with loop.forward():
                h = checkpoint(model.embed, x, use_reentrant=False) if recompute else model.embed(x)
                loss = (model.head(model.act(model.hidden(model.norm(h)))).float() - y).square().mean()
            loop.step(loss)
            found.append(contents(model.state_dict()))
    assert found[0] == found[1]


def test_a_clipped_step_has_the_bound() -> None:
    model = plain_model()
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp8-tensor", clip_norm=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    run(loop, batches(1))
    moved = torch.cat([(a - b).detach().flatten() for a, b in zip(before, model.parameters(), strict=True)])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


@each(
    ("make", "arguments", "message"),
    [
        (plain_model, {"precision": "fp8-unit"}, "whose linear layers (0, 3) are not. Convert it with plimsoll.unit."),
        (unit_model, {"precision": "fp8-unit", "scaler": DynamicScaler("cpu")}, "expected no scaler at fp8-unit"),
        (
            unit_model,
            {"precision": [(0, "amp-fp16"), (5, "fp8-unit")], "scaler": DynamicScaler("cpu")},
            "constant scales are of true gradients; got a DynamicScaler",
        ),
        (
            plain_model,
            {"precision": "amp-bf16", "policy": pl.Policy(fp8_history=2)},
            "got a policy with them at amp-bf16",
        ),
        (
            unit_model,
            {"precision": "fp8-unit", "policy": pl.Policy(fp8_margin=2)},
            "with them at fp8-unit. Take with_fp8",
        ),
        (lambda: nn.Sequential(nn.BatchNorm1d(8)), {"precision": "fp8-tensor"}, "got a Sequential with none. Use amp"),
        (
            lambda: fp8.convert(plain_model(), "tensor"),
            {"precision": "fp8-unit"},
            "FP8 layers whose scaling is 'unit' at fp8-unit; got 0 with 'tensor'. Use fp8-tensor",
        ),
        (plain_model, {"precision": [(0, "fp32"), (9, "fp8-unit")]}, "expected a unit-scaled model at fp8-unit"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(make: Any, arguments: dict[str, Any], message: str) -> None:
    model = make()
    before = fabric(model)
    with pytest.raises(pl.ArgumentError, match=re.escape(message)):
        prepare(model, adamw(model), **arguments)
    assert fabric(model) == before


def test_a_scale_for_each_layer_is_refused() -> None:
    model = plain_model()
    scaler = LayerScaler(model, device="cpu")
    with pytest.raises(pl.ArgumentError, match="expected no scale for each layer at fp8-tensor.*LayerScaler. Leave"):
        prepare(model, adamw(model), "fp8-tensor", scaler=scaler)
    scaler.close()


def test_a_loss_scale_given_for_scales_that_follow_the_data_is_used() -> None:
    model = plain_model()
    scaler = DynamicScaler("cpu", 2.0**10)
    with prepare(model, adamw(model), "fp8-tensor", scaler=scaler) as loop:
        run(loop, batches(2))
        assert loop.scaler is scaler and scaler.get_scale() == 2.0**10


@each("bad", [{"fp8_history": -1}, {"fp8_margin": True}, {"fp8_margin": 99}])
def test_options_that_are_none_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(pl.ArgumentError, match="Policy: expected"):
        pl.Policy(**bad)


def test_layers_that_are_fp8_already_are_taken_and_left() -> None:
    model = fp8.convert(plain_model(), "tensor", exclude="3")
    with prepare(model, adamw(model), "fp8-tensor"):
        assert eights(model) == ["0", "3"]
    assert eights(model) == ["0"]
    with prepare(model, adamw(model), [(0, "fp8-tensor"), (1, "amp-bf16")]) as loop:
        run(loop, batches(2))
        assert eights(model) == ["0"]  # the user's own, whatever the level


def test_a_failure_on_the_way_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from plimsoll.precision.levels import active_level

    model = plain_model()
    before = fabric(model)
    with monkeypatch.context() as patched:
        patched.setattr(active_level, "Arithmetic", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(model, adamw(model), "fp8-tensor")
    assert fabric(model) == before
    prepare(model, adamw(model), "fp8-tensor").close()


def test_a_run_says_what_is_cast_from_which_step_on(tmp_path: Path) -> None:
    model = unit_model()
    schedule = [(0, "amp-bf16"), (2, "fp8-unit"), (4, "amp-bf16")]
    loop = prepare(model, adamw(model), schedule)
    with loop, pl.watch(model, loop.optimizer, run=tmp_path / "run", every=1):
        run(loop, batches(6))
    casts = pl.Run(tmp_path / "run").casts()
    assert {(c.module, c.since_step, c.until_step) for c in casts} == {("embed", 2, 3), ("hidden", 2, 3)}
    assert {c.scales.tolist()[0] for c in casts} == {1.0}


def test_watching_changes_nothing(tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path / "run"):
        model = plain_model()
        with prepare(model, adamw(model), "fp8-tensor", watch=path) as loop:
            found.append((run(loop, batches(6)), contents(model.state_dict())))
    assert found[0] == found[1]
    assert {c.module for c in pl.Run(tmp_path / "run").casts()} == {"0", "3"}
