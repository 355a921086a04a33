"""`plimsoll run`: the recorded losses are those that scripts print."""

import re
from pathlib import Path

import pytest

from plimsoll.runs import Run
from tests.cli.test_run import SCRIPTS, python, said, theirs, watched
from tests.support.precision.training import HERE


def columns(printed: str) -> list[list[float]]:
    return [list(column) for column in zip(*(map(float, line.split()) for line in printed.splitlines()), strict=True)]


def test_a_script_without_an_optimizer_is_found_by_its_backwards(tmp_path: Path) -> None:
    alone = python(SCRIPTS / "by_hand.py", cwd=tmp_path)
    result = watched("--output", "run", "--every", "2", SCRIPTS / "by_hand.py", cwd=tmp_path)
    assert (result.returncode, result.stdout, theirs(result)) == (0, alone.stdout, theirs(alone))
    (line,) = said(result)
    assert line.startswith("plimsoll: watching RNNModel (677 parameters, no optimizer), every 2 steps, into run; ")
    assert line.endswith("its first step passed before it was found")
    run, (printed,) = Run(tmp_path / "run"), columns(alone.stdout)
    assert run.scalars("loss")[1].tolist() == printed[1:] and run.steps == [0, 2, 4, 6, 8, 10]
    assert set(run.tensors) == {"weights", "gradients", "activations", "activation_gradients", "updates"}


@pytest.mark.parametrize("precision", [None, "amp-fp16"])
def test_a_gan_has_the_losses_that_it_prints(precision: str | None, tmp_path: Path) -> None:
    level = [] if precision is None else ["--precision", precision]
    result = watched(*level, "--output", "run", "--every", "4", SCRIPTS / "gan.py", cwd=tmp_path)
    assert result.returncode == 0 and len(said(result)) == 2, result.stderr
    for name, printed in zip(("Discriminator", "Generator"), columns(result.stdout), strict=True):
        run = Run(tmp_path / "run" / name)
        steps, losses = run.scalars("loss")
        assert steps.tolist() == list(range(12)) and run.steps == [0, 4, 8]
        assert losses.tolist() == pytest.approx(printed, rel=1e-6)
        assert not [event for event in run.events() if event.kind in {"skip", "trigger"}]
        if precision is not None:
            assert set(run.scalars("scale")[1].tolist()) == {2.0**16}
            assert run.series("activation_gradients", "2:output", "absmax")[1].max() < 1


def test_a_lightning_module_with_two_optimizers(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = watched("--output", "run", "--every", "10", SCRIPTS / "lightning_gan.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for part, printed in zip(("generator", "discriminator"), columns(result.stdout), strict=True):
        run = Run(tmp_path / "run" / part)
        assert run.scalars("loss")[1].tolist() == pytest.approx(printed, rel=1e-6)
        assert run.steps == [0, 10, 20]
        assert {"gradients", "updates", "optimizer"} <= set(run.tensors)


RECORDED = {"weights", "gradients", "activations", "activation_gradients", "optimizer", "updates"}


@pytest.mark.parametrize("level", HERE)
def test_a_prepared_training_is_watched_at_each_level(level: str, tmp_path: Path) -> None:
    alone = python(SCRIPTS / "prepared.py", level, cwd=tmp_path)
    result = watched("--output", "run", "--every", "5", SCRIPTS / "prepared.py", level, cwd=tmp_path)
    assert (result.returncode, result.stdout, theirs(result)) == (0, alone.stdout, theirs(alone))
    (line,) = said(result)
    assert line == "plimsoll: watching Sequential (1,348 parameters, AdamW), every 5 steps, into run"
    assert "plimsoll: Healthy through step 29" in result.stderr or level == "fp16-pure", (
        result.stderr
    )  # whose state is FP16
    run, (printed,) = Run(tmp_path / "run"), columns(alone.stdout)
    assert run.scalars("loss")[1].tolist() == pytest.approx(printed, rel=1e-6)
    assert run.steps == [0, 5, 10, 15, 20, 25] and set(run.tensors) == RECORDED
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert all(sorted(run.tensors[collection]) == names for collection in ("weights", "gradients", "updates"))
    assert run.settings["optimizer"]["name"] == "AdamW" and "optimizer1" not in run.settings


def test_the_repaired_script_of_the_tutorial_is_watched(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorial" / "five-minutes.md").read_text("utf-8")
    (script,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pl.prepare" in code)
    (tmp_path / "train.py").write_text(f"{script}print(loss.item())\n", "utf-8")
    alone = python("train.py", cwd=tmp_path)
    result = watched("-o", "run", "train.py", cwd=tmp_path)
    assert (result.returncode, result.stdout, theirs(result)) == (0, alone.stdout, theirs(alone))
    assert said(result) == ["plimsoll: watching Sequential (85,002 parameters, AdamW), every 10 steps, into run"]
    assert "plimsoll: Healthy through step 399" in result.stderr
    run = Run(tmp_path / "run")
    assert len(run.scalars("loss")[0]) == 400 and set(run.tensors) == RECORDED
    assert run.scalars("loss")[1][-1] == pytest.approx(float(alone.stdout), rel=1e-6)
