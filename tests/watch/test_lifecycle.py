"""A folder that holds a run already: continued by the same training, refused to another, kept aside in a notebook."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.errors import ArgumentError
from tests.support import processes
from tests.support.watch.recording import batches, mlp, train


def trained(path: Path, steps: int = 5, *, momentum: float = 0.0, **options: object) -> dict[str, object]:
    """Trains a new model with Adam (or SGD) into the folder; returns a checkpoint of its end."""
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if momentum:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    with pl.watch(model, optimizer, run=path, every=1, **options):
        train(model, optimizer, batches(steps, 4, 8))
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def restored(checkpoint: dict[str, object]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # which shares its tensors
    return model, optimizer


def test_a_second_training_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    message = (
        r"watch: expected a folder without a run, .*; got run=.*run, which holds a run of 5 steps, while this "
        r"optimizer has not stepped yet\. Give this training a folder of its own, or continue that run with resume=True"
    )
    with pytest.raises(ArgumentError, match=message) as refused:
        trained(tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert pl.Run(tmp_path / "run").steps == [0, 1, 2, 3, 4]
    trained(tmp_path / "run-2")
    assert pl.Run(tmp_path / "run-2").steps == [0, 1, 2, 3, 4]
    trained(tmp_path / "run", resume=True)
    assert pl.Run(tmp_path / "run").steps == list(range(10))
    trained(tmp_path / "run", start_step=0)
    assert pl.Run(tmp_path / "run").steps == [0, 1, 2, 3, 4]


def test_a_script_that_is_started_again_stops_before_it_trains_and_goes_on_by_either_way(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (script,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pl.watch" in code)
    script = "\n".join(line for line in script.splitlines() if "pl.diagnose" not in line)
    script = script.replace('"runs/second"', f"{str(tmp_path / 'second')!r}")
    exec(script, {})
    again: dict[str, object] = {}
    with pytest.raises(ArgumentError, match="holds a run of 50 steps"):
        exec(script, again)
    assert "optimizer" in again and "step" not in again  # the loop has not begun
    assert pl.Run(tmp_path / "second").steps[-1] == 40
    exec(script.replace("every=10", "every=10, resume=True"), {})
    assert pl.Run(tmp_path / "second").steps[-1] == 90
    exec(script.replace("second", "second-2"), {})
    assert pl.Run(tmp_path / "second-2").steps[-1] == 40


def test_a_checkpoint_of_the_same_model_goes_on_at_its_own_step(tmp_path: Path) -> None:
    early = trained(tmp_path / "run", 4)
    model, optimizer = restored(early)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1) as w:
        assert w.step_index == 4
        train(model, optimizer, batches(4, 4, 8))
    model, optimizer = restored(early)  # once more from the same checkpoint: what came after it is replaced
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1) as w:
        assert w.step_index == 4
        train(model, optimizer, batches(2, 4, 8))
    assert pl.Run(tmp_path / "run").steps == [0, 1, 2, 3, 4, 5]


def test_another_model_is_refused_though_its_optimizer_has_stepped(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path / "run", 4)
    model = nn.Sequential(nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, batches(4, 4, 8))
    with pytest.raises(ArgumentError, match="holds a run of 4 steps, of a model with other parameters"):
        pl.watch(model, optimizer, run=tmp_path / "run")
    with pytest.raises(ArgumentError, match="of another model, torch.nn.modules.container.Sequential"):
        pl.watch(nn.Linear(8, 3), optimizer=None, run=tmp_path / "run")
    model, optimizer = restored(checkpoint)
    for state in optimizer.state.values():
        state["step"] += 100_000
    with pytest.raises(ArgumentError, match="while this optimizer has made 100,004"):
        pl.watch(model, optimizer, run=tmp_path / "run")


def test_what_resume_may_be(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path / "run", 4)
    model, optimizer = restored(checkpoint)
    with pytest.raises(ArgumentError, match="holds a run of 4 steps"):
        pl.watch(model, optimizer, run=tmp_path / "run", resume=False)
    with pytest.raises(ArgumentError, match="expected no start_step with resume=False"):
        pl.watch(model, optimizer, run=tmp_path / "run", resume=False, start_step=3)
    with pytest.raises(ArgumentError, match="expected resume to be True, False or None; got resume='yes'"):
        pl.watch(model, optimizer, run=tmp_path / "run", resume="yes")
    pl.watch(model, optimizer, run=tmp_path / "new", resume=True).close()  # a first start of a script that resumes


def test_settings_of_the_training_are_stored_beside_those_of_the_watch(tmp_path: Path) -> None:
    trained(tmp_path / "run", settings={"lr": 1e-3, "optimizer": {"name": "Adam"}})
    settings = pl.Run(tmp_path / "run").settings
    assert (settings["lr"], settings["optimizer"], settings["warmup"]) == (1e-3, {"name": "Adam"}, 0)
    trained(tmp_path / "alone")
    optimizer = pl.Run(tmp_path / "alone").settings["optimizer"]
    assert (optimizer["name"], optimizer["lr"]) == ("Adam", 1e-3)
    message = "watch: expected settings without names of the watch's own; got block, warmup. Rename them."
    with pytest.raises(ArgumentError, match=message):
        trained(tmp_path / "other", settings={"warmup": 10, "block": 1, "lr": 1})
    for wrong in ([("lr", 1)], {1: 2}):
        with pytest.raises(ArgumentError, match="watch: expected settings to map names to values; got"):
            trained(tmp_path / "other", settings=wrong)
    assert not (tmp_path / "other").exists()


def test_a_run_without_a_step_is_in_nobody_s_way(tmp_path: Path) -> None:
    pl.watch(mlp(), run=tmp_path / "run").close()
    trained(tmp_path / "run")
    assert pl.Run(tmp_path / "run").steps == [0, 1, 2, 3, 4]


def test_the_same_model_watched_again_closes_its_earlier_watch(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = pl.watch(model, optimizer, run=tmp_path / "run", every=1)
    train(model, optimizer, batches(3, 4, 8))
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        assert first.closed
        train(model, optimizer, batches(3, 4, 8))
    assert pl.Run(tmp_path / "run").steps == list(range(6))


def test_two_models_of_one_process_do_not_share_a_folder(tmp_path: Path) -> None:
    model = mlp()
    with pl.watch(model, run=tmp_path / "run") as w:
        message = r"into which this process watches a Sequential already\. Close that watch first, w\.close\(\)"
        with pytest.raises(ArgumentError, match=message):
            pl.watch(mlp(), run=tmp_path / "run")
        assert not w.closed


KILLED = """
import os, sys
import torch
import plimsoll as pl
from tests.support.watch.recording import batches, mlp, train
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
w = pl.watch(model, optimizer, run=sys.argv[1], every=1)
train(model, optimizer, batches(4, 4, 8))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
train(model, optimizer, batches(3, 4, 8))
assert w.flush()
os.kill(os.getpid(), 9)
"""


def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path, saved = tmp_path / "run", tmp_path / "checkpoint.pt"
    done = processes.python("-c", KILLED, path, saved, cwd=processes.ROOT)
    assert done.returncode == -9
    model, optimizer = restored(torch.load(saved))
    with pl.watch(model, optimizer, run=path, every=1):
        train(model, optimizer, batches(2, 4, 8))
    assert pl.Run(path).steps == [0, 1, 2, 3, 4, 5]


# -- in a notebook

CELL = """
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
w = pl.watch(model, optimizer, run=path, every=1)
train(model, optimizer, batches(steps, 4, 8))
w.flush()
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """IPython's own shell, which keeps what cells give and their variables."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    from IPython.core.interactiveshell import InteractiveShell

    made = InteractiveShell.instance()
    made.history_manager.enabled = False
    made.run_cell("import torch\nimport plimsoll as pl\nfrom tests.support.watch.recording import batches, mlp, train")
    yield made
    made.run_cell("w.close()")
    InteractiveShell.clear_instance()


def cell(shell: object, text: str, **names: object) -> None:
    shell.user_ns.update(names)
    shell.run_cell(text).raise_error()


def test_a_cell_is_run_again(tmp_path: Path, shell: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nb"
    cell(shell, CELL, path=path, steps=3)
    cell(shell, "kept = [model]")  # which keeps its watch open
    cell(shell, CELL, path=path, steps=5)
    assert "nb held an earlier training, which is kept as nb-1" in capsys.readouterr().out
    cell(shell, CELL, path=path, steps=4)
    assert [pl.Run(tmp_path / name).steps[-1] for name in ("nb", "nb-1", "nb-2")] == [3, 2, 4]
    assert not pl.Run(path).problems


def test_a_cell_with_the_watch_alone_is_run_again(tmp_path: Path, shell: object) -> None:
    cell(shell, CELL, path=tmp_path / "nb", steps=3)
    cell(shell, "w = pl.watch(model, optimizer, run=path, every=1)")
    cell(shell, "train(model, optimizer, batches(3, 4, 8))\nw.close()")
    assert pl.Run(tmp_path / "nb").steps == list(range(6)) and not (tmp_path / "nb-1").exists()


def test_another_kernel_s_run_is_kept_too(tmp_path: Path, shell: object) -> None:
    cell(shell, CELL, path=tmp_path / "nb", steps=3)
    cell(shell, "w.close()\nfrom plimsoll.watch import lifecycle\nlifecycle._watched.clear()")
    cell(shell, CELL, path=tmp_path / "nb", steps=2)
    assert [len(pl.Run(tmp_path / name).steps) for name in ("nb", "nb-1")] == [2, 3]
