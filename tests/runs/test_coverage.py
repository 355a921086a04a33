"""Ranks that others have outrun: said, and never taken for whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.runs import Run, RunWriter, Scalars
from plimsoll.runs.storage import manifest
from tests.support.watch.recording import batches, train

NOBODY = 2**22 + 1  # above the highest number that a process can have


def record(path: Path, rank: int, steps: int, *, closed: bool = True, host: str | None = None) -> None:
    """What a rank has written that got so far, and was killed if it is not closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", "2")
        model = nn.Linear(8, 2)
        with pl.watch(model, run=path, every=1, collect=("activations",), start_step=0):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(steps, 4, 8))
    if not closed:
        change(path, rank, closed=None, pid=NOBODY, **({} if host is None else {"host": host}))


def change(path: Path, rank: int, *, closed: object, **session: object) -> None:
    file = path / manifest.file_name(rank)
    content: dict[str, Any] = json.loads(file.read_bytes())
    content["closed"] = closed
    content["sessions"][-1] |= session
    manifest.write(file, content)


def read(path: Path) -> Run:
    return Run(path, warn=False)


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_was_killed_before_the_others_ended(short: int, steps: int, tmp_path: Path) -> None:
    record(tmp_path, short, steps, closed=False)
    record(tmp_path, 1 - short, 5)
    run = read(tmp_path)
    assert run.incomplete == {short: steps - 1}
    (problem,) = run.problems
    assert f"rank {short}: was lost" in problem and "continued to step 4" in problem
    (finding,) = [finding for finding in pl.diagnose(run) if finding.rule == "records-lost"]
    assert finding.severity == "warning" and finding.evidence["first_problem"] == problem


def test_a_rank_that_ended_in_order_before_the_others_is_named_and_not_lost(tmp_path: Path) -> None:
    record(tmp_path, 0, 5)
    record(tmp_path, 1, 3)
    run = read(tmp_path)
    assert run.incomplete == {}
    (problem,) = run.problems
    assert problem.startswith("rank 1: ended after step 2, and other ranks continued to step 4")


@pytest.mark.parametrize("lag", [0, 2])
def test_ranks_that_write_still_lag_without_a_word(lag: int, tmp_path: Path) -> None:
    record(tmp_path, 0, 5)
    record(tmp_path, 1, 5 - lag)
    for rank in (0, 1):
        change(tmp_path, rank, closed=None)
    run = read(tmp_path)
    assert run.problems == [] and run.incomplete == {}


def test_a_rank_of_another_machine_is_lost_once_another_has_closed(tmp_path: Path) -> None:
    record(tmp_path, 0, 5)
    record(tmp_path, 1, 3, closed=False, host="elsewhere")
    assert read(tmp_path).incomplete == {1: 2}
    change(tmp_path, 0, closed=None)
    assert read(tmp_path).incomplete == {}


def test_ranks_that_are_level_are_whole_whichever_was_killed(tmp_path: Path) -> None:
    record(tmp_path, 0, 5)
    record(tmp_path, 1, 5, closed=False)
    assert read(tmp_path).problems == []


def test_a_rank_without_spectra_of_its_own_is_known_by_its_numbers(tmp_path: Path) -> None:
    """Under DistributedDataParallel the first rank alone records weights; with reduce it records all."""
    record(tmp_path, 0, 5)
    with RunWriter(tmp_path, rank=1, world_size=2) as writer:
        for step in range(5):
            writer.write(Scalars(step=step, values={"loss": 1.0}))
    assert read(tmp_path).problems == []
