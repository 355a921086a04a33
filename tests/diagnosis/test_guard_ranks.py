"""Two gloo ranks: rank 0 looks and decides, and both act at the same step."""

import json
from typing import Any

import pytest

from tests.support import processes
from tests.support.cases import each

RANK = processes.SUPPORT / "diagnosis" / "guard_rank.py"
WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of every scenario."""
    folder = tmp_path_factory.mktemp("guard")
    results = [folder / f"{rank}.json" for rank in range(WORLD)]
    arguments = [(folder / "store", rank, WORLD, result) for rank, result in enumerate(results)]
    processes.ranks(RANK, arguments)
    return [json.loads(result.read_text("utf-8")) for result in results]


@pytest.mark.parametrize("scenario", ["each", "background", "reduce"])
def test_all_ranks_raise_the_scale_after_the_same_step(scenario: str, ranks: list[Any]) -> None:
    first, second = (rank[scenario] for rank in ranks)
    assert first["scales"] == second["scales"] and first["acts"] == second["acts"]
    assert first["weights"] == second["weights"]
    (act,) = first["acts"]
    assert (act["action"], act["outcome"]) == ("raise_scale", "done")
    assert first["scales"][act["step"] - 1] == 1.0 < 2.0**20 < first["scales"][act["step"]] == act["after"]


def test_the_step_is_the_one_at_which_they_meet(ranks: list[Any]) -> None:
    assert ranks[0]["each"]["acts"][0]["step"] == 10  # the step after that at whose end both looked
    assert ranks[0]["background"]["acts"][0]["step"] == 11  # looked up to step 5, met at 11


@each("scenario", ["each", "background", "reduce"])
def test_rank_0_looks_and_tells_and_what_it_saw_is_found_later(scenario: str, ranks: list[Any]) -> None:
    first, second = (rank[scenario] for rank in ranks)
    assert first["looks"] and first["same"] == [True] * len(first["looks"])
    assert "scale-low" in first["reported"] and second["reported"] == second["looks"] == []
    assert first["events"] == [[0, first["acts"][0]["step"]]]  # reported once, not by each rank


def test_all_ranks_stop_at_the_same_step_and_one_reports(ranks: list[Any]) -> None:
    first, second = (rank["stopped"] for rank in ranks)
    assert first["steps"] == second["steps"] == 10  # the eleventh had ended when they stopped
    assert "nonfinite" in first["message"] and "nonfinite" in second["message"]
    assert (first["reported"], second["reported"]) == (["stopped"], [])
