"""Layer scales under DistributedDataParallel: what is averaged carries none of them."""

from typing import Any

import pytest

from tests.support.scaling.ranks.starting import seen_by_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw of every scenario."""
    return seen_by_ranks("layers_worker.py", 2, tmp_path_factory.mktemp("ranks"))


def test_gradients_are_the_same_to_the_bit_though_ranks_have_other_exponents(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["exact"]["got"] == rank["exact"]["expected"] == ranks[0]["exact"]["got"]
        assert rank["exact"]["names"] == ["a", "b", "c"]


def test_one_rank_overflows_and_both_skip_at_one_loss_scale(ranks: list[Any]) -> None:
    assert ranks[0]["steps"] == ranks[1]["steps"]
    assert [stepped for stepped, _ in ranks[0]["steps"]["seen"]] == [True, True, False, False, True, True, True, True]


def test_what_cannot_be_right_is_refused(ranks: list[Any]) -> None:
    said = ranks[0]["refused"]
    assert "DistributedDataParallel, whose buckets are float16; got a.weight (torch.float16)" in said["half"]
    assert "expected a model without fully_shard; got FSDPWritten" in said["sharded"]
    assert "expected a model without fully_shard; got FSDPWritten" in said["sharded later"]
