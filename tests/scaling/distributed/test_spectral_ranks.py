"""The spectral scaler's ranks: each has gradients of its own, and all have one scale and one decision, to the bit."""

import itertools
import math
from typing import Any

import pytest

from tests.scaling.distributed.conftest import WORLD
from tests.support.cases import each
from tests.support.scaling.ranks.spectral import BROKEN, BURST, IDLE, STEPS, levels

SCENARIOS = ["whole", "idle", "leaves", "half", "half loss", "late"]


@pytest.fixture(name="ranks")
def spectral_ranks(ranks: list[Any]) -> list[Any]:
    return [rank["spectral"] for rank in ranks]


def decisions(rank: dict[str, Any], scenario: str) -> list[bool]:
    return [stepped for stepped, *_ in rank[scenario]["seen"]]


def scales(rank: dict[str, Any], scenario: str) -> list[float]:
    return [float.fromhex(scale) for _, scale, *_ in rank[scenario]["seen"]]


def settled(absmax: float) -> float:
    """The binade that a steady largest gradient leads to, but for the room that the trend leaves for jumps."""
    return 2.0 ** math.floor(math.log2(65520.0 / absmax) - 0.5)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_four_ranks_have_one_scale_and_one_decision_at_every_step(ranks: list[Any], scenario: str) -> None:
    for rank in ranks[1:]:
        assert rank[scenario]["seen"] == ranks[0][scenario]["seen"]
    skipped = [step for step, stepped in enumerate(decisions(ranks[0], scenario)) if not stepped]
    assert skipped == [BROKEN, *BURST]


@each("scenario", [name for name in SCENARIOS if name != "late"])
def test_ranks_remember_the_same(ranks: list[Any], scenario: str) -> None:
    assert all(rank[scenario]["memory"] == ranks[0][scenario]["memory"] for rank in ranks)


def test_the_scale_follows_the_largest_gradient_of_any_rank(ranks: list[Any]) -> None:
    largest = max(levels(3, step) for step in range(BROKEN))
    assert settled(largest) / 4 <= scales(ranks[0], "whole")[BROKEN - 1] <= settled(largest)
    of_the_others = max(levels(2, step) for step in range(BROKEN))
    assert settled(of_the_others) / 4 <= scales(ranks[0], "idle")[BROKEN - 1] <= settled(of_the_others)


def test_without_a_group_ranks_would_part(ranks: list[Any]) -> None:
    assert len({str(rank["alone"]["seen"]) for rank in ranks}) == WORLD


def test_one_ranks_float16_gradients_bound_the_scale_of_all(ranks: list[Any]) -> None:
    """BF16 gradients would have the highest scale; what overflows in FP16 on rank 0 does so for all."""
    bound = settled(max(levels(3, step) for step in range(BROKEN)))
    assert all(bound / 4 <= scales(rank, "half")[BROKEN - 1] <= bound for rank in ranks)


def test_one_ranks_float16_loss_bounds_the_scale_of_all(ranks: list[Any]) -> None:
    assert all(max(scales(rank, "half loss")) == 2.0**15 for rank in ranks)


def test_without_synchronisation_the_scale_comes_back_all_the_same(ranks: list[Any]) -> None:
    found = scales(ranks[0], "late")
    before = scales(ranks[0], "whole")[BROKEN - 1]
    assert min(found) < before / 2**10 and before / 2 <= found[-1] <= before * 2


def test_a_report_is_of_a_ranks_own_gradients(ranks: list[Any]) -> None:
    tops = [rank["whole"]["report"][1][0][2] for rank in ranks]
    assert [a - b for a, b in itertools.pairwise(tops)] == [3, 3, 3]
    assert ranks[IDLE]["idle"]["report"] is None
    assert ranks[0]["idle"]["report"] == ranks[0]["whole"]["report"]


def test_gradients_of_an_earlier_step_are_not_reported_at_todays_scale(ranks: list[Any]) -> None:
    """The rank without gradients in the last steps keeps the report of the last step in which it had some."""
    scale, windows = ranks[IDLE]["leaves"]["report"]
    steps = STEPS - 11  # the scale that the gradients of this step carried
    assert scale == scales(ranks[0], "leaves")[steps - 1] != scales(ranks[0], "leaves")[-2]
    assert windows[0][2] == math.floor(math.log2(65520.0 / levels(IDLE, steps)))


def test_two_ranks_of_fully_shard_have_one_scale(ranks: list[Any]) -> None:
    zero, one = (rank["sharded"] for rank in ranks[:2])
    assert zero["seen"] == one["seen"] and zero["memory"] == one["memory"]
    assert [step for step, (stepped, *_) in enumerate(zero["seen"]) if not stepped] == [BROKEN, *BURST]
    assert all(norm is None for *_, norm in zero["seen"]), "a shard's norm is not the gradient's"


def test_shards_are_reported_by_the_rank_that_holds_them(ranks: list[Any]) -> None:
    zero, one = (rank["sharded"]["report"][1] for rank in ranks[:2])
    assert zero[:2] != one[:2] and len(zero) == 4 and len(one) == 2, "an empty shard says nothing"
