"""Compaction: the same rows in fewer parts, whatever happens on the way."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from plimsoll.errors import ArgumentError
from plimsoll.runs import Event, Run, RunWriter, Scalars
from plimsoll.runs.storage import atomic_files, parquet
from plimsoll.runs.writing import compaction, rank_folder
from tests.support.runs import making

NEVER = 10**6  # a compact_above that is never reached


class CrashError(BaseException):
    """Stands for the process's end: nothing catches it on the way."""


def many_parts(path: Path, steps: range = range(12), **arguments: object) -> None:
    """A run with one part a step and kind, whose writer dies without closing."""
    writer = RunWriter(path, compact_above=NEVER, **arguments)
    for step in steps:
        making.write_steps(writer, [step], float(step + 1), name=f"w{step % 3}")
        making.write_steps(writer, [step], float(step + 1), name="every")
        writer.write(Scalars(step=step, values={"loss": float(step)}))
        writer.write(Event(step=step, kind="tick", message=f"{step}"))
        assert writer.flush()
    making.die(writer)


def content(path: Path) -> dict[str, object]:
    run = Run(path)
    assert not run.problems
    return {
        "spectra": {(s, c, n): x.sum for s, c, n, x in run.spectra()},
        "rows": len(run.table()),
        "loss": [column.tolist() for column in run.scalars("loss")],
        "ticks": [e.message for e in run.events() if e.kind == "tick"],
    }


def log(path: Path, above: int = 64, thin: compaction.Rules = ()) -> rank_folder.RankFolder:
    return rank_folder.RankFolder(
        path, rank=0, world_size=1, settings={}, resume_from=None, compact_above=above, thin=thin
    )  # fmt: skip


def parts(path: Path, kind: str = "spectra") -> list[str]:
    return sorted(p.name for p in (path / kind).iterdir())


def test_compacting_changes_nothing_but_the_number_of_parts(tmp_path: Path) -> None:
    many_parts(tmp_path)
    before = content(tmp_path)
    assert before["rows"] == 24 and len(parts(tmp_path)) == 12
    opened = log(tmp_path, above=4)
    opened.compact()
    assert content(tmp_path) == before and len(parts(tmp_path)) <= 5
    opened.compact(closing=True)
    assert (
        content(tmp_path) == before and [len(parts(tmp_path, k)) for k in ("spectra", "scalars", "events")] == [1] * 3
    )
    opened.close()


def test_a_closed_run_has_one_part_of_each_kind_sorted_by_series(tmp_path: Path) -> None:
    many_parts(tmp_path)
    RunWriter(tmp_path).close()
    (name,) = parts(tmp_path)
    table = pq.read_table(tmp_path / "spectra" / name)
    keys = list(zip(*(table[c].to_pylist() for c in ("collection", "name", "step")), strict=True))
    assert keys == sorted(keys) and len(keys) == 24


def test_background_compaction_keeps_the_number_of_parts_down(tmp_path: Path) -> None:
    with RunWriter(tmp_path, compact_above=8) as writer:
        for step in range(60):
            making.write_steps(writer, [step])
            assert writer.flush()
            if writer._worker._flusher._compacting is not None:
                writer._worker._flusher._compacting.join()
            assert len(parts(tmp_path)) <= 12
        assert Run(tmp_path).steps == list(range(60))


def crashing(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> Callable[[], int]:
    """Makes the at-th call of a function of `storage.atomic_files` the last thing that happens; says how many."""
    calls = 0
    real = getattr(atomic_files, name)

    def call(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at:
            raise CrashError
        return real(*arguments)

    monkeypatch.setattr(atomic_files, name, call)
    return lambda: calls


@pytest.mark.parametrize("name", ["open_for_writing", "rename", "remove", "sync_folder"])
def test_a_crash_at_any_point_of_compaction_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    at, crashed = 1, True
    while crashed:
        path = tmp_path / f"{at}"
        many_parts(path, range(3))
        before = content(path)
        opened = log(path)
        with monkeypatch.context() as patch:
            crashing(patch, name, at)
            try:
                opened.compact(closing=True)
                crashed = False
            except CrashError:
                crashed = True
        opened.close()
        assert content(path) == before, at
        RunWriter(path).close()  # the next writer sweeps up
        after = content(path)
        assert {k: after[k] for k in ("spectra", "loss", "ticks")} == {
            k: before[k] for k in ("spectra", "loss", "ticks")
        }
        assert len(parts(path)) == 1 and not list(path.rglob("*.tmp"))
        at += 1
    assert at > (3 if name != "remove" else 9)


def test_what_a_killed_writer_left_half_written_is_swept_and_never_read(tmp_path: Path) -> None:
    making.written(tmp_path, [1])
    left = tmp_path / "spectra" / f".writing-1-{parts(tmp_path)[0]}.tmp"
    left.write_bytes(b"half")
    of_another_rank = tmp_path / "spectra" / ".writing-1-r00001-0000000001-0000000001-g0-s0_0.parquet.tmp"
    of_another_rank.write_bytes(b"half")
    assert Run(tmp_path).problems == [] and Run(tmp_path).steps == [1]
    RunWriter(tmp_path).close()
    assert not left.exists() and of_another_rank.exists()


def test_a_damaged_part_is_set_aside_and_told_and_the_others_are_merged(tmp_path: Path) -> None:
    many_parts(tmp_path)
    victim = tmp_path / "spectra" / parts(tmp_path)[4]
    victim.write_bytes(victim.read_bytes()[:-20])
    with RunWriter(tmp_path):
        pass
    assert sorted(p.suffix for p in (tmp_path / "spectra").iterdir()) == [".damaged", ".parquet"]
    with pytest.warns(RuntimeWarning, match=r"damaged: not a part of this run"):
        run = Run(tmp_path)
    assert run.steps == [s for s in range(12) if s != 4]
    assert any(e.kind == "damaged" and victim.name in e.message for e in run.events())


def test_a_part_out_of_reach_is_not_taken_for_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_parts(tmp_path)
    before = content(tmp_path)
    opened = log(tmp_path)

    def unreachable(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "opened", unreachable)
        with pytest.raises(OSError, match="Input/output error"):
            opened.compact(closing=True)
    opened.close()
    assert content(tmp_path) == before and len(parts(tmp_path)) == 12


def test_many_series_and_steps_go_through_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plimsoll.runs.writing import compaction

    monkeypatch.setattr(parquet, "ROW_GROUP", 16)
    monkeypatch.setattr(compaction, "_CHUNK", 50)
    row = making.rows_of(making.tensors(1))
    from plimsoll.runs import Batch

    writer = RunWriter(tmp_path, compact_above=NEVER)
    ids = np.array([writer.series("weights", f"w{i:02d}", format="fp32") for i in range(30)])
    for step in range(20):
        index = np.zeros(30, np.int64)
        writer.write(Batch(step=step, rows=row.copy(), index=index, series=ids, scales=np.full(30, 2.0**step)))
        if step % 4 == 3:
            assert writer.flush()
    before = Run(tmp_path).table()
    writer.close()
    (name,) = parts(tmp_path)
    file = pq.ParquetFile(tmp_path / "spectra" / name)
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sum(sizes) == 600 and set(sizes[:-1]) == {16}
    assert file.read().equals(before)


# -- thinning


def test_thinning_keeps_every_nth_of_the_old_steps_and_all_scalars_and_events(tmp_path: Path) -> None:
    many_parts(tmp_path, range(30))
    before = content(tmp_path)
    with RunWriter(tmp_path, thin=((10, 4), (20, 8))):
        pass
    run = Run(tmp_path)
    expected = [s for s in range(30) if (s >= 19 or s % 4 == 0) and (s >= 9 or s % 8 == 0)]
    assert run.steps == expected
    after = content(tmp_path)
    assert after["spectra"] == {key: x for key, x in before["spectra"].items() if key[0] in expected}
    assert (after["loss"], after["ticks"]) == (before["loss"], before["ticks"])
    assert run.manifest["thin"] == [[10, 4], [20, 8]]


def test_a_part_is_rewritten_once_for_each_rule_as_it_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_parts(tmp_path, range(8))
    opened = log(tmp_path, above=NEVER, thin=((10, 2), (20, 4)))
    merges: list[str] = []
    real = rank_folder.compaction.merge
    monkeypatch.setattr(rank_folder.compaction, "merge", lambda *a: (merges.append(a[2].name), real(*a))[1])
    opened.compact()
    assert not merges
    for step, rewritten, steps in ((18, 8, [0, 2, 4, 6]), (40, 8, [0, 4])):
        append(opened, step)
        opened.compact()
        assert len(merges) >= rewritten
        assert [s for s in Run(tmp_path).steps if s < 8] == steps
        count = len(merges)
        opened.compact()
        assert len(merges) == count
    opened.close()


def append(opened: rank_folder.RankFolder, step: int) -> None:
    from plimsoll.runs import Batch
    from plimsoll.runs.columns.schema import Series
    from plimsoll.runs.columns.spectrum_columns import columns_of, spectra_table
    from plimsoll.runs.columns.step_table import from_batch

    one = np.array([0])
    given = Batch(step=step, rows=making.rows_of(making.tensors(1)), index=one, series=one)
    series = [Series(collection="weights", name="every", format="fp32", shared=True)]
    opened.append("spectra", opened.next_flush(), spectra_table([columns_of(step, from_batch(given, 1))], series))


@pytest.mark.parametrize("rule", [(-1, 2), (10, 0)])
def test_rules_that_mean_nothing_are_refused(tmp_path: Path, rule: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"RunWriter: expected thin=\(\(age_steps, keep_every\), \.\.\.\) with"):
        RunWriter(tmp_path, thin=(rule,))
