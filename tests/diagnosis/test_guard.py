"""The guard itself: what it sees is what is found later, dry it changes no bit, and nothing of it stays or breaks."""

import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.diagnosis import Guard, Limits
from plimsoll.diagnosis.guard import decisions
from plimsoll.diagnosis.guard.decisions import BackgroundChecker
from plimsoll.diagnosis.guard.records import Look
from plimsoll.errors import ArgumentError, GuardStop, PlimsollError
from plimsoll.watch.hooks import torch_hooks
from tests.support.diagnosis.guarded import (
    NEVER,
    acts,
    by_hand,
    by_loop,
    guard_events,
    looking,
    net,
    scaler_at,
    wait_for_look,
)
from tests.support.patience import HANG_SECONDS, wait_until

ALL = ("lower_scale", "raise_scale", "to_bf16", "clamp", "skip", "rollback", "stop")


def low(tmp_path: Path, **options: Any) -> tuple[nn.Module, Any, Any, Any, Guard]:
    """A training whose scale is far too low, watched and guarded."""
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler_at(1.0)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    given = {"every": NEVER, "actions": ["raise_scale"], **options}
    return model, optimizer, scaler, watch, Guard(watch, scaler=scaler, **given)


def train(model: Any, optimizer: Any, scaler: Any, steps: range, **more: Any) -> list[float]:
    return by_hand(model, optimizer, scaler, steps, factor=1e-6, **more)


def test_what_it_saw_is_what_diagnose_finds_later(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(tmp_path, dry_run=False)
    train(model, optimizer, scaler, range(40), between=looking(guard))
    by_hand(model, optimizer, scaler, range(40, 60), factor=1e8)  # loss and gradients jump, the scale falls
    watch.close()
    assert [look.step for look in guard.looks] == [9, 19, 29, 39]
    for look in guard.looks:
        assert list(look.findings) == pl.diagnose(tmp_path / "run", until=look.step)
        assert look.findings
    assert list(guard.findings) != pl.diagnose(tmp_path / "run")  # or the comparison would say nothing


def test_a_look_comes_back_with_what_it_found(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(tmp_path)
    train(model, optimizer, scaler, range(10))
    found = guard.look()
    watch.close()
    assert list(found) == pl.diagnose(tmp_path / "run", until=9) and found


def test_rules_and_thresholds_are_those_of_diagnose(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(
        tmp_path, rules=["scale-*"], thresholds={"scale-low.binades": 3.0}, actions=[]
    )
    train(model, optimizer, scaler, range(10))
    found = guard.look()
    watch.close()
    assert {finding.rule for finding in found} == {"scale-low"}
    with pytest.raises(ArgumentError, match="expected rules by their ids; got 'scale-hgih'"):
        Guard(pl.watch(model, run=tmp_path / "other"), rules=["scale-hgih"])


def test_looks_happen_in_the_background_and_acts_on_the_training_thread(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(tmp_path, dry_run=False, every=5, cpu_share=1.0)
    looked, acted = [], []
    look, carry_out = guard._checker._look, guard._remedies["raise_scale"].carry_out
    guard._checker._look = lambda step: (looked.append((threading.current_thread().name, step)), look(step))[1]
    guard._remedies["raise_scale"].carry_out = lambda o: (acted.append(threading.current_thread().name), carry_out(o))

    train(model, optimizer, scaler, range(12), between=lambda step: wait_for_look(guard))
    watch.close()
    assert looked == [("plimsoll-guard", 5), ("plimsoll-guard", 10)]
    assert acted == ["MainThread"]
    assert [act.step for act in guard.acts] == [7]  # the look up to step 5 began after step 6
    assert guard.looks[0].findings == tuple(pl.diagnose(tmp_path / "run", until=5))


def test_a_look_is_left_out_while_one_is_under_way_or_would_cost_too_much(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(tmp_path, every=1, cpu_share=1e-6)
    going_on = threading.Event()
    gathered: list[int] = []
    guard._checker._gather = lambda step: (gathered.append(step), going_on.wait(HANG_SECONDS), True)[2]
    train(model, optimizer, scaler, range(5))
    wait_until(lambda: gathered)  # the thread may begin after the training
    assert gathered == [1]
    going_on.set()
    guard._checker._thread.join()
    train(model, optimizer, scaler, range(5, 10))
    assert gathered == [1]  # the next is due a million times as long after the first as that has taken
    assert len(guard.looks) == 1
    watch.close()


def test_a_look_that_ends_while_it_is_asked_for_is_taken_the_next_time(tmp_path: Path) -> None:
    ended = Look(step=5, findings=(), newest={"": 5}, room=None)

    class Ending(BackgroundChecker):
        """Its look ends right after it was found not to have ended."""

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "_done" and found is None and waiting:
                self._done = waiting.pop()
            return found

    waiting: list[Look] = []
    checker = Ending(tmp_path, (), share=1.0, gather=lambda _: True, failed=lambda _: None)
    waiting.append(ended)
    assert [checker.take(), checker.take(), checker.take()] == [None, ended, None]


def test_the_end_of_the_process_waits_for_a_look_that_a_close_did_not_wait_for(tmp_path: Path) -> None:
    checker = BackgroundChecker(tmp_path, (), share=1.0, gather=lambda _: True, failed=lambda _: None)
    waits: list[float] = []
    checker._thread = SimpleNamespace(join=waits.append)  # type: ignore[assignment]
    checker.close()
    decisions._end_all()
    assert waits == [decisions._CLOSE_SECONDS, decisions._EXIT_SECONDS]


@pytest.mark.parametrize("kind", ["plain", "scaled", "loop"])
def test_a_dry_guard_changes_no_bit(kind: str, tmp_path: Path) -> None:
    def weights(guarded: bool) -> list[torch.Tensor]:
        model = net(small=2.0**-11)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = None if kind == "plain" else scaler_at(1.0)
        loop = pl.prepare(model, optimizer, "amp-fp16", scaler=scaler) if kind == "loop" else None
        watch = pl.watch(model, optimizer, run=tmp_path / f"{guarded}", every=2)
        names = ALL if kind != "plain" else ALL[2:]
        guard = Guard(watch, names, loop=loop, scaler=None if loop else scaler, limits=Limits(steps=5), every=NEVER)

        def between(step: int) -> None:
            torch.rand(1)
            if guarded and step % 8 == 7:
                guard.checkpoint()
                guard.look()

        if not guarded:
            guard.close()
        if loop is not None:
            by_loop(loop, range(26), factor=1e-6, between=between)
            loop.close()
        else:
            by_hand(model, optimizer, scaler, range(26), factor=1e-6, between=between)
        watch.close()
        if guarded:
            assert guard.acts and all(act.dry_run for act in guard.acts)
            assert [e["dry_run"] for e in guard_events(tmp_path / "True") if "dry_run" in e] == [True] * len(guard.acts)
        return [*(p.detach() for p in model.parameters()), torch.rand(1)]

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))


def test_each_finding_is_told_once_and_again_when_it_is_graver(tmp_path: Path) -> None:
    reported: list[pl.Finding] = []
    model, optimizer, scaler, watch, guard = low(tmp_path, on_finding=reported.append, actions=[])
    train(model, optimizer, scaler, range(40), between=looking(guard))
    watch.close()
    keys = [(f.rule, f.collection, f.severity) for f in reported]
    assert len(set(keys)) == len(keys) and ("scale-low", "gradients", "alarm") in keys


def test_a_function_that_fails_is_told_of_and_training_goes_on(tmp_path: Path) -> None:
    def broken(finding: pl.Finding) -> None:
        raise RuntimeError("no mail today")

    model, optimizer, scaler, watch, guard = low(tmp_path, on_finding=broken, dry_run=False)
    train(model, optimizer, scaler, range(20), between=looking(guard))
    watch.close()
    assert acts(guard) == [("raise_scale", "underflow-high", "done")]
    failures = [e.message for e in pl.Run(tmp_path / "run").events() if e.kind == "failure"]
    assert failures == ["on_finding failed and was left out (RuntimeError: no mail today)"]


def test_an_act_that_fails_is_recorded_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(tmp_path, dry_run=False)

    def broken(order: object) -> None:
        raise RuntimeError("the scaler is gone")

    guard._remedies["raise_scale"].carry_out = broken
    train(model, optimizer, scaler, range(20), between=looking(guard))
    watch.close()
    (act,) = guard.acts
    assert (act.outcome, act.problem) == ("failed", "RuntimeError: the scaler is gone")
    assert scaler.get_scale() == 1.0
    assert guard_events(tmp_path / "run") == [act.to_dict()]


def test_a_look_that_fails_is_recorded_and_training_goes_on(tmp_path: Path) -> None:
    model, optimizer, scaler, watch, guard = low(tmp_path, every=2)

    def broken(step: int) -> None:
        raise OSError("the folder is gone")

    guard._checker._look = broken
    train(model, optimizer, scaler, range(4))
    guard._checker._thread.join()
    train(model, optimizer, scaler, range(4, 6))
    watch.close()
    failures = [e.message for e in pl.Run(tmp_path / "run").events() if e.kind == "failure"]
    assert failures == ["the guard's look failed and was left out (OSError: the folder is gone)"]


@pytest.mark.parametrize("end", ["guard", "watch", "context", "loop"])
def test_it_ends_with_its_watch_and_leaves_nothing(end: str, tmp_path: Path) -> None:
    before = list(torch_hooks._listeners)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = pl.prepare(model, optimizer, "fp32") if end == "loop" else None
    watch = pl.watch(model, optimizer, run=tmp_path / "run")
    of_the_watch = list(watch._session.at_close)
    guard = Guard(watch, loop=loop)
    if end == "context":
        with guard:
            pass
    else:
        (watch if end == "watch" else guard).close()
    assert guard.closed and repr(guard) == "<Guard: no actions, closed, 0 acts>"
    guard.close()
    assert loop is None or loop._after_steps == ()
    assert watch._session.at_close == ([] if end == "watch" else of_the_watch)
    for call in (guard.look, guard.checkpoint):
        with pytest.raises(ArgumentError, match="expected an open guard; got one that is closed"):
            call()
    watch.close()
    assert torch_hooks._listeners == before
    if loop is not None:
        loop.close()


def test_it_keeps_no_model_alive(tmp_path: Path) -> None:
    """Unassigned, it lives as long as its watch, and that as long as the model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = pl.prepare(model, optimizer, "amp-fp16", scaler=scaler_at(8.0))
    guard = weakref.ref(Guard(pl.watch(model, optimizer, run=tmp_path / "run"), ["raise_scale"], loop=loop))
    by_loop(loop, range(3))
    gc.collect()
    assert guard() is not None
    gone = weakref.ref(model)
    del model, optimizer, loop
    gc.collect()
    assert gone() is None
    assert pl.Run(tmp_path / "run").closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actions": ["raise_scales"]}, "got 'raise_scales'. Did you mean raise_scale?"),
        ({"actions": ["x"]}, "expected actions by their names; got 'x'. There are lower_scale, raise_scale"),
        ({"on_finding": 3}, "expected on_finding as a function; got 3"),
        ({"every": 0}, "expected every as a whole number of 1 or more; got 0"),
        ({"kept": 1.5}, "expected kept as a whole number of 1 or more; got 1.5"),
        ({"cpu_share": 0}, "expected cpu_share above 0 and up to 1; got 0"),
        ({"severity": "grave"}, "expected severity to be info, warning or alarm; got 'grave'"),
        ({"report": "report.html"}, "expected report= together with the action stop"),
        ({"scaler": object()}, "expected scaler as a torch.amp.GradScaler or one of plimsoll.scaling; got object"),
        ({"loop": object()}, "expected loop to be an open loop of pl.prepare"),
        ({"checkpoint": {"model": 3}}, "expected checkpoint to map names to objects with state_dict"),
        ({"checkpoint": 3}, "expected checkpoint to map names"),
        ({"actions": 3}, "expected actions by their names; got 3"),
        ({"limits": 3}, "expected limits as Limits"),
        ({"actions": ["stop"], "report": 3}, "expected report as a path or a function; got 3"),
        ({"actions": ["stop"], "report": ""}, "expected report as a path or a function; got ''"),
        ({"thresholds": {"scale-low.cats": 1.0}}, "expected a threshold of scale-low; got 'scale-low.cats'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = net()
    with pl.watch(model, run=tmp_path / "run") as watch, pytest.raises(ArgumentError, match=message):
        Guard(watch, **options)


def test_it_wants_an_open_watch_and_a_loop_of_the_same_model(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Guard: expected a watch; got Linear"):
        Guard(nn.Linear(1, 1))  # type: ignore[arg-type]
    model, other = net(), net()
    watch = pl.watch(model, run=tmp_path / "run")
    loop = pl.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), "fp32")
    with pytest.raises(ArgumentError, match="expected a loop and a watch of one model; got two models"):
        Guard(watch, loop=loop)
    with pytest.raises(ArgumentError, match="expected loop= or scaler=; got both"):
        Guard(watch, loop=loop, scaler=scaler_at(1.0))
    loop.close()
    watch.close()
    with pytest.raises(ArgumentError, match="expected an open watch; got one that is closed"):
        Guard(watch)


def test_several_optimizers_end_a_step_together(tmp_path: Path) -> None:
    model = net()
    first = torch.optim.SGD(model.a.parameters(), lr=0.1)
    second = torch.optim.SGD([*model.b.parameters(), *model.head.parameters()], lr=0.1)
    ends: list[int] = []
    with pl.watch(model, [first, second], run=tmp_path / "run") as watch, Guard(watch) as guard:
        guard._go_on = lambda: ends.append(watch.step_index)
        for step in range(3):
            pl_loss = model(torch.randn(4, 8)).square().mean()
            pl_loss.backward()
            first.step()
            assert len(ends) == step
            second.step()
            assert len(ends) == step + 1
    assert ends == [0, 1, 2]


def test_another_trainings_scaler_ends_no_step_and_hides_none(tmp_path: Path) -> None:
    model, other = net(), nn.Linear(2, 1)
    optimizer, others = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    scaler = scaler_at(1.0)
    ends: list[int] = []
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch, Guard(watch) as guard:
        guard._go_on = lambda: ends.append(watch.step_index)
        for step in range(3):
            by_hand_once(other, others, scaler)
            assert len(ends) == step
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            assert len(ends) == step + 1


def by_hand_once(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_the_stop_is_a_plimsoll_error_and_no_argument_error() -> None:
    assert issubclass(GuardStop, PlimsollError) and issubclass(GuardStop, RuntimeError)
    assert not issubclass(GuardStop, ArgumentError)
