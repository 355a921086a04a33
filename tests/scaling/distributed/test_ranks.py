"""That ranks never disagree on a scale or a skip, though one of them alone overflows."""

from typing import Any

from tests.scaling.distributed.conftest import WORLD
from tests.support.cases import each


def facts(rank: dict[str, Any], scenario: str) -> list[Any]:
    return [[stepped, scale] for stepped, scale, _ in rank[scenario]["seen"]]


@each("scenario", ["whole", "fused", "idle", "sharded"])
def test_one_rank_of_four_overflows_and_all_skip_at_one_scale(ranks: list[Any], scenario: str) -> None:
    expected = facts(ranks[0], scenario)
    assert all(facts(rank, scenario) == expected for rank in ranks)
    assert [step for step, (stepped, _) in enumerate(expected) if not stepped] == [3, 4, 7]
    assert [scale for _, scale in expected][2:8] == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**15, 2.0**14]
    weights = [rank[scenario]["weights"] for r, rank in enumerate(ranks) if not (scenario == "idle" and r == 1)]
    assert all(w == weights[0] for w in weights) and weights[0][0] < 1.0


def test_without_a_group_ranks_would_part(ranks: list[Any]) -> None:
    assert len({str(facts(rank, "alone")) for rank in ranks}) == WORLD


def test_two_ranks_of_a_smaller_group(ranks: list[Any]) -> None:
    assert facts(ranks[0], "pair") == facts(ranks[1], "pair")
    assert [step for step, (stepped, _) in enumerate(facts(ranks[0], "pair")) if not stepped] == [5]
    assert ranks[0]["pair"]["weights"] == ranks[1]["pair"]["weights"]


def test_the_reason_says_on_which_side_it_was(ranks: list[Any]) -> None:
    for rank in range(WORLD):
        reason = ranks[rank]["whole"]["seen"][3][2]
        here = "non-finite gradients in 1 of 3 values of parameter 0 in group 0 of Adam"
        there = "non-finite gradients on another rank; those of Adam are finite here"
        assert reason == (here if rank == 2 else there)
        assert ranks[rank]["whole"]["seen"][2][2] is None
