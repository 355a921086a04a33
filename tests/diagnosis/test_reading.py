"""Reading of a run for all rules: one pass over its parts, with the tables that each collection alone would give."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run, RunWriter
from plimsoll.runs.reading import row_selection
from plimsoll.runs.reading.row_selection import Steps, by_collection
from tests.support.runs import making

COLLECTIONS = ("weights", "gradients", "updates")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Three collections in three parts; one layer appears later, and the last part replaces a step."""
    with RunWriter(tmp_path, flush_seconds=600, compact_above=1 << 30) as writer:
        for steps in ((0, 1), (2, 3, 4), (4, 5)):
            names = ("b", "a", "c") if steps[0] else ("b", "a")
            for step in steps:
                tensors = making.tensors(len(COLLECTIONS) * len(names), seed=step)
                keys = [(collection, name) for collection in COLLECTIONS for name in names]
                writer.write(making.batch(writer, step, dict(zip(keys, tensors, strict=True))))
            writer.flush()
        yield Run(tmp_path)  # before the writer joins the parts


def test_all_rules_read_each_part_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read, whole = [], row_selection._load
    monkeypatch.setattr(row_selection, "_load", lambda path, part, *a: (read.append(part), whole(path, part, *a))[1])
    diagnose(run)
    times = Counter(part for part in read if part.kind == "spectra")
    assert len(times) == len(run._folder.of("spectra")) > 1 and set(times.values()) == {1}


def test_one_rule_reads_only_what_it_needs(run: Run) -> None:
    view = View(run)
    diagnose(view, rules=["updates-swallowed"])
    assert "weights" not in view._cells


@pytest.mark.parametrize("until", [None, 3])
def test_one_pass_gives_what_each_collection_alone_gives(run: Run, until: int | None) -> None:
    together = View(run, until)
    together.reads_all = True
    for collection in COLLECTIONS:
        cells, alone = together.cells(collection), View(run, until).cells(collection)
        assert cells is not None and alone is not None
        assert (cells.names, cells.formats) == (alone.names, alone.formats)
        for field in ("steps", "layer", "at", "format", "scale", "lowest", "start", "flat", "nonzero"):
            assert np.array_equal(getattr(cells, field), getattr(alone, field)), field
        for name, column in cells.columns.items():
            assert np.array_equal(column, alone.columns[name], equal_nan=column.dtype.kind == "f"), name


def test_lists_are_those_of_each_row(run: Run) -> None:
    for collection in COLLECTIONS:
        table = run.table(collection)
        for row in table.select(["step", "name", "lowest", "binades"]).to_pylist():
            spectrum = run.spectrum(collection, row["name"], row["step"])
            assert sum(row["binades"]) == spectrum.nonzero


@pytest.mark.parametrize("high", [4, None], ids=["in order", "with a step that was replaced"])
def test_rows_that_stay_where_they_are_stored_are_the_same(run: Run, high: int | None) -> None:
    def rows(*, moved: bool) -> Iterator[list[dict[str, Any]]]:
        for _, table in by_collection(run._folder, COLLECTIONS, Steps(high=high), blocks=False, moved=moved):
            yield table.to_pylist()

    for ordered, stored in zip(rows(moved=True), rows(moved=False), strict=True):
        assert (ordered == stored) is (high is None)  # several parts have each series: in order, rows did not move
        assert sorted(stored, key=lambda row: (row["name"], row["step"])) == ordered
