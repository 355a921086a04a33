"""A watched loop: every step once, true losses and scales, norms, skips and repetitions; nothing left at the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.precision import prepare
from plimsoll.scaling.dynamic import DynamicScaler
from tests.support.cases import each
from tests.support.precision.training import HERE, adamw, batches, contents, loss_of, net, overflowing, run


@pytest.mark.parametrize("name", HERE)
def test_a_loop_watches_into_a_folder(name: str, tmp_path: Path) -> None:
    model, twin, data = net(), net(), batches(5)
    loss_of(twin, data[0]).backward()
    weight = twin.embed.weight.detach().norm().item()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    norm = twin.embed.weight.grad.norm().item()
    scaler = DynamicScaler("cpu", init_scale=256.0) if "fp16" in name else None
    loop = prepare(model, adamw(model, name), name, clip_norm=1.0, scaler=scaler, watch=tmp_path / "run")
    losses, norms = [], []
    for batch in data:
        with loop.forward():
            loss = loss_of(model, batch)
        outcome = loop.step(loss)
        losses.append(loss.item())
        norms.append(outcome.grad_norm)
    loop.close()
    assert loop.watch is not None and loop.watch.closed
    recorded = pl.Run(tmp_path / "run")
    steps, found = recorded.scalars("loss")
    assert list(steps) == [0, 1, 2, 3, 4] and list(found) == pytest.approx(losses)
    steps, found = recorded.scalars("grad_norm")
    assert list(steps) == [0, 1, 2, 3, 4] and list(found) == pytest.approx(norms)
    if scaler is not None:
        assert list(recorded.scalars("scale")[1]) == [256.0] * 5
    assert recorded.spectrum("gradients", "embed.weight", 0).norm == pytest.approx(norm, rel=6e-2)
    assert recorded.spectrum("weights", "embed.weight", 0).norm == pytest.approx(weight, rel=1e-3)
    assert recorded.spectrum("optimizer", "embed.weight:exp_avg", 0).norm == pytest.approx(0.1 * norm, rel=6e-2)
    assert recorded.spectrum("updates", "embed.weight", 0).count == 128


def test_skips_and_repetitions_are_told(tmp_path: Path) -> None:
    model = net()
    loop = prepare(model, adamw(model), "amp-fp16", max_retries=12, watch=tmp_path / "run")
    outcome = loop.step(lambda: overflowing(model, batches(1)[0]))
    loop.step(lambda: loss_of(model, batches(1)[0]))
    loop.close()
    recorded = pl.Run(tmp_path / "run")
    assert outcome.retries > 0
    assert [event.kind for event in recorded.events()].count("skip") == outcome.retries
    assert list(recorded.scalars("retries")[1]) == [outcome.retries, 0]


# No norm among these layers, whose weights stay FP32 and would have a gradient of their own.
@each("clip_norm", [None, 1.0])
@each("name", HERE)
def test_the_gradients_of_a_sound_training_are_found(name: str, clip_norm: float | None, tmp_path: Path) -> None:
    model, folder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)), tmp_path / f"{name}-{clip_norm}"
    loop = prepare(model, adamw(model, name), name, clip_norm=clip_norm, watch=folder)
    for x in torch.randn(12, 16, 8):
        with loop.forward():
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
        loop.step(loss)
    loop.close()
    facts = [str(event.details.get("fact")) for event in pl.Run(folder).events() if event.kind == "wiring"]
    assert "no gradients" not in facts and "clipped nothing" not in facts
    assert [str(f) for f in pl.diagnose(folder) if f.rule in ("optimizer-idle", "gradients-mishandled")] == []


def overflowing_at(folder: Path, max_retries: int, at: int = 12, steps: int = 24) -> list[Any]:
    """Train at level fp16-master, whose scale one batch overflows; return the outcomes."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    outcomes = []
    with pl.watch(model, optimizer, run=folder, every=1, quiet=True) as watch:
        loop = prepare(model, optimizer, "fp16-master", max_retries=max_retries, watch=watch)
        for step, x in enumerate(torch.randn(steps, 16, 8)):
            times = 1000 if step >= at and (step == at or not max_retries) else 1
            y = x[:, :4].argmax(dim=1)
            outcomes.append(loop.step(lambda x=x, y=y, t=times: t * nn.functional.cross_entropy(model(x).float(), y)))
    return outcomes


def test_each_try_of_a_batch_is_a_step_and_the_scalar_finds_the_loops_steps(tmp_path: Path) -> None:
    outcomes = overflowing_at(tmp_path / "run", 20)
    many, recorded = outcomes[12].retries, pl.Run(tmp_path / "run")
    assert many > 1 and [o.retries for o in outcomes] == [0] * 12 + [many] + [0] * 11
    steps, retries = recorded.scalars("retries")
    assert retries.tolist() == [o.retries for o in outcomes]
    assert steps.tolist() == [*range(12), *range(12 + many, 24 + many)]  # of each step its last try
    assert list(recorded.steps) == list(range(24 + many))  # nothing of a try is lost
    scales = recorded.scalars("scale")[1]
    assert scales[12 : 13 + many].tolist() == [2.0 ** (16 - n) for n in range(many + 1)]
    broken = [recorded.spectrum("gradients", "2.weight", step) for step in range(12, 12 + many)]
    assert all(spectrum.nans + spectrum.pos_infs + spectrum.neg_infs > 0 for spectrum in broken)
    assert [event.step for event in recorded.events() if event.kind == "skip"] == list(range(12, 12 + many))


def test_who_repeats_batches_already_is_not_advised_to(tmp_path: Path) -> None:
    for name, retries in (("repeated", 20), ("lost", 0)):
        overflowing_at(tmp_path / name, retries)
        (advice,) = (f.advice for f in pl.diagnose(tmp_path / name) if f.rule == "nonfinite")
        assert ("A closure passed to step() retries such batches." in advice) == (name == "lost")
        assert ("The loop repeats such batches already, and each try is a step" in advice) == (name == "repeated")


def test_the_remedy_of_a_collapse_names_no_closure_to_who_passes_one(tmp_path: Path) -> None:
    for name, retries in (("repeated", 20), ("lost", 0)):
        overflowing_at(tmp_path / name, retries, at=26, steps=36)
        (found,) = (f for f in pl.diagnose(tmp_path / name) if f.rule == "scale-collapse")
        assert found.severity == "alarm" and "it raises the scale again within few steps" in found.advice
        assert ("a closure passed to step() retries the skipped batches" in found.advice) == (name == "lost")


@pytest.mark.parametrize("name", ["fp32", "amp-fp16", "bf16-master"])
def test_watching_changes_nothing(name: str, tmp_path: Path) -> None:
    found: list[Any] = []
    for folder in (None, tmp_path / "run"):
        model = net(0.2)
        loop = prepare(model, adamw(model), name, watch=folder)
        torch.manual_seed(4)
        found.append((run(loop, batches(6)), contents(model.state_dict())))
        loop.close()
    assert found[0] == found[1]


def test_a_watch_of_the_users_own_is_told_and_stays_open(tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1) as watch:
        loop = prepare(model, optimizer, "bf16-master", clip_norm=1.0, watch=watch)
        run(loop, batches(3))
        loop.close()
        assert not watch.closed
    assert list(pl.Run(tmp_path / "run").scalars("grad_norm")[0]) == [0, 1, 2]


def test_what_is_raised_in_the_context_is_recorded(tmp_path: Path) -> None:
    model = net()
    loop = prepare(model, adamw(model), "fp32", watch=tmp_path / "run")
    run(loop, batches(1))
    with pytest.raises(ZeroDivisionError), loop:
        _ = 1 / 0
    assert [event.kind for event in pl.Run(tmp_path / "run").events()] == ["trigger"]
    assert loop.closed


def test_a_watched_schedule_goes_on_through_its_changes(tmp_path: Path) -> None:
    model = net()
    loop = prepare(
        model, adamw(model), [(0, "bf16-master"), (2, "amp-fp16"), (4, "fp16-master")], watch=tmp_path / "run"
    )
    losses = run(loop, batches(6))
    loop.close()
    assert list(pl.Run(tmp_path / "run").scalars("loss")[1]) == pytest.approx(losses)


def test_a_folder_that_cannot_be_watched_into_leaves_the_model_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = net()
    with pytest.raises(pl.RunError):
        prepare(model, adamw(model), "bf16-master", watch=tmp_path / "file")
    assert isinstance(model.head, nn.Linear) and model.head.weight.dtype == torch.float32
    prepare(model, adamw(model), "bf16-master").close()


def test_a_watch_that_would_record_nothing_of_the_model_is_refused(tmp_path: Path) -> None:
    model = net()
    other = net()
    watch = pl.watch(other, run=tmp_path / "other")
    with pytest.raises(pl.errors.ArgumentError, match="a watch of the model or a part of it; got one of another Net"):
        prepare(model, adamw(model), "fp32", watch=watch)
    watch.close()
    with pytest.raises(pl.errors.ArgumentError, match="prepare: expected an open watch; got one that is closed"):
        prepare(model, adamw(model), "fp32", watch=watch)
    with (
        pl.watch(model.hidden, run=tmp_path / "part") as watch,
        prepare(model, adamw(model), "fp32", watch=watch) as loop,
    ):
        run(loop, batches(1))
