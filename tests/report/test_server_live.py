"""A run that grows under a live view: what was read stays, what is new is added, and all is as if read at once."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

import torch

from plimsoll.diagnosis import View, diagnose, whatif
from plimsoll.diagnosis.tables.cells import Cells, before_step, joined, size_bytes
from plimsoll.errors import RunError
from plimsoll.report.live.live_runs import _COMPUTED, Live, LiveView
from plimsoll.runs import Event, Run, RunWriter
from plimsoll.runs.reading import row_selection
from plimsoll.runs.storage import manifest
from tests.support.diagnosis.stories import constant, make_story
from tests.support.patience import HANG_SECONDS
from tests.support.report.served import write_steps
from tests.support.runs import making

LOW = make_story(samples=8, gradient_std=constant(2.0**-26))
NEVER = 10**6


def same(found: Cells, expected: Cells) -> None:
    """Equal but for the order of the rows."""
    assert (found.names, found.formats, found.steps.tolist()) == (
        expected.names,
        expected.formats,
        expected.steps.tolist(),
    )
    mine, theirs = (np.lexsort((c.scale, c.format, c.cell)) for c in (found, expected))
    for name in ("layer", "at", "format", "scale", "lowest", "length", "nonzero"):
        np.testing.assert_array_equal(getattr(found, name)[mine], getattr(expected, name)[theirs], name)
    for name in expected.columns:
        np.testing.assert_array_equal(found.column(name)[mine], expected.column(name)[theirs], name)
    for row, other in zip(mine.tolist(), theirs.tolist(), strict=True):
        assert found.flat[found.start[row] : found.start[row + 1]].tolist() == (
            expected.flat[expected.start[other] : expected.start[other + 1]].tolist()
        )


def as_if_read_now(view: LiveView) -> None:
    fresh = View(Run(view.run.path, warn=False))
    for collection in view.run.tensors:
        same(view.cells(collection), fresh.cells(collection))
    assert [f.to_dict() for f in diagnose(view)] == [f.to_dict() for f in diagnose(fresh)]
    for name in _COMPUTED:
        assert repr(getattr(view, name)) == repr(getattr(fresh, name))  # arrays have no truth


def opened(path: Path, view: LiveView | None = None) -> LiveView:
    view = view or LiveView(Run(path, warn=False))
    for collection in view.run.tensors:
        view.cells(collection)
    return view


@pytest.mark.parametrize("compact_above", [NEVER, 4])
def test_a_growing_run_is_as_if_read_at_once(tmp_path: Path, compact_above: int) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600, compact_above=compact_above)
    write_steps(writer, LOW, 0, 9)
    view = opened(tmp_path)
    assert view.last_step == 9
    for first in range(10, 40, 5):
        write_steps(writer, LOW, first, first + 4)
        if (compacting := writer._worker._flusher._compacting) is not None:
            compacting.join()
        view.follow()
        assert view.last_step == first + 4
    as_if_read_now(view)
    writer.close()
    view.follow()
    as_if_read_now(view)


def test_only_new_parts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600, compact_above=NEVER)
    write_steps(writer, LOW, 0, 20)
    view, read = opened(tmp_path), []
    whole = row_selection._load
    monkeypatch.setattr(row_selection, "_load", lambda path, part, *a: (read.append(part), whole(path, part, *a))[1])
    view.follow()
    assert read == []
    write_steps(writer, LOW, 21, 25)
    view.follow()
    assert {part.min_step for part in read if part.kind == "spectra"} == {25}
    writer.close()


def test_compacting_alone_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600, compact_above=NEVER)
    for first in range(0, 30, 5):
        write_steps(writer, LOW, first, first + 4)
    view, read = opened(tmp_path), []
    writer.close()
    with RunWriter(tmp_path, flush_seconds=600, compact_above=4) as again:
        again._worker._flusher._folder.compact()
    monkeypatch.setattr(row_selection, "_load", lambda path, part, *a: read.append(part))
    view.follow()
    assert [part for part in read if part.kind == "spectra"] == []
    monkeypatch.undo()
    as_if_read_now(view)


def test_series_and_collections_that_appear_later(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600)
    making.write_steps(writer, [0, 1], name="b")
    writer.flush()
    view = opened(tmp_path)
    assert view.cells("gradients") is None
    writer.write(making.batch(writer, 2, {("weights", "a"): torch.ones(3), ("gradients", "b"): torch.ones(2)}))
    writer.flush()
    view.follow()
    assert view.cells("weights").names == ("b", "a") and view.cells("gradients").names == ("b",)
    as_if_read_now(view)
    writer.close()


def test_events_that_appear_later_change_how_values_are_judged(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600)
    making.write_steps(writer, [0, 1])
    writer.flush()
    view = opened(tmp_path)
    assert (view.casts, view.ending, view.cells("weights").formats) == ([], None, ("fp32",))
    casts = {"fc": {"weights": {"format": "e4m3", "scale": 1.0, "series": "fc.weight"}}}
    for step, fmt in ((2, "e5m2"), (3, "e4m3")):
        writer.write(Event(step=step, kind="emulation", message="", details={"formats": {"weights": fmt}}))
        making.write_steps(writer, [step])
    writer.write(Event(step=3, kind="casts", message="", details={"modules": casts}))
    writer.write(Event(step=3, kind="ended", message="", details={"reason": "exception"}))
    writer.flush()
    view.follow()
    cells = view.cells("weights")
    assert [cells.formats[fmt] for fmt in cells.format] == ["fp32", "fp32", "e5m2", "e4m3"]
    assert len(view.casts) == 1
    as_if_read_now(view)
    writer.close()


def test_steps_that_a_resumed_training_records_again(tmp_path: Path) -> None:
    making.written(tmp_path, range(10), 1.0)
    view = opened(tmp_path)
    with RunWriter(tmp_path, resume_from=5, flush_seconds=600) as writer:
        view.follow()
        assert view.cells("weights").steps.tolist() == list(range(5))
        making.write_steps(writer, [5, 6], 3.0)
        writer.flush()
        view.follow()
        assert view.cells("weights").column("absmax").tolist() == [1.0] * 5 + [3.0] * 2
    as_if_read_now(view)


@pytest.mark.parametrize(("shared", "differ", "count"), [(True, 9, 8), (False, 9, 4), (False, 4, 8)])
def test_ranks_that_come_one_after_the_other(tmp_path: Path, shared: bool, differ: int, count: int) -> None:
    """Plain tensors that differ on two ranks from a step on were never replicas: all steps are added up then."""
    writers = [RunWriter(tmp_path, rank=rank, world_size=2, flush_seconds=600) for rank in range(2)]
    view: LiveView | None = None
    for step in range(6):
        for rank, writer in enumerate(writers):
            tensor = torch.full((4,), 2.0 + step + (rank if step >= differ else 0))
            writer.write(making.batch(writer, step, {("weights", "w"): tensor}, shared=shared))
            writer.flush()
            if view is not None:
                view.follow()
            view = opened(tmp_path, view)
            fresh = View(Run(tmp_path, warn=False))
            same(view.cells("weights"), fresh.cells("weights"))
    assert set(view.cells("weights").column("count").tolist()) == {count}
    for writer in writers:
        writer.close()


def test_a_part_that_is_taken_away_is_missed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600, compact_above=NEVER)
    write_steps(writer, LOW, 0, 9)
    write_steps(writer, LOW, 10, 19)
    view = opened(tmp_path)
    min((tmp_path / "spectra").iterdir()).unlink()
    view.follow()
    as_if_read_now(view)
    writer.close()


def test_cells_cut_and_joined_are_the_whole(tmp_path: Path) -> None:
    whole = View(Run(LOW.write(tmp_path / "run"))).cells("activation_gradients")
    for cut in (-1, 0, 7, 20, 1000):
        first = before_step(whole, cut)
        assert (first.steps < cut).all()
        later_rows = View(Run(tmp_path / "run"))
        table = later_rows.run.table("activation_gradients", steps=slice(max(cut, 0), None))
        if len(first) and len(table):
            from plimsoll.diagnosis.tables.cells import from_table

            same(joined(first, from_table("activation_gradients", table, whole.names), whole.names), whole)
    assert before_step(whole, 1000) is whole


def test_a_what_if_after_growth_is_that_of_a_fresh_look(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, flush_seconds=600)
    write_steps(writer, LOW, 0, 9)
    view = LiveView(Run(tmp_path))
    for first in (10, 20):
        whatif(view, "fp16", 3)
        write_steps(writer, LOW, first, first + 9)
        view.follow()
    for shift in (None, -3, 12):
        assert whatif(view, "fp16", shift).to_dict() == whatif(Run(tmp_path), "fp16", shift).to_dict()
    writer.close()


# -- what is kept, and for how long


def test_runs_that_nobody_asks_about_are_dropped_when_memory_is_short(tmp_path: Path) -> None:
    for name in "abc":
        LOW.write(tmp_path / name)
    whole = Live(tmp_path)
    _read(whole, "a")
    one = whole._opened(whole.listed("a")).size_bytes
    assert one > 1_000
    live = Live(tmp_path, most_bytes=int(2.5 * one))
    for name in "abca":
        _read(live, name)
    assert {key[0] for key in live._open} == {"c", "a"}
    live = Live(tmp_path, most_bytes=0)
    _read(live, "a")
    assert {key[0] for key in live._open} == {"a"}  # the one that is asked about stays


def _read(live: Live, name: str) -> None:
    live.answer(name, "cells", lambda view: bool(view.cells("gradients")))


def test_only_where_files_changed_a_missing_name_is_their_fault(tmp_path: Path) -> None:
    live, path = Live(tmp_path), LOW.write(tmp_path / "run")

    def mistaken(view: LiveView) -> None:
        raise KeyError(f"a mistake in the code that reads {view.run.path.name}")

    def disturbed(view: LiveView) -> None:
        (view.run.path / manifest.file_name(0)).touch()
        mistaken(view)

    with pytest.raises(KeyError, match="a mistake"):
        live.answer("run", "first", mistaken)
    with pytest.raises(RunError, match="files changed. Ask again"):
        live.answer("run", "second", disturbed)
    assert path.is_dir() and live.answer("run", "third", lambda view: view.run.path.name)[1] == "run"


def test_memory_counts_what_what_if_keeps(tmp_path: Path) -> None:
    view = LiveView(Run(LOW.write(tmp_path / "run")))
    cells = view.cells("gradients")
    bare = view.size_bytes
    assert bare >= size_bytes(cells) >= cells.flat.nbytes
    whatif(view, "fp16", 3)
    assert view.size_bytes > bare + 8 * len(cells.flat)


def test_what_is_kept_of_a_collection_goes_with_it(tmp_path: Path) -> None:
    view = LiveView(Run(LOW.write(tmp_path / "run")))
    whatif(view, "fp16", 3)
    kept = weakref.ref(view.cells("gradients"))
    del view
    gc.collect()
    assert kept() is None


def test_two_questions_at_once_to_two_runs_never_wait_for_each_other(tmp_path: Path) -> None:
    import threading

    for name in "ab":
        LOW.write(tmp_path / name)
    live, results = Live(tmp_path), []

    def compare(first: str, second: str) -> None:
        results.extend(live.answer_of_two(first, second, number, _names) for number in range(20))

    threads = [threading.Thread(target=compare, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(set(results)) == [b"a b", b"b a"] and len(results) == 40


def _names(first: Any, second: Any) -> bytes:
    return f"{first.run.path.name} {second.run.path.name}".encode()
