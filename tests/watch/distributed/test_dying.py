"""A rank that dies holds up no other, neither in its steps nor when it closes, and the run says what is missing."""

from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from plimsoll.cli import app
from plimsoll.runs import Run
from tests.support import processes
from tests.support.watch.ranks.launch import HERE, environment

STEPS = [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of two ranks, of which rank 0 died, or rank 1; all at the same time, since they wait more than they work."""
    folder = tmp_path_factory.mktemp("dying")
    # The servers of the stores are here, where nobody dies; as under torchrun.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    started = [
        processes.Process((HERE / "dying.py", folder / f"{who}", stores[who].port, rank, who), None, environment())
        for who in (0, 1)
        for rank in (0, 1)
    ]
    ends = [process.done() for process in started]
    assert all(end.returncode == 0 for end in ends), "\n".join(end.stdout + end.stderr for end in ends)[-10000:]
    return folder / "0", folder / "1"


def read(folder: Path) -> Run:
    return Run(folder, warn=False)


def counts(run: Run) -> list[float]:
    """Of an activation that is the same on both ranks."""
    assert run.steps == STEPS
    return run.series("activations", "first:input", "count")[1].tolist()


def says_who_is_missing(run: Run, dead: int) -> None:
    """In `problems`, and in the verdict that needs all ranks."""
    assert run.incomplete == {dead: 2}
    (problem,) = run.problems
    assert problem.startswith(f"rank {dead}: was lost after step 2, and other ranks continued to step 5")
    checked = CliRunner().invoke(app, ["check", str(run.path)])
    assert checked.exit_code == 2 and f"lacks rank {dead} after step 2" in checked.output
    assert CliRunner().invoke(app, ["check", str(run.path), "--until", "2"]).exit_code == 0


@pytest.mark.parametrize("dead", [0, 1])
def test_the_others_go_on(dead: int, folders: tuple[Path, Path]) -> None:
    run = read(folders[dead] / "each")
    assert run.ranks == [0, 1] and not run.closed
    assert counts(run) == [96.0] * 6
    says_who_is_missing(run, dead)


def test_rank_0_goes_on_reducing(folders: tuple[Path, Path]) -> None:
    run = read(folders[1] / "reduced")
    assert counts(run) == [96.0] * 6 and run.ranks == [0, 1]
    (lost,) = [event for event in run.events() if event.kind == "rank lost"]
    assert "rank 1 had not ended" in lost.message and lost.step == 2
    says_who_is_missing(run, 1)


def test_without_rank_0_a_rank_writes_its_own_parts(folders: tuple[Path, Path]) -> None:
    run = read(folders[0] / "reduced")
    assert counts(run) == [96.0] * 6 and not run.closed
    (event,) = [event for event in run.events() if event.kind == "own parts"]
    assert event.rank == 1 and "no sign of life" in event.message
    says_who_is_missing(run, 0)
