"""Data-parallel ranks: one with other data or labels is named, and noise or parts of one model are not."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report import summary
from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support.runs import making

STEPS, EVERY = 200, 5
Loss = Callable[[int, float], float]  # of a step and a normal random number
Size = Callable[[int], float]


def falling(step: int, noise: float) -> float:
    return (0.1 + 2.2 / (1 + step / 15)) * (1 + 0.15 * noise)


def stuck(step: int, noise: float) -> float:
    return 2.3 * (1 + 0.15 * noise)


def found(
    path: Path,
    losses: list[Loss],
    sizes: list[Size] | None = None,
    *,
    place: dict[str, object] | None = None,
    same_weights: bool = True,
) -> list[Finding]:
    """The findings in a run of so many ranks; `place` is what its manifests say instead of data-parallel ranks."""
    for rank, loss in enumerate(losses):
        random = torch.Generator().manual_seed(rank)
        with RunWriter(path, rank=rank, world_size=len(losses), flush_seconds=600) as writer:
            reported = {"data_parallel": len(losses), "data_index": rank} if place is None else place
            writer.write_manifest(ranks=reported)
            for step in range(STEPS):
                noise = float(torch.randn((), generator=random))
                writer.write(Scalars(step=step, values={"loss": loss(step, noise)}))
                if step % EVERY == 0:
                    size = 1.0 if sizes is None else sizes[rank](step)
                    x = torch.randn(256, generator=random) * size
                    w = torch.ones(4) * (1 + step + (0 if same_weights else rank))
                    writer.write(making.batch(writer, step, {("activations", "net.0:output"): x}))
                    writer.write(making.batch(writer, step, {("weights", "net.0.weight"): w}, shared=False))
    return diagnose(path, rules=["rank-differs"])


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_a_rank_whose_loss_does_not_fall_is_named(ranks: int, other: int, tmp_path: Path) -> None:
    losses: list[Loss] = [falling] * ranks
    losses[other] = stuck
    (finding,) = found(tmp_path / "run", losses)
    assert finding.evidence["rank"] == other and f"loss of rank {other} is 2." in finding.meaning
    assert finding.until_step == STEPS - 1 and finding.severity == "warning"
    assert f"rank {other} has stayed away" in summary(tmp_path / "run").verdict
    assert diagnose(View(Run(tmp_path / "run"), 20), rules=["rank-differs"]) == []  # too early to be sure


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_differ_by_noise_are_silent(ranks: int, tmp_path: Path) -> None:
    assert found(tmp_path / "run", [falling] * ranks) == []


def test_ranks_that_all_differ_are_silent(tmp_path: Path) -> None:
    """Each has a task of its own: nothing says that one of them is wrong."""
    assert found(tmp_path / "run", [lambda s, n, k=k: k * falling(s, n) for k in (1.0, 2.0, 4.0)]) == []


def test_small_losses_are_silent(tmp_path: Path) -> None:
    losses: list[Loss] = [lambda s, n, k=k: 2.0 if s < 20 else k * 1e-3 for k in (1.0, 1.0, 9.0)]
    assert found(tmp_path / "run", losses) == []


def test_of_two_ranks_none_is_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path / "run", [falling, stuck])
    assert "rank" not in finding.evidence and "the other:" in finding.meaning
    assert "the loss of the two ranks has differed" in summary(tmp_path / "run").verdict


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_a_rank_with_inputs_of_another_size_is_named(factor: float, tmp_path: Path) -> None:
    (finding,) = found(tmp_path / "run", [falling] * 3, [lambda s: 1.0, lambda s: 1.0, lambda s: factor])
    assert finding.evidence["rank"] == 2 and finding.where == ("net.0:output",) and finding.since_step == 0
    assert finding.evidence["of"] == "activations" and "of rank 2" in finding.meaning


def test_a_rank_that_is_spoiled_later_is_named_from_then_on(tmp_path: Path) -> None:
    sizes: list[Size] = [lambda s: 1.0, lambda s: 20.0 if s >= 100 else 1.0, lambda s: 1.0]
    (finding,) = found(tmp_path / "run", [falling] * 3, sizes)
    assert finding.since_step == 100 and finding.evidence["rank"] == 1


def test_ranks_without_a_wrapper_are_known_by_their_weights(tmp_path: Path) -> None:
    alone: dict[str, object] = {"data_parallel": 1, "data_index": 0}
    losses: list[Loss] = [falling, stuck, falling]
    (finding,) = found(tmp_path / "averaged", losses, place=alone)
    assert finding.evidence["rank"] == 1
    assert found(tmp_path / "apart", losses, place=alone, same_weights=False) == []  # trainings of their own


def test_ranks_that_share_a_part_of_the_batch_are_silent(tmp_path: Path) -> None:
    mesh: dict[str, object] = {"data_parallel": 1, "data_index": 0, "mesh": {"names": ["tp"], "shape": [3]}}
    assert (
        found(tmp_path / "run", [falling, stuck, falling], [lambda s: 1.0, lambda s: 9.0, lambda s: 1.0], place=mesh)
        == []
    )


def with_losses(path: Path, losses: list[Callable[[int], float]], steps: int = 60) -> list[Finding]:
    """The findings in a run of ranks with these losses."""
    for rank, loss in enumerate(losses):
        with RunWriter(path, rank=rank, world_size=len(losses), flush_seconds=600) as writer:
            writer.write_manifest(ranks={"data_parallel": len(losses), "data_index": rank})
            for step in range(steps):
                writer.write(Scalars(step=step, values={"loss": loss(step)}))
    return diagnose(path, rules=["rank-differs"])


def one(step: int) -> float:
    return falling(step, math.sin(7.3 * step))


def test_ranks_that_all_read_the_same_batches_are_named(tmp_path: Path) -> None:
    (finding,) = with_losses(tmp_path / "same", [one] * 3)
    assert finding.severity == "warning" and finding.evidence == {"of": "batches", "ranks": 3}
    assert "all 3 ranks have had the same losses" in summary(tmp_path / "same").verdict
    assert with_losses(tmp_path / "short", [one] * 3, steps=59) == []
    assert with_losses(tmp_path / "rounded", [one, lambda s: one(s) * (1 + (s == 30) * 2.0**-20)]) == []
    assert with_losses(tmp_path / "constant", [lambda s: 0.5] * 2) == []
    assert with_losses(tmp_path / "alone", [one]) == []


def begun(path: Path, *weights: dict[str, list[float]]) -> list[Finding]:
    """The findings in a run whose ranks began with these weights."""
    for rank, some in enumerate(weights):
        with RunWriter(path, rank=rank, world_size=len(weights), flush_seconds=600) as writer:
            details = {"fact": "first weights", "weights": some}
            writer.write(Event(step=0, kind="wiring", message="", details=details))
            writer.write(Scalars(step=0, values={"loss": 1.0}))
    return diagnose(path, rules=["rank-differs"])


def test_ranks_that_begin_with_different_weights_are_named(tmp_path: Path) -> None:
    one, other, own = [0.1, -0.2, 0.3, 0.0], [0.3, 0.1, -0.2, 0.0], [1.0, 2.0, 3.0, 4.0]
    (finding,) = begun(tmp_path / "apart", {"a": one, "b": own}, {"a": one, "b": own}, {"a": other, "b": own})
    assert (finding.severity, finding.where, finding.evidence["ranks"]) == ("alarm", ("a",), 3)
    assert "3 ranks began with different weights" in summary(tmp_path / "apart").verdict
    assert begun(tmp_path / "same", {"a": one}, {"a": one}) == []
    assert begun(tmp_path / "rounded", {"a": one}, {"a": [x * (1 + 2.0**-20) for x in one]}) == []
    assert begun(tmp_path / "ignored", {"a": one, "b": one}, {"a": one}) == []  # b is each rank's own
    assert begun(tmp_path / "alone", {"a": one}) == []
