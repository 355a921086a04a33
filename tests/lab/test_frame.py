"""The frame that experiments run in: claims, folders, results, names, and what is left behind."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import plimsoll as pl
from plimsoll.errors import ArgumentError, RunError
from plimsoll_lab import (
    EXPERIMENTS,
    Bench,
    Claim,
    Experiment,
    Measured,
    Study,
    Training,
    experiment_named,
    perform,
    perform_all,
)
from plimsoll_lab.bench import Silent
from plimsoll_lab.results_folder import MARK, clear
from plimsoll_lab.running import perform as product
from tests.support.cases import each


def tiny(bench: Bench) -> Measured:
    """A training of ten steps, whose claim is of its random numbers."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bench.progress.begin("tiny", 10)
    with pl.watch(model, optimizer, run=bench.runs / "tiny", every=5):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            bench.progress.advance()
    run = pl.Run(bench.runs / "tiny")
    loss = float(run.scalars("loss")[1][-1])
    training = Training(
        name="tiny", title="a <tiny> one", run=Path(run.path), numbers={"loss": loss, "none": math.nan},
        outcome="done", good=True, series=(1.0, loss), findings=tuple(pl.diagnose(run)),
    )  # fmt: skip
    claim = Claim(id="low", says="the loss is low", measured=loss, at_most=100.0, unit="of loss")
    return Measured(trainings=(training,), claims=(claim,), said=("It is.",))


TINY = Experiment(name="tiny", claim="A loss is low.", source="T1", settings=lambda b: {"seed": b.seed}, measure=tiny)


@each(
    ("measured", "low", "high", "holds"),
    [(1.0, 1.0, None, True), (0.9, 1.0, None, False), (1.0, None, 1.0, True), (1.1, 0.0, 1.0, False),
     (math.nan, None, 1.0, False), (math.inf, 1.0, None, True), (math.inf, None, 1e9, False)],
)  # fmt: skip
def test_a_claim_holds_within_its_bounds(measured: float, low: float | None, high: float | None, holds: bool) -> None:
    claim = Claim(id="x", says="x", measured=measured, at_least=low, at_most=high)
    assert claim.holds is holds and claim.to_dict()["holds"] is holds
    json.dumps(claim.to_dict(), allow_nan=False)


def test_a_claim_takes_numbers_of_numpy() -> None:
    claim = Claim(id="x", says="x", measured=np.float32(0.5), at_most=1.0)
    assert json.loads(json.dumps(claim.to_dict()))["holds"] is True
    assert Claim(id="x", says="x", measured=np.float64("nan"), at_most=1.0).to_dict()["measured"] == "nan"


def test_a_claim_is_told_whatever_kind_of_number_it_has() -> None:
    claim = Claim(id="x", says="it falls", measured=np.float32(0.5), at_least=1, at_most=2_000_000, unit="binades")
    assert str(claim) == "it falls: 0.5 binades, expected at least 1 and at most 2e+06"


def test_a_claim_without_a_bound_is_refused() -> None:
    with pytest.raises(ArgumentError, match="Claim: expected a bound that can fail; got none for 'x'"):
        Claim(id="x", says="x", measured=1.0)


def test_names_are_found_and_others_refused_with_the_nearest() -> None:
    assert experiment_named("clip") is EXPERIMENTS["clip"]
    assert all(name == each.name and each.claim.endswith(".") for name, each in EXPERIMENTS.items())
    with pytest.raises(ArgumentError, match=r"lab: expected the name of an experiment .*got 'clap'. Nearest: clip."):
        experiment_named("clap")


def test_a_study_that_trains_nothing_cannot_be_made() -> None:
    class Half(Study):
        def measure_with(self, bench, setup, workers=None) -> Measured:
            return tiny(bench)

    with pytest.raises(TypeError, match=r"abstract.*\btrain\b"):
        Half()


def test_a_result_lies_in_its_folder_whole(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    result = perform(TINY, tmp_path / "out", seed=3)
    assert torch.get_rng_state().equal(state)
    assert result.holds and result.settings == {"seed": 3}
    saved = json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert saved == json.loads(json.dumps(result.to_dict()))
    assert saved["holds"] is True and saved["claims"][0]["measured"] == result.measured.claims[0].measured
    assert saved["trainings"][0]["numbers"]["none"] == "nan" and saved["seconds"] > 0
    assert saved["versions"]["torch"] == torch.__version__
    assert "a &lt;tiny&gt; one" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_result_without_claims_does_not_hold(tmp_path: Path) -> None:
    result = perform(TINY, tmp_path / "out")
    nothing = dataclasses.replace(result, measured=dataclasses.replace(result.measured, claims=()))
    assert result.holds and not nothing.holds


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    numbers = [perform(TINY, tmp_path / "out", seed=seed).measured.trainings[0].numbers["loss"] for seed in (1, 1, 2)]
    assert numbers[0] == numbers[1] != numbers[2]


def test_a_second_time_replaces_its_own_results_only(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    perform(TINY, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "report-old.html").write_text("an older report")
    (folder / "runs" / "older").mkdir()
    perform(TINY, folder)
    assert (folder / "notes.txt").read_text("utf-8") == "mine"
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", MARK, "report.html", "result.json", "runs"]
    assert [p.name for p in (folder / "runs").iterdir()] == ["tiny"]


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "precious").write_text("years of work")
    with pytest.raises(ArgumentError, match="lab: expected a new or empty folder, .* one with other things in it"):
        perform(TINY, tmp_path)
    assert (tmp_path / "runs" / "precious").read_text("utf-8") == "years of work"


def test_the_folder_of_another_experiment_is_refused(tmp_path: Path) -> None:
    clear(tmp_path / "out", "other")
    with pytest.raises(ArgumentError, match="Nothing was changed"):
        perform(TINY, tmp_path / "out")


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "work").write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(ArgumentError, match="something that is no folder"):
        perform(TINY, tmp_path / "link")
    clear(tmp_path / "out", "tiny")
    (tmp_path / "out" / "runs").rmdir()
    (tmp_path / "out" / "runs").symlink_to(precious)
    clear(tmp_path / "out", "tiny")
    assert (precious / "work").read_text("utf-8") == "mine" and not (tmp_path / "out" / "runs").is_symlink()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ArgumentError, match="something that is no folder"):
        clear(tmp_path / "out", "tiny")
    with pytest.raises(RunError, match="lab: expected a folder that can be written"):
        clear(tmp_path / "out" / "below", "tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"seed": -1}, "expected a seed of 0"), ({"device": "tpu"}, "expected device to be cpu or cuda"),
     ({"steps": 0}, "expected 1 step or more")],
)  # fmt: skip
def test_arguments_are_checked_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        perform(TINY, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_what_no_experiment_can_have_is_refused_before_the_first(tmp_path: Path) -> None:
    for arguments, message in (({"seed": -1}, "expected a seed of 0"), ({"device": "tpu"}, "to be cpu or cuda")):
        with pytest.raises(ArgumentError, match=message):
            perform_all(tmp_path / "out", [TINY], **arguments)
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("a file")
    with pytest.raises(RunError, match=r"lab: expected a folder that can be written; got .*file/below"):
        perform_all(tmp_path / "file" / "below", [TINY])
    with pytest.raises(RunError, match=r"lab: expected a folder that can be written; got .*file "):
        perform_all(tmp_path / "file", [TINY])


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, AssertionError])
def test_an_experiment_that_fails_in_whatever_way_keeps_none_from_being_done(
    error: type[Exception], tmp_path: Path
) -> None:
    def fails(bench: Bench) -> Measured:
        raise error("so")

    broken = dataclasses.replace(TINY, name="broken", measure=fails)
    first, second = perform_all(tmp_path, [broken, TINY])
    assert first.error.startswith(f"{error.__name__}: ") and not first.holds and second.holds
    assert [each["experiment"] for each in json.loads((tmp_path / "outcomes.json").read_text("utf-8"))] == [
        "broken",
        "tiny",
    ]


def test_ctrl_c_ends_all_and_what_is_done_is_there(tmp_path: Path) -> None:
    def interrupted(bench: Bench) -> Measured:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform_all(tmp_path, [TINY, dataclasses.replace(TINY, name="long", measure=interrupted), TINY])
    assert [each["experiment"] for each in json.loads((tmp_path / "outcomes.json").read_text("utf-8"))] == ["tiny"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected a GPU for device=cuda; got none"):
        perform(TINY, tmp_path / "out", device="cuda")


def test_too_few_steps_are_refused_before_the_folder_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="lab clip: expected 100 steps or more"):
        perform("clip", tmp_path / "out", steps=99)
    assert not (tmp_path / "out").exists()


def test_a_result_names_the_device_that_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "check", lambda *_: None)  # as on a machine with a GPU
    on_cpu = dataclasses.replace(TINY, settings=lambda _: {"device": "cpu"})
    result = perform(on_cpu, tmp_path / "lab", device="cuda")
    assert result.device == "cpu" and "gpu" not in result.versions
    bench = Bench(runs=tmp_path, seed=0, device="cuda", steps=None, full=False, progress=Silent())
    assert EXPERIMENTS["errors"].settings(bench)["device"] == "cpu"
