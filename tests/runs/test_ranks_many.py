"""Many series of several ranks: read as often as their rows need, and the same however they are divided."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from plimsoll.runs import Batch, Run, RunWriter
from plimsoll.runs.reading import spectra
from tests.support.runs import making

NAMES, STEPS = 30, 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks: every third series is a replica, every other third plain but different at the last step."""
    folder = tmp_path_factory.mktemp("run")
    writers = [RunWriter(folder, rank=rank, world_size=2) for rank in (0, 1)]
    for step in range(STEPS):
        values = [torch.randn(8, generator=torch.Generator().manual_seed(100 * step + i)) for i in range(NAMES)]
        for rank, writer in enumerate(writers):
            ids = [writer.series("weights", f"w{i}", format="fp32", shared=i % 3 == 0) for i in range(NAMES)]
            own = [x + rank * float(i % 3 == 0 or (i % 3 == 1 and step == 5)) for i, x in enumerate(values)]
            writer.write(Batch(step=step, rows=making.rows_of(own), index=np.arange(NAMES), series=np.array(ids)))
    for writer in writers:
        writer.close()
    return folder


def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each reading of parts, as they happen."""
    found: list[int] = []

    def counted(*arguments: object, **named: object) -> object:
        table = select(*arguments, **named)
        found.append(len(table))
        return table

    select = spectra.select
    monkeypatch.setattr(spectra, "select", counted)
    return found


def by_name(table: pa.Table) -> pa.Table:
    """The rows by name and step: pieces are sorted each by itself."""
    return table.sort_by([("name", "ascending"), ("step", "ascending")])


def test_replicas_are_told_from_parts_in_whatever_pieces_they_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {name: spectrum.count for _, _, name, spectrum in Run(path).spectra(steps=slice(2, 3))}
    assert counts == {f"w{i}": 8 if i % 3 == 2 else 16 for i in range(NAMES)}
    whole, one = by_name(Run(path).table()), by_name(Run(path).table(steps=slice(2, 3)))
    monkeypatch.setattr(spectra, "_READ", 16)
    assert by_name(Run(path).table()).equals(whole)
    assert by_name(Run(path).table(steps=slice(2, 3))).equals(one)


def test_one_step_of_many_series_is_read_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "_READ", 2 * NAMES)  # as many rows as one step has, and a sixth of all
    found, run = readings(monkeypatch), Run(path)
    run.table(steps=slice(2, 3))
    plain = 2 * STEPS * NAMES * 2 // 3
    assert found[0] == 2 * NAMES  # the step itself: one reading
    assert sum(found[1:]) == plain and max(found[1:]) <= 2 * NAMES  # what decides on replicas: all steps, in pieces
    found.clear()
    run.table(steps=slice(3, 4))
    assert found == [2 * NAMES]  # what was decided is remembered
