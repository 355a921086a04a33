"""Acts on scales, in trainings that need them: what was lost is there again, and the run goes on from the new scale."""

import math
from pathlib import Path

import pytest
import torch

import plimsoll as pl
from plimsoll.diagnosis import Guard, Limits
from plimsoll.errors import ArgumentError
from plimsoll.scaling import DynamicScaler, LayerScaler, SpectralScaler, StaticScaler
from tests.support.diagnosis.guarded import NEVER, acts, by_hand, finite, guard_events, looking, lost, net, scaler_at

SCALERS = [lambda: scaler_at(1.0), lambda: torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)]


@pytest.mark.parametrize("make", SCALERS, ids=["DynamicScaler", "GradScaler"])
def test_a_scale_too_low_is_raised_and_nothing_underflows_any_more(make: object, tmp_path: Path) -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make()
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale"], scaler=scaler, dry_run=False, every=NEVER)
    losses = by_hand(model, optimizer, scaler, range(30), factor=1e-6, between=looking(guard))
    watch.close()
    assert guard.closed
    (act,) = guard.acts
    assert (act.action, act.outcome, act.step, act.before) == ("raise_scale", "done", 10, 1.0)
    assert act.after == scaler.get_scale() > 2.0**20 and math.log2(act.after).is_integer()
    run = pl.Run(tmp_path / "run")
    steps, scales = run.scalars("scale")
    assert list(steps) == list(range(30))
    assert list(scales) == [1.0] * 11 + [act.after] * 19  # the step that had ended keeps the scale that it was made at
    assert lost(tmp_path / "run", "a.weight", 10) > 0.4
    assert lost(tmp_path / "run", "a.weight", 12) < 0.05
    assert not any(run.scalars("nonfinite")[1])  # and nothing overflows
    assert guard_events(tmp_path / "run") == [act.to_dict()]
    assert finite(losses)


@pytest.mark.parametrize("kind", [DynamicScaler, torch.amp.GradScaler])
def test_to_the_watch_the_step_keeps_the_scale_that_it_was_made_at(kind: type, tmp_path: Path) -> None:
    """The scaler's own update raises the scale after step 10, and the guard raises it again."""
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), kind("cpu", init_scale=1.0, growth_interval=11)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale"], scaler=scaler, dry_run=False, every=NEVER)
    by_hand(model, optimizer, scaler, range(13), factor=1e-6, between=looking(guard))
    watch.close()
    (act,) = guard.acts
    assert (act.step, act.before) == (10, 2.0)
    assert list(pl.Run(tmp_path / "run").scalars("scale")[1][9:]) == [1.0, 1.0, act.after, act.after]


def test_two_findings_about_the_scale_raise_it_once(tmp_path: Path) -> None:
    """scale-low and underflow-high are both there, of the same trouble."""
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), scaler_at(1.0)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale", "to_bf16", "stop"], scaler=scaler, dry_run=False, every=NEVER)
    by_hand(model, optimizer, scaler, range(60), factor=1e-6, between=looking(guard))
    watch.close()
    assert {"scale-low", "underflow-high"} <= {finding.rule for finding in guard.looks[0].findings}
    assert acts(guard) == [("raise_scale", "underflow-high", "done")]


def test_where_the_gradients_leave_no_room_the_next_action_follows(tmp_path: Path) -> None:
    model = net(small=2.0**-11)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), scaler_at(2.0**15)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale"], scaler=scaler, dry_run=False, every=NEVER)
    by_hand(model, optimizer, scaler, range(30), between=looking(guard))
    watch.close()
    assert any(f.rule == "underflow-high" for f in guard.findings)
    assert guard.acts == () and scaler.get_scale() == 2.0**15
    assert {"action": "none", "rule": "underflow-high"} in guard_events(tmp_path / "run")


def test_a_scale_stays_within_the_scalers_bounds(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = DynamicScaler("cpu", init_scale=1.0, growth_interval=10**6, max_scale=24.0)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale"], scaler=scaler, dry_run=False, every=NEVER, limits=Limits(steps=10))
    by_hand(model, optimizer, scaler, range(60), factor=1e-6, between=looking(guard))
    watch.close()
    assert [(act.before, act.after) for act in guard.acts] == [(1.0, 16.0)]
    assert scaler.get_scale() == 16.0


def test_a_scale_at_a_bound_that_is_no_power_of_two_is_not_moved_away_from_it(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = DynamicScaler("cpu", init_scale=24.0, growth_interval=10**6, max_scale=24.0)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["raise_scale"], scaler=scaler, dry_run=False, every=NEVER)
    by_hand(model, optimizer, scaler, range(40), factor=1e-7, between=looking(guard))
    watch.close()
    assert any(f.rule == "underflow-high" for f in guard.findings)
    assert guard.acts == () and scaler.get_scale() == 24.0


def test_a_scale_that_swings_is_lowered(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = DynamicScaler("cpu", init_scale=2.0**30, growth_interval=2, regrowth_interval=None)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=10)
    guard = Guard(watch, ["lower_scale"], scaler=scaler, dry_run=False, every=NEVER)
    by_hand(model, optimizer, scaler, range(60), between=looking(guard, 20))
    watch.close()
    act = guard.acts[0]
    assert (act.action, act.rule) == ("lower_scale", "scale-oscillation")
    assert act.after < act.before
    scales = pl.Run(tmp_path / "run").scalars("scale")[1]
    assert scales[act.step + 1] == act.after == min(scales[: act.step + 2])


def test_a_layer_whose_gradients_have_shrunk_gets_a_scale_of_its_own(tmp_path: Path) -> None:
    """The scaler goes by the largest of its last eight samples, 1,000 steps apart; the guard has it look again."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LayerScaler(model, every=1000, init_scale=2.0**14)
    watch = pl.watch(model, optimizer, run=tmp_path / "run", every=2)
    guard = Guard(watch, ["layer_scale"], scaler=scaler, dry_run=False, every=NEVER)
    by_hand(model, optimizer, scaler, range(20), between=looking(guard))
    before = dict(scaler.scales)
    assert guard.acts == ()
    model.shrink(2.0**-11)
    by_hand(model, optimizer, scaler, range(20, 60), between=looking(guard))
    watch.close()
    scaler.close()
    act = guard.acts[0]
    assert (act.action, act.rule, act.where, act.outcome) == ("layer_scale", "underflow-high", ("side.0",), "done")
    assert before["side.0"] == 1.0 and scaler.scales["side.0"] > 2.0**16
    assert all(scaler.scales[name] == before[name] for name in ("a", "b", "head"))
    assert lost(tmp_path / "run", "side.0.weight", 28) > 0.2 > lost(tmp_path / "run", "side.0.weight", 58) == 0


@pytest.mark.parametrize(
    ("action", "scaler", "why"),
    [
        ("raise_scale", None, "no scaler is given; give scaler="),
        ("lower_scale", lambda model: StaticScaler(8.0, device="cpu"), "a StaticScaler's scale is constant"),
        ("raise_scale", lambda model: SpectralScaler("cpu"), "a SpectralScaler sets its scale from the gradients"),
        (
            "raise_scale",
            lambda model: DynamicScaler("cpu", enabled=False),
            "the DynamicScaler is disabled",
        ),
        ("layer_scale", None, "no scaler is given; use plimsoll.scaling.LayerScaler"),
        ("layer_scale", lambda model: DynamicScaler("cpu"), "a DynamicScaler has one scale for all"),
    ],
)
def test_an_action_that_cannot_be_is_refused_with_its_reason(
    action: str, scaler: object, why: str, tmp_path: Path
) -> None:
    model = net()
    with pl.watch(model, run=tmp_path / "run") as watch:
        given = None if scaler is None else scaler(model)
        with pytest.raises(ArgumentError, match=f"actions that this training can have; got {action}: {why}"):
            Guard(watch, [action], scaler=given)


def test_raising_a_layer_scalers_loss_scale_is_refused(tmp_path: Path) -> None:
    model = net()
    scaler = LayerScaler(model)
    watch = pl.watch(model, run=tmp_path / "run")
    with pytest.raises(ArgumentError, match="got raise_scale: a LayerScaler's layers keep their scales"):
        Guard(watch, ["raise_scale"], scaler=scaler)
    watch.close()
    scaler.close()


@pytest.mark.parametrize("layers", [False, True])
def test_a_custom_scaler_declares_why_its_scale_is_not_set(layers: bool, tmp_path: Path) -> None:
    class Stubborn(DynamicScaler):
        scales_layers = layers
        set_scale_refusal = "this scaler keeps its scale"

    model = net()
    watch = pl.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=tmp_path / "run")
    with pytest.raises(ArgumentError, match="keeps its scale; allow layer_scale" if layers else "keeps its scale"):
        Guard(watch, ["raise_scale"], scaler=Stubborn("cpu"))
    watch.close()
