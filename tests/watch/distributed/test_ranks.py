"""Every statistic of what ranks recorded together is the single process's: counts and extremes exactly."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import plimsoll as pl
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.versions import is_older, only_from
from tests.support.watch.ranks.launch import assert_same, torchrun
from tests.support.watch.ranks.models import Experts, Net, Rounded, data, sgd, train
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
SHADOWS = ("shadow_ddp", "shadow_ddp_micro_batches", "shadow_fsdp")
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
        "net": (Net, True), "finite": (Net, False), "experts": (Experts, True), "rounded": (Rounded, False)
    }  # fmt: skip
    for name, (make, broken) in kinds.items():
        model = make()
        optimizer = sgd(model)
        shadow = 1 if name == "rounded" else None
        with pl.watch(model, optimizer, run=folder / name, every=1, shadow_every=shadow):
            train(model, optimizer, data(broken=broken))
    return {name: only_run(folder / name) for name in kinds}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, references: dict[str, Run]) -> Path:  # kernels are compiled by then
    folder = tmp_path_factory.mktemp("two")
    others = ("tensor_parallel_twins", "watching_changes_nothing", "one_rank_alone_watches")
    shadows = (*SHADOWS, "shadow_tensor_parallel", "shadow_on_one_rank")
    torchrun("worker.py", 2, folder, *runnable(TWO), *others, *shadows)
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, references: dict[str, Run]) -> Path:
    folder = tmp_path_factory.mktemp("four")
    torchrun("worker.py", 4, folder, *runnable(FOUR), "shadow_fsdp", "shadow_hybrid_fsdp")
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


def assert_same_errors(run: Run, reference: Run) -> None:
    """That two runs hold the same errors and counts of zeros, to the rounding of other orders of summation."""
    found, expected = (
        {(step, collection, name): errors.to_dict() for step, collection, name, errors in r.errors()}
        for r in (run, reference)
    )
    assert found.keys() == expected.keys()
    for key, sums in expected.items():
        size = {name: 1e-9 * abs(value) for name, value in sums.items()}
        # Gradients are exact but for the order in which float64 adds them up.
        norm, root = sums["referencesq"] ** 0.5, sums["compared"] ** 0.5
        floor = 1e-12 * norm
        size["errorsq"] += floor * (floor + sums["errorsq"] ** 0.5)
        size["error"], size["reference"] = root * (floor + 1e-6 * sums["errorsq"] ** 0.5), root * (1e-6 * norm)
        size["error_reference"], size["largest_error"] = norm * (floor + 1e-6 * norm), floor + 1e-6 * norm
        for name, value in sums.items():
            assert abs(found[key][name] - value) <= size[name], (key, name, found[key][name], value)
    for collection in ("gradients", "activations", "activation_gradients"):
        for name in reference.tensors[collection]:
            for statistic in ("underflowed", "structural"):
                steps, values = run.series(collection, name, statistic)
                wanted = reference.series(collection, name, statistic)
                assert (steps.tolist(), values.tolist()) == (wanted[0].tolist(), wanted[1].tolist()), (name, statistic)


@each("scenario", SHADOWS)
def test_errors_of_two_ranks_are_those_of_one_process(scenario: str, two: Path, references: dict[str, Run]) -> None:
    run = only_run(two / scenario)
    assert not [event for event in run.events() if event.kind in {"shadow", "failure"}]
    assert_same_errors(run, references["rounded"])
    assert max(errors.relative_error for *_, errors in run.errors("gradients")) > 1e-5


@pytest.mark.parametrize("scenario", ["shadow_fsdp", "shadow_hybrid_fsdp"])
def test_errors_of_four_ranks_are_those_of_one_process(scenario: str, four: Path, references: dict[str, Run]) -> None:
    assert_same_errors(only_run(four / scenario), references["rounded"])


def test_shadows_that_some_ranks_cannot_take_are_not_taken(two: Path) -> None:
    reported = {}
    for scenario in ("shadow_tensor_parallel", "shadow_on_one_rank", "shadow_on_one_rank/failing"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a rank has no run
            run = Run(two / scenario)
        assert not list(run.errors())
        reported[scenario] = {event.message for event in run.events() if event.kind == "shadow"}
    (way,) = reported["shadow_tensor_parallel"]
    assert "not DistributedDataParallel's or fully_shard's" in way
    (absent,) = reported["shadow_on_one_rank"]
    assert "not all ranks take it" in absent
    assert any(
        "another rank could not repeat its part" in message for message in reported["shadow_on_one_rank/failing"]
    )
    assert any("it raised ValueError" in message for message in reported["shadow_on_one_rank/failing"])
