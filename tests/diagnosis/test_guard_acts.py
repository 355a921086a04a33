"""Acts on modules and on the run, in trainings that need them."""

import copy
import itertools
import math
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Guard, Limits
from plimsoll.errors import ArgumentError, GuardStop
from tests.support.diagnosis.guarded import (
    NEVER,
    acts,
    by_hand,
    by_loop,
    finite,
    guard_events,
    looking,
    loss_of,
    lost,
    net,
    scaler_at,
)

QUICK = Limits(steps=20)


def test_a_layer_that_no_scale_serves_runs_in_bf16_by_hand(tmp_path: Path) -> None:
    model = net(small=2.0**-11)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), scaler_at(2.0**15)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale", "to_bf16"], scaler=scaler, dry_run=False, every=NEVER, limits=QUICK)
    by_hand(model, optimizer, scaler, range(40), between=looking(guard))
    first = guard.acts[0]
    assert (first.action, first.rule, first.where, first.after) == ("to_bf16", "underflow-high", ("side.0",), "bf16")
    watch.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    run = pl.Run(tmp_path / "run")
    formats = {row["step"]: row["format"] for row in run.table("activations", "side.0:output").to_pylist()}
    assert formats[first.step] == "fp16" and formats[first.step + 2] == "bf16"
    assert len(guard.acts) == 1  # that helped; and no other layer is touched for "no-single-scale"
    assert lost(tmp_path / "run", "side.0.weight", 10) > 0.1 > lost(tmp_path / "run", "side.0.weight", 38) == 0


def test_a_loop_gets_a_policy_for_the_layer(tmp_path: Path) -> None:
    model = net(small=2.0**-11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loop = pl.prepare(model, optimizer, "amp-fp16", scaler=scaler_at(2.0**15))
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["to_bf16"], loop=loop, dry_run=False, every=NEVER, limits=QUICK)
    losses = by_loop(loop, range(30), between=looking(guard))
    watch.close()
    (act,) = guard.acts
    assert (act.where, act.before, act.after) == (("side.0",), "amp-fp16", "bf16")
    assert loop.policy.modules == (("side.0", "bf16"),) and loop.precision == "amp-fp16"
    assert lost(tmp_path / "run", "side.0.weight", 10) > 0.05 > lost(tmp_path / "run", "side.0.weight", 28) == 0
    assert finite(losses)
    loop.close()


def test_a_loop_goes_over_to_bf16_where_all_layers_suffer(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loop = pl.prepare(model, optimizer, "amp-fp16", scaler=scaler_at(1.0))
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["to_bf16"], loop=loop, dry_run=False, every=NEVER, limits=QUICK)
    by_loop(loop, range(40), factor=1e-6, between=looking(guard))
    watch.close()
    (act,) = guard.acts
    assert (act.where, act.before, act.after) == ((), "amp-fp16", "amp-bf16")
    assert loop.precision == "amp-bf16"
    assert lost(tmp_path / "run", "a.weight", 10) > 0.3
    assert lost(tmp_path / "run", "a.weight", 38) < 0.01
    loop.close()


def test_a_model_by_hand_goes_over_to_bf16_where_all_layers_suffer(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["to_bf16"], dry_run=False, every=NEVER, limits=QUICK)
    by_hand(model, optimizer, None, range(30), factor=1e-6, between=looking(guard))
    watch.close()
    assert [act.where for act in guard.acts] == [("model",)]
    assert lost(tmp_path / "run", "a.weight", 10) > 0.3
    assert lost(tmp_path / "run", "a.weight", 28) < 0.01


def test_bf16_enters_whatever_autocast_is_in_force() -> None:
    """torch's own, an emulation, or none; and leaves it as it was when the module raises."""
    from plimsoll.diagnosis.guard.actions.numerics import InBF16

    seen: list[torch.dtype] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            if y.isnan().any():
                raise ValueError("NaN")
            return y

    model = nn.Sequential(nn.Linear(4, 4), Inner(4, 4), nn.Linear(4, 4))
    regions = InBF16([model[1]], "cpu")
    x = torch.randn(2, 4)
    for around in (torch.autocast("cpu", torch.float16), pl.emulate("fp16"), torch.autocast("cpu", enabled=False)):
        with around:
            outside = model[0](x).dtype
            model(x)
            with pytest.raises(ValueError, match="NaN"):
                model[1](torch.full((1, 4), torch.nan))
            assert model[0](x).dtype is outside
    assert set(seen) == {torch.bfloat16}
    regions.remove()
    model(x)
    assert seen[-1] is torch.float32


def test_weights_in_fp16_are_not_for_autocast(tmp_path: Path) -> None:
    model = net().half()
    watch = pl.watch(model, run=tmp_path / "run")
    guard = Guard(watch, ["to_bf16"])
    found = guard._remedies["to_bf16"].propose(_finding(), 0, 0, None)
    watch.close()
    assert found == "the weights of model are torch.float16, which autocast does not change"


class Stream(nn.Module):
    """A residual stream whose block adds more at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.gain = 100.0
        with torch.no_grad():
            self.block.weight *= 4

    def forward(self, x: Tensor) -> Tensor:
        stream = self.block(self.embed(x) * self.gain)
        return self.head(nn.functional.layer_norm(stream.float(), (16,)))


def test_activations_that_grow_past_the_format_are_clamped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stream()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), scaler_at(2.0**8)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(
        watch, ["clamp", "stop"], scaler=scaler, dry_run=False, every=NEVER, limits=QUICK, rules=["overflow-*"]
    )

    def grow(step: int) -> None:
        looking(guard)(step)
        model.gain = min(model.gain * 1.5, 9e3)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = by_hand(model, optimizer, scaler, range(41), between=grow)
        assert guard.acts
        model.gain = 2.2e4
        losses += by_hand(model, optimizer, scaler, range(41, 70), between=looking(guard))
    assert any("values that block returned lay beyond 65504" in str(warning.message) for warning in caught)
    assert any("plimsoll: clamp in block" in str(warning.message) for warning in caught)
    watch.close()
    assert {act.action for act in guard.acts} == {"clamp"}
    assert ("block",) in [act.where for act in guard.acts]
    table = pl.Run(tmp_path / "run").table("activations", "block:output").to_pylist()
    late = [row["absmax"] for row in table if row["step"] > guard.acts[0].step]
    assert max(late) == 65504.0  # the watch sees what is clamped
    assert not any(row["pos_infs"] for row in table if row["step"] > guard.acts[0].step)
    assert any(f.rule == "overflow-ahead" for f in guard.findings)  # they are near the top still, and that is all right
    assert finite(losses)
    assert not model.block._forward_hooks


def test_a_run_that_goes_nan_is_rolled_back_and_trains_on(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["rollback", "stop"], dry_run=False, every=NEVER)
    saved: dict[str, object] = {}

    def between(step: int) -> None:
        if step == 29:
            assert guard.checkpoint()
            saved.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
            saved["random"] = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        if step == 40:
            with torch.no_grad():
                model.b.weight[0, 0] = math.nan
            assert not guard.checkpoint()  # nothing to go back to
        if step in (39, 49):
            guard.look()

    losses = by_hand(model, optimizer, None, range(50), between=between)
    assert guard.acts == () and not finite(losses[41:])
    generators = []

    def restored(step: int) -> None:
        if step == 50:
            assert all(
                torch.equal(a, b) for a, b in zip(model.state_dict().values(), saved["model"].values(), strict=True)
            )
            for key, state in optimizer.state_dict()["state"].items():
                assert torch.equal(state["exp_avg"], saved["optimizer"]["state"][key]["exp_avg"])
            generators.append((torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))  # noqa: NPY002
        if step == 69:
            guard.look()

    further = by_hand(model, optimizer, None, range(50, 90), between=restored)
    watch.close()
    (act,) = guard.acts
    assert (act.action, act.rule, act.before, act.after, act.step) == ("rollback", "nonfinite", 51, 30, 50)
    assert act.since_step == 41
    assert finite(further[1:]) and further[-1] < losses[29]
    for now, then in zip(generators[0][:1], saved["random"][:1], strict=True):
        assert torch.equal(now, then)
    assert generators[0][1] == saved["random"][1] and (generators[0][2] == saved["random"][2]).all()
    refused = [event for event in pl.Run(tmp_path / "run").events() if "no checkpoint was saved" in event.message]
    assert "b.weight holds values that are not finite" in refused[0].message


def test_a_checkpoint_serves_twice(tmp_path: Path) -> None:
    """An optimizer goes on writing into the state that it loads: the guard's copy must not be that."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch, Guard(watch, ["rollback"]) as guard:
        by_hand(model, optimizer, None, range(5))
        guard.checkpoint()
        expected = copy.deepcopy(optimizer.state_dict()["state"][0])
        keeper = guard._training.keeper
        for _ in range(2):
            by_hand(model, optimizer, None, range(5, 10))
            keeper.restore(5)
            state = optimizer.state_dict()["state"][0]
            assert all(torch.equal(state[name], expected[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
        assert all(p.grad is None for p in model.parameters())


def test_the_last_checkpoint_before_the_finding_is_the_good_one(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch, Guard(watch, ["rollback"], kept=3) as guard:
        by_hand(model, optimizer, None, range(12), between=lambda step: guard.checkpoint() if step % 2 else None)
        assert guard.checkpoints == [8, 10, 12]
        good = guard._training.keeper.good
        assert good(8) is None and good(10).step == 8 and good(11).step == 10 and good(99).step == 12
        guard._training.keeper.restore(10)
        assert guard.checkpoints == [8, 10]


def test_a_loop_is_rolled_back_whole(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    loop = pl.prepare(model, optimizer, "amp-bf16", schedulers=schedule)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2) as watch:
        guard = Guard(watch, "rollback", loop=loop, dry_run=False, every=NEVER)
        by_loop(loop, range(10))
        assert guard.checkpoint(loop.state_dict())
        expected = copy.deepcopy(loop.state_dict())
        by_loop(loop, range(10, 18))
        with torch.no_grad():
            model.head.bias[0] = math.nan
        by_loop(loop, range(18, 20))
        guard.look()
        by_loop(loop, range(20, 21))
        assert acts(guard) == [("rollback", "nonfinite", "done")]
        assert loop.step_index == 10 and schedule.last_epoch == 10
        found = loop.state_dict()
        assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
        assert found["optimizers"][0]["param_groups"] == expected["optimizers"][0]["param_groups"]
        assert watch.step_index == 20  # the run's steps go on
    loop.close()


def test_checkpoints_kept_elsewhere_are_restored_by_a_function(tmp_path: Path) -> None:
    model, calls = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch, Guard(watch, ["rollback"]) as guard:
        assert guard.checkpoint(lambda: calls.append("restored"))
        guard._training.keeper.restore(0)
    assert calls == ["restored"]


def test_what_is_to_be_saved_may_be_named(tmp_path: Path) -> None:
    model, other = net(), nn.Linear(1, 1)
    with pl.watch(model, run=tmp_path / "run") as watch:
        guard = Guard(watch, ["rollback"], checkpoint={"model": model, "average": other})
        assert guard.checkpoint()
        with torch.no_grad():
            other.weight.fill_(7.0)
        with pytest.raises(ArgumentError, match="the states of model, average, by these names; got model"):
            guard.checkpoint({"model": model.state_dict()})
        guard._training.keeper.restore(0)
        assert other.weight.item() != 7.0


def test_a_restored_module_has_the_version_that_it_was_saved_with(tmp_path: Path) -> None:
    versions: list[object] = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
            versions.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    model = nn.Sequential(Versioned(1, 1))
    with pl.watch(model, run=tmp_path / "run") as watch:
        guard = Guard(watch, ["rollback"], checkpoint={"model": model})
        assert guard.checkpoint()
        guard._training.keeper.restore(0)
    assert versions == [3]


@pytest.mark.parametrize("kind", ["hand", "scaled", "loop"])
def test_a_step_that_is_left_out_changes_nothing(kind: str, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scaler = scaler_at(2.0**4) if kind != "hand" else None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loop = pl.prepare(model, optimizer, "amp-fp16", scaler=scaler, schedulers=schedule) if kind == "loop" else None
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        guard = Guard(watch, ["skip"], loop=loop, scaler=None if loop else scaler, dry_run=False, every=NEVER)
        seen = []

        def between(step: int) -> None:
            seen.append([p.detach().clone() for p in model.parameters()])

        def train(steps: range) -> None:
            if loop is not None:
                by_loop(loop, steps, between=between)
            else:
                by_hand(model, optimizer, scaler, steps, between=between)

        train(range(3))
        order = guard._remedies["skip"].propose(_finding(), 0, 0, None)
        guard._act(order, 2)
        train(range(3, 5))
        same = [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise(seen)]
        assert same == [False, False, True, False]
        assert optimizer.state_dict()["state"][0]["step"] == 4
        if loop is not None:
            assert schedule.last_epoch == 4
    assert list(pl.Run(tmp_path / "run").scalars("loss")[0]) == [0, 1, 2, 3, 4]
    if loop is not None:
        loop.close()


def _finding() -> pl.Finding:
    return pl.Finding(
        rule="loss-spike", severity="warning", since_step=2, until_step=2, advice="", meaning="It jumps.", figure="",
        actions=("skip",),
    )  # fmt: skip


def test_a_loop_says_why_it_left_a_step_out(tmp_path: Path) -> None:
    model = net()
    loop = pl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", max_retries=0)
    loop.skip_next("for a reason")
    with loop.forward():
        loss = loss_of(model, 0)
    outcome = loop.step(loss)
    assert (outcome.stepped, outcome.reason) == (False, "for a reason")
    with loop.forward():
        loss = loss_of(model, 0)
    assert loop.step(loss).stepped
    loop.close()


def test_the_end_comes_with_a_report_of_the_run(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reported = []

    def report(path: Path) -> Path:
        reported.append([f.rule for f in pl.diagnose(path)])
        (tmp_path / "report.txt").write_text("nonfinite")
        return tmp_path / "report.txt"

    with pl.watch(model, optimizer, run=tmp_path / "run", every=2) as watch:
        guard = Guard(watch, ["stop"], dry_run=False, every=NEVER, report=report)
        by_hand(model, optimizer, None, range(10))
        with torch.no_grad():
            model.a.weight[0, 0] = math.inf
        by_hand(model, optimizer, None, range(10, 20))
        guard.look()
        with pytest.raises(GuardStop, match="got alarm: nonfinite since step 10 .* The report is at .*report.txt"):
            by_hand(model, optimizer, None, range(20, 30))
        assert guard.closed and acts(guard) == [("stop", "nonfinite", "done")]
        assert reported and "nonfinite" in reported[0]
        events = guard_events(tmp_path / "run")
        assert [event["action"] for event in events] == ["stop"]  # on disk before the training ended
        by_hand(model, optimizer, None, range(20, 22))  # whoever catches it may go on


def test_a_report_that_fails_does_not_keep_the_training_going(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def broken(path: Path) -> None:
        raise OSError("no room")

    with pl.watch(model, optimizer, run=tmp_path / "run", every=2) as watch:
        guard = Guard(watch, ["stop"], dry_run=False, every=NEVER, report=broken)
        by_hand(model, optimizer, None, range(4))
        with torch.no_grad():
            model.a.weight[0, 0] = math.inf
        by_hand(model, optimizer, None, range(4, 8))
        guard.look()
        with pytest.raises(GuardStop, match="stop was allowed by actions=.$"):
            by_hand(model, optimizer, None, range(8, 10))
    assert any("the guard's report failed" in event.message for event in pl.Run(tmp_path / "run").events())


def test_a_flush_that_fails_does_not_keep_the_training_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def broken(*_: object) -> None:
        raise OSError("no room")

    with pl.watch(model, optimizer, run=tmp_path / "run", every=2) as watch:
        guard = Guard(watch, ["stop"], dry_run=False, every=NEVER)
        by_hand(model, optimizer, None, range(4))
        with torch.no_grad():
            model.a.weight[0, 0] = math.inf
        by_hand(model, optimizer, None, range(4, 8))
        guard.look()
        monkeypatch.setattr(guard._access, "flush", broken)
        with pytest.raises(GuardStop):
            by_hand(model, optimizer, None, range(8, 10))
    assert [(act.action, act.outcome) for act in guard.acts] == [("stop", "done")]
    assert any("the guard's flush failed" in event.message for event in pl.Run(tmp_path / "run").events())


def test_a_report_may_be_a_path(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2) as watch:
        guard = Guard(watch, ["stop"], dry_run=False, every=NEVER, report=tmp_path / "report.html")
        by_hand(model, optimizer, None, range(4))
        with torch.no_grad():
            model.a.weight[0, 0] = math.inf
        by_hand(model, optimizer, None, range(4, 8))
        guard.look()
        with pytest.raises(GuardStop, match="The report is at"):
            by_hand(model, optimizer, None, range(8, 10))
    assert "nonfinite" in (tmp_path / "report.html").read_text("utf-8")


def test_master_weights_are_not_saved_in_part(tmp_path: Path) -> None:
    model = net().to(torch.bfloat16)
    masters = pl.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    with pl.watch(model, masters, run=tmp_path / "run") as watch:
        with pytest.raises(ArgumentError, match="got rollback: SGD steps tensors other than the model's parameters"):
            Guard(watch, ["rollback"])
        assert Guard(watch, ["rollback"], checkpoint={"model": model, "masters": masters}).checkpoint()


def test_complex_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = nn.Module()
    model.turn = nn.Parameter(torch.tensor([complex(1.0, math.nan)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        assert not Guard(watch, ["rollback"]).checkpoint()
