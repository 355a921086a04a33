"""Every statistic of what ranks recorded together is the single process's: counts and extremes exactly."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.versions import is_older, only_from
from tests.support.watch.ranks.launch import assert_same, torchrun
from tests.support.watch.ranks.models import Experts, Net, data, sgd, train
from tests.support.watch.recording import only_run

# Each scenario, and the single process's run that it is compared with.
TWO = {
    "ddp": "net",
    "ddp_watched_first": "net",
    "ddp_reduced": "net",
    "fsdp": "net",
    "fsdp_watched_first": "net",
    "fsdp_reduced": "net",
    "tensor_parallel": "net",
    "tensor_parallel_watched_first": "net",
    "tensor_parallel_reduced": "net",
    "plain_tensor_parallel": "finite",
    "plain_tensor_parallel_reduced": "finite",
    "expert_parallel": "experts",
    "pipeline": "net",
    "pipeline_1f1b": "net",
}
FOUR = {
    "ddp": "net",
    "fsdp": "net",
    "fsdp_reduced": "net",
    "hybrid_fsdp": "net",
    "fsdp_and_tensor_parallel": "net",
    "fsdp_and_tensor_parallel_reduced": "net",
    "ddp_and_plain_tensor_parallel": "finite",
    "pipeline_and_fsdp": "net",
}

# torch 2.9's begins by sending an int64 where a float32 is expected, which ends the process.
PIPELINES = only_from("2.13", "a pipeline that gloo takes")


def scenarios(kinds: dict[str, str]) -> list[object]:
    return [pytest.param(name, marks=PIPELINES) if name.startswith("pipeline") else name for name in kinds]


def runnable(kinds: dict[str, str]) -> list[str]:
    return [name for name in kinds if not (name.startswith("pipeline") and is_older("2.13"))]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("single")
    kinds: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "net": (Net, True), "finite": (Net, False), "experts": (Experts, True)
    }  # fmt: skip
    for name, (make, broken) in kinds.items():
        model = make()
        optimizer = sgd(model)
        with pl.watch(model, optimizer, run=folder / name, every=1):
            train(model, optimizer, data(broken=broken))
    return {name: only_run(folder / name) for name in kinds}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    others = ("tensor_parallel_twins", "watching_changes_nothing", "one_rank_alone_watches")
    torchrun("worker.py", 2, folder, *runnable(TWO), *others)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    torchrun("worker.py", 4, folder, *runnable(FOUR))
    return folder


@pytest.mark.parametrize("scenario", scenarios(TWO))
def test_two_ranks_record_what_one_process_does(scenario: str, two: Path, references: dict[str, Run]) -> None:
    assert_same(only_run(two / scenario), references[TWO[scenario]], roots=not scenario.startswith("pipeline"))


@pytest.mark.parametrize("scenario", scenarios(FOUR))
def test_four_ranks_record_what_one_process_does(scenario: str, four: Path, references: dict[str, Run]) -> None:
    assert_same(only_run(four / scenario), references[FOUR[scenario]], roots=not scenario.startswith("pipeline"))


def test_equal_shards_are_not_taken_for_replicas(two: Path) -> None:
    run = only_run(two / "tensor_parallel_twins")
    assert run.spectrum("activations", "inner.fc1:output", 0).count == 16 * 8
    assert run.spectrum("weights", "inner.fc1.weight", 0).count == 8 * 6


def test_the_manifest_tells_each_ranks_place(four: Path) -> None:
    found = [
        json.loads(path.read_text("utf-8"))["ranks"]
        for path in sorted((four / "fsdp_and_tensor_parallel").glob("*.json"))
    ]
    assert sorted(place["mesh"]["coordinate"] for place in found) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert all(place["mesh"]["names"] == ["dp", "tp"] and place["wrapper"] == "fully_shard" for place in found)
    assert all(place["data_index"] == place["mesh"]["coordinate"][0] and place["data_parallel"] == 2 for place in found)


def test_rank_0_alone_writes_what_is_reduced(two: Path) -> None:
    for scenario in ("ddp_reduced", "fsdp_reduced"):
        parts = [path.name for path in (two / scenario / "spectra").iterdir()]
        assert parts and all(name.startswith("r00000") for name in parts)
        assert only_run(two / scenario).closed


def test_a_rank_watches_alone(two: Path) -> None:
    with pytest.warns(RuntimeWarning, match="rank 1: nothing found, of 2 ranks"):
        run = Run(two / "one_rank_alone_watches")
    assert run.ranks == [0] and run.steps == [0, 1]
