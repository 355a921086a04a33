"""What ranks recorded, merged: parts of a whole added up, replicas counted once, ranks that lag or lack."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support.runs import making

A, B, C = (torch.tensor(values) for values in ([1.0, 2.0], [4.0, -8.0, 0.0], [float("nan"), 0.5]))


def write(path: Path, rank: int, values: dict[int, torch.Tensor], *, world_size: int = 2, **fields: object) -> None:
    with RunWriter(path, rank=rank, world_size=world_size) as writer:
        for step, x in values.items():
            writer.write(making.batch(writer, step, {("weights", "w"): x}, **fields))


def whole(*tensors: torch.Tensor) -> object:
    return sum(making.spectrum_of(row) for row in making.rows_of(tensors))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_shared_series_are_added_up(tmp_path: Path, order: tuple[int, int]) -> None:
    for rank in order:
        write(tmp_path, rank, {0: [A, B][rank], 1: A})
    run = Run(tmp_path)
    assert run.ranks == [0, 1] and run.world_size == 2 and run.problems == []
    assert run.spectrum("weights", "w", 0) == whole(A, B)
    assert run.spectrum("weights", "w", 1) == whole(A, A)
    for statistic in ("count", "sum", "min", "absmax", "zeros", "std"):
        expected = [getattr(whole(A, B), statistic), getattr(whole(A, A), statistic)]
        assert run.series("weights", "w", statistic)[1].tolist() == pytest.approx(expected, nan_ok=True)
    table = run.table()
    assert table["count"].to_pylist() == [5, 4] and table["binades"].to_pylist()[0] == [1, 1, 1, 1]
    assert "rank" not in table.schema.names


def test_plain_series_that_are_equal_everywhere_are_counted_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, {0: A, 1: B}, shared=False)
    run = Run(tmp_path)
    assert run.spectrum("weights", "w", 0) == whole(A) and run.spectrum("weights", "w", 1) == whole(B)
    assert [s for *_, s in run.spectra()] == [whole(A), whole(B)]
    assert run.series("weights", "w", "count")[1].tolist() == [2, 3]
    assert run.table()["count"].to_pylist() == [2, 3]


def test_plain_series_that_differ_at_one_step_are_added_up_at_all(tmp_path: Path) -> None:
    write(tmp_path, 0, {0: A, 1: A, 2: A}, shared=False)
    write(tmp_path, 1, {0: A, 1: A, 2: B}, shared=False)
    run = Run(tmp_path)
    assert run.spectrum("weights", "w", 0) == whole(A, A)  # decided over all steps, whichever is asked for
    assert run.series("weights", "w", "count")[1].tolist() == [4, 4, 5]


def test_spectra_of_equal_moments_and_other_binades_differ(tmp_path: Path) -> None:
    # 1 + 5 + 6 = 2 + 3 + 7, and so their squares; 0.5 and 8 make the extremes equal.
    write(tmp_path, 0, {0: torch.tensor([0.5, 1.0, 5.0, 6.0, 8.0])}, shared=False)
    write(tmp_path, 1, {0: torch.tensor([0.5, 2.0, 3.0, 7.0, 8.0])}, shared=False)
    assert Run(tmp_path).spectrum("weights", "w", 0).count == 10


def test_replicas_with_nothing_finite_are_replicas(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, {0: torch.tensor([float("nan")]), 1: torch.tensor([])}, shared=False)
    assert Run(tmp_path).series("weights", "w", "nans")[1].tolist() == [1, 0]


@pytest.mark.parametrize(("shared", "counts"), [(False, [2, 2, 3, 3]), (True, [2, 4, 3, 3])])
def test_a_rank_that_lags_or_died_is_merged_where_it_has_something(
    tmp_path: Path, shared: bool, counts: list[int]
) -> None:
    write(tmp_path, 0, {0: A, 1: A, 3: B}, shared=shared)
    write(tmp_path, 1, {1: A, 2: B}, shared=shared)
    with pytest.warns(RuntimeWarning, match=r"rank 1: ended after step 2, and other ranks continued to step 3"):
        run = Run(tmp_path)
    assert run.steps == [0, 1, 2, 3] and run.series("weights", "w", "count")[1].tolist() == counts
    assert [run.spectrum("weights", "w", s).count for s in range(4)] == counts


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0, {0: A}, world_size=3)
    write(tmp_path, 2, {0: B}, world_size=3)
    with pytest.warns(RuntimeWarning, match=r"rank 1: nothing found, of 3 ranks; steps are merged over those"):
        run = Run(tmp_path)
    assert run.ranks == [0, 2] and run.world_size == 3 and len(run.problems) == 1 and not run.closed
    assert run.spectrum("weights", "w", 0) == whole(A, B)
    write(tmp_path, 1, {0: C}, world_size=3)
    run.refresh()
    assert run.problems == [] and run.closed
    assert run.spectrum("weights", "w", 0).count == 7


def test_rank_0s_manifest_says_which_were_counted_once(tmp_path: Path) -> None:
    for rank in (1, 0):
        with RunWriter(tmp_path, rank=rank, world_size=2) as writer:
            for step in range(3):
                writer.write(making.batch(writer, step, {("weights", "same"): A}, shared=False, last=False))
                writer.write(making.batch(writer, step, {("weights", "other"): [A, B][rank]}, shared=False, last=False))
                writer.write(making.batch(writer, step, {("weights", "shard"): A}))
    manifest = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert manifest["ranks_merged"] == {"counted_once": {"weights": ["same"]}, "summed": {"weights": ["other"]}}


def test_rank_0s_manifest_says_nothing_while_a_rank_is_behind(tmp_path: Path) -> None:
    write(tmp_path, 1, {0: A}, shared=False)
    write(tmp_path, 0, {0: A, 1: A}, shared=False)
    assert "ranks_merged" not in Run(tmp_path, warn=False).manifest


def test_scalars_are_the_ranks_mean_and_events_tell_theirs(tmp_path: Path) -> None:
    for rank in (1, 0):
        with RunWriter(tmp_path, rank=rank, world_size=2) as writer:
            writer.write(Scalars(step=rank, values={"loss": float(rank)}))
            writer.write(Scalars(step=5, values={"loss": float(rank), "nonfinite": 3.0, "scale": 8.0}))
            writer.write(Event(step=rank, kind="tick", message="", time=1.0))
    run = Run(tmp_path)
    assert [c.tolist() for c in run.scalars("loss")] == [[0, 1, 5], [0.0, 1.0, 0.5]]
    assert run.scalars("nonfinite")[1].tolist() == [6.0] and run.scalars("scale")[1].tolist() == [8.0]
    assert [(e.step, e.rank) for e in run.events()] == [(0, 0), (1, 1)]


def test_activations_are_compared_among_the_ranks_of_one_part_of_the_batch(tmp_path: Path) -> None:
    values = [A, A, B, B]  # two parts of a batch, each on two ranks
    for rank, x in enumerate(values):
        with RunWriter(tmp_path, rank=rank, world_size=4) as writer:
            writer.write_manifest(ranks={"data_index": rank // 2})
            names = {("activations", "hidden"): x, ("activations", "part"): [A, B, A, A][rank], ("weights", "w"): x}
            writer.write(making.batch(writer, 0, names, shared=False))
    run = Run(tmp_path)
    assert run.spectrum("activations", "hidden", 0) == whole(A, B)
    assert run.spectrum("activations", "part", 0) == whole(A, B, A, A)
    assert run.spectrum("weights", "w", 0) == whole(A, A, B, B)  # of parameters all ranks are asked


def test_names_that_only_one_rank_knows_are_listed(tmp_path: Path) -> None:
    for rank in (0, 1):
        with RunWriter(tmp_path, rank=rank, world_size=2) as writer:
            writer.write(making.batch(writer, 0, {("weights", f"stage{rank}"): A}))
    assert Run(tmp_path).tensors == {"weights": ("stage0", "stage1")}
    assert Run(tmp_path).spectrum("weights", "stage1", 0) == whole(A)


def test_ranks_that_a_restart_left_behind_do_not_show_what_was_replaced(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, dict.fromkeys(range(6), A), world_size=3)
    with RunWriter(tmp_path, rank=0, world_size=1, resume_from=3) as writer:
        writer.write(making.batch(writer, 3, {("weights", "w"): B}))
    assert Run(tmp_path).series("weights", "w", "count")[1].tolist() == [6, 6, 6, 3]


def test_a_live_rank_and_a_killed_one_are_read_as_they_are(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path, rank=rank, world_size=2) for rank in (0, 1)]
    for writer in writers:
        writer.write(making.batch(writer, 0, {("weights", "w"): A}, scales=np.array([2.0])))
        assert writer.flush()
    making.die(writers[1])
    assert Run(tmp_path).spectrum("weights", "w", 0).sum == 3.0
    writers[0].close()
    assert not Run(tmp_path).closed
