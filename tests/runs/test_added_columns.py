"""Runs of versions that did not record fourth powers: all else is read as ever, and they are not recorded."""

import dataclasses
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from plimsoll.diagnosis import diagnose
from plimsoll.runs import Run, RunWriter
from plimsoll.runs.columns.schema import ADDED
from tests.support.runs import making


def aged(path: Path, parts: str = "*") -> None:
    """Rewrites parts as an older version wrote them."""
    for part in (path / "spectra").glob(f"{parts}.parquet"):
        table = pq.read_table(part).drop_columns([*ADDED])
        pq.write_table(table.replace_schema_metadata({"plimsoll.schema": "1"}), part)


def write(path: Path, steps: range, rank: int = 0, world_size: int = 1) -> None:
    tensors = making.tensors(6)
    with RunWriter(path, rank=rank, world_size=world_size) as writer:
        for step in steps:
            named = {("gradients", f"layer.{i}"): x for i, x in enumerate(tensors)}
            writer.write(making.batch(writer, step, named))


def test_an_older_run_is_read_without_them(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    right = list(Run(tmp_path).spectra())
    aged(tmp_path)
    run = Run(tmp_path)
    assert run.problems == []
    for (*key, spectrum), (*right_key, expected) in zip(run.spectra(), right, strict=True):
        assert math.isnan(spectrum.sumfourth) and math.isnan(spectrum.kurtosis)
        assert dataclasses.replace(spectrum, sumfourth=expected.sumfourth) == expected and key == right_key
    assert run.series("gradients", "layer.1", "kurtosis")[0].tolist() == []
    assert run.series("gradients", "layer.1", "std")[0].tolist() == [0, 1, 2]
    assert run.table()["sumfourth"].null_count == len(run.table())
    diagnose(run)


@pytest.mark.parametrize("close", [False, True], ids=["as written", "compacted"])
def test_a_run_that_went_on_has_them_from_there_on(tmp_path: Path, close: bool) -> None:
    write(tmp_path, range(3))
    aged(tmp_path)
    with RunWriter(tmp_path) as writer:
        making.write_steps(writer, [3, 4], 2.0, "layer.1")
        writer.flush()
        if not close:
            assert Run(tmp_path).series("weights", "layer.1", "sumfourth")[1].tolist() == [16.0, 16.0]
    run = Run(tmp_path)
    assert run.steps == [0, 1, 2, 3, 4] and run.problems == []
    assert run.series("weights", "layer.1", "kurtosis")[1].tolist() == [1.0, 1.0]
    assert math.isnan(run.spectrum("gradients", "layer.1", 0).sumfourth)
    assert len(list((tmp_path / "spectra").glob("*.parquet"))) == 1


def test_a_sum_with_a_rank_that_lacks_them_lacks_them(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, range(3), rank, 2)
    whole = Run(tmp_path)
    one = making.spectrum_of(making.rows_of([making.tensors(6)[1]])[0])
    assert whole.spectrum("gradients", "layer.1", 0).sumfourth == 2 * one.sumfourth
    aged(tmp_path, "r00001*")
    run = Run(tmp_path)
    assert math.isnan(run.spectrum("gradients", "layer.1", 0).sumfourth)
    assert run.spectrum("gradients", "layer.1", 0).sumsq == 2 * one.sumsq
    assert run.series("gradients", "layer.1", "kurtosis")[1].tolist() == []
