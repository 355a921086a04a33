"""`plimsoll run`: the recorded losses are those that scripts print."""

from pathlib import Path

import pytest

from plimsoll.runs import Run
from tests.cli.test_run import SCRIPTS, python, said, theirs, watched


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
