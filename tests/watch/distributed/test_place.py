"""What a rank takes for its place, what is refused, and messages through a store, in one process."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plimsoll as pl
from plimsoll.runs.columns.arrow import pa
from plimsoll.watch.ranks.ranks import Ranks
from plimsoll.watch.ranks.store_channel import StoreChannel, decoded, encoded
from tests.support.cases import each
from tests.support.watch.ranks.models import Net


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_first_fsdp_is_refused_by_name(alone: None, tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    with pytest.raises(pl.ArgumentError, match=r"wrapped in FullyShardedDataParallel.*fully_shard instead"):
        pl.watch(model, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_first_fsdp_around_a_watched_model_ends_the_watch_and_says_so(alone: None, tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    w = pl.watch(model, run=tmp_path / "run", every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="FullyShardedDataParallel"):
        model(torch.ones(1, 4)).sum().backward()
    w.close()
    (event,) = [event for event in pl.Run(tmp_path / "run").events() if event.kind == "failure"]
    assert "FullyShardedDataParallel" in event.message


def test_reducing_needs_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        pl.ArgumentError, match=r"expected a process group for ranks=\"reduce\"; got none, on rank 1 of 2"
    ):
        pl.watch(Net(), run=tmp_path / "run", ranks="reduce")


@each(
    ("ranks", "microbatches", "factor", "divisor"),
    [(1, 1, 1, 1), (4, 8, 4, 1), (3, 1, 1, 3), (2, 6, 2, 6), (6, 3, 1, 18)],
)
def test_powers_of_two_are_recorded_and_other_factors_taken_out(
    ranks: int, microbatches: int, factor: int, divisor: int
) -> None:
    place = Ranks()
    place.data_parallel = ranks
    assert place.take_microbatches(microbatches) == microbatches  # of the first step, whose number was not known
    assert (place.factor, place.divisor) == (factor, divisor)
    power_of_two = microbatches & (microbatches - 1) == 0
    assert place.take_microbatches(microbatches) == (microbatches if power_of_two else 1)


def test_a_message_has_one_taker(alone: None) -> None:
    link = StoreChannel("runs/a", 1)
    table = pa.table({"step": [1, 2], "name": ["a", "b"]})
    link.send(0, encoded("scalars", table))
    assert link.sent() == 1 and link.is_there(1, 0) and not link.is_there(1, 1)
    message = link.take(1, 0)
    assert message is not None
    kind, found = decoded(message)
    assert kind == "scalars" and found.to_pylist() == table.to_pylist()
    assert link.take(1, 0) is None and not link.claim(1, 0) and not link.is_there(1, 0)
    link.send(1, b"")
    assert link.claim(1, 1) and link.take(1, 1) is None
    other = StoreChannel("runs/a", 1)  # opened again
    assert other.sent() == 0
