"""Block records in runs: written, merged, compacted, thinned, and read beside parts that have none."""

import copy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from plimsoll import measure, row_layout
from plimsoll.errors import ArgumentError
from plimsoll.kernels import measure_into, new_bank
from plimsoll.runs import Batch, Run, RunWriter, StepRecord
from plimsoll.runs.columns.schema import BLOCK_COLUMNS, Series
from plimsoll.runs.columns.spectrum_columns import blocks_of, columns_of, rows_of, spectra_table
from plimsoll.runs.columns.step_table import from_batch
from tests.support.runs import making
from tests.support.spectra import same_tables

INF, NAN = float("inf"), float("nan")


def tensors(seed: int = 0) -> list[Tensor]:
    """What blocks can be: ragged, of zeros, with NaN or Inf, far apart, a scalar, and none."""
    torch.manual_seed(seed)
    return [
        torch.randn(6, 40) * torch.exp2(torch.randint(-20, 20, (6, 40)).float()),
        torch.zeros(3, 32),
        torch.tensor([[1.0, NAN, 2.0, 0.0] * 20, [2.0**-100, -(2.0**100), 0.0, 1.0] * 20]),
        torch.tensor([INF, -INF, NAN]),
        torch.tensor(-3.0),
        torch.empty(0),
    ]


def wide_rows(measured: list[Tensor], block: int) -> np.ndarray:
    bank = new_bank(len(measured), block)
    measure_into(measured, bank, list(range(len(measured))), accumulate=False, block=block)
    return bank.numpy()


def batch(writer: RunWriter, step: int, measured: list[Tensor], block: int = 0, **fields: object) -> Batch:
    ids = np.array([writer.series("weights", f"w{i}", format="fp32") for i in range(len(measured))])
    rows = wide_rows(measured, block) if block else making.rows_of(measured)
    blocks = np.full(len(ids), block) if block else None
    return Batch(step=step, rows=rows, index=np.arange(len(ids)), series=ids, blocks=blocks, **fields)


def expected(x: Tensor, block: int | None) -> object:
    return measure(x, block=block).blocks


@pytest.mark.parametrize("block", [16, 32, 8])
def test_what_is_written_is_read_again(tmp_path: Path, block: int) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(batch(writer, step, tensors(step), block))
    run = Run(tmp_path)
    assert run.block_lengths == (block,)
    for step in range(3):
        for i, x in enumerate(tensors(step)):
            found = run.spectrum("weights", f"w{i}", step)
            assert found.blocks == expected(x, block), i
            assert (found.blocks is None) == (x.numel() == 0)
    assert [s.blocks for _, _, _, s in run.spectra(name="w0")] == [
        expected(tensors(step)[0], block) for step in range(3)
    ]


def test_rows_come_back_as_they_were() -> None:
    given = wide_rows(tensors(), 32)
    index = np.arange(len(given))
    entries = from_batch(Batch(step=1, rows=given, index=index, series=index, blocks=np.full(len(index), 32)), 100)
    series = [Series(collection="weights", name=f"{i:02}", format="fp32", shared=True) for i in index]
    table = spectra_table([columns_of(1, entries)], series)
    lengths = blocks_of(table)
    assert lengths is not None and lengths.tolist() == [32] * len(given)
    assert np.array_equal(rows_of(table), given)


def test_a_run_without_records_has_no_columns_of_them(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write(batch(writer, 0, tensors()))
    for part in (tmp_path / "spectra").glob("*.parquet"):
        assert not set(BLOCK_COLUMNS) & set(pq.read_schema(part).names)
    run = Run(tmp_path)
    assert run.block_lengths == () and not set(BLOCK_COLUMNS) & set(run.table().column_names)
    assert run.spectrum("weights", "w0", 0).blocks is None


def test_columns_are_those_of_the_format(tmp_path: Path) -> None:
    x = torch.tensor([[8.0, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0], [NAN, 1.0, 2.0, 0.0]])
    with RunWriter(tmp_path) as writer:
        writer.write(batch(writer, 0, [x], 4))
    row = Run(tmp_path).table().to_pylist()[0]
    assert {name: row[name] for name in BLOCK_COLUMNS} == {
        "block": 4, "blocks": 3, "zero_blocks": 1, "nonfinite_blocks": 1, "poisoned": 2, "depths": [1, 0, 0, 1, 1],
        "lowest_maximum": 3, "maxima": [1],
    }  # fmt: skip
    assert not set(BLOCK_COLUMNS) & set(Run(tmp_path).table(blocks=False).column_names)


@pytest.mark.parametrize("order", [(0, 32), (32, 0), (16, 32)])
def test_sessions_with_and_without_records_stand_side_by_side(tmp_path: Path, order: tuple[int, int]) -> None:
    for session, block in enumerate(order):
        with RunWriter(tmp_path, compact_above=2) as writer:
            for step in range(3 * session, 3 * session + 3):
                writer.write(batch(writer, step, tensors(step), block))
                writer.flush()
    run = Run(tmp_path)
    assert run.block_lengths == tuple(sorted(block for block in order if block))
    for step in range(6):
        block = order[step // 3]
        for i, x in enumerate(tensors(step)):
            assert run.spectrum("weights", f"w{i}", step).blocks == (expected(x, block) if block else None)
    named = run.table(name="w0")["block"].to_pylist()
    assert named == [block or None for block in order for _ in range(3)]


def test_records_of_one_step_are_added_and_spoilt_by_values_without(tmp_path: Path) -> None:
    first, second = tensors(1), tensors(2)
    with RunWriter(tmp_path) as writer:
        writer.write(batch(writer, 0, first, 32, last=False))
        writer.write(batch(writer, 0, second, 32))
        writer.write(batch(writer, 1, first, 32, last=False))
        writer.write(batch(writer, 1, second))
        writer.write(batch(writer, 2, first, 32, last=False))
        writer.write(batch(writer, 2, second, 16))
    run = Run(tmp_path)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert run.spectrum("weights", f"w{i}", 0).blocks == (measure(a, block=32) + measure(b, block=32)).blocks
        for step in (1, 2):
            found = run.spectrum("weights", f"w{i}", step)
            assert found.blocks is None and found.count == 2 * a.numel()


def test_the_scale_moves_maxima_back(tmp_path: Path) -> None:
    x = torch.randn(8, 64) * 2.0**-10
    with RunWriter(tmp_path) as writer:
        scales = np.array([2.0**16])
        writer.write(batch(writer, 0, [x * 2.0**16], 32, scales=scales))
        writer.write(batch(writer, 1, [x * 2.0**16], 32, scales=scales, last=False))
        writer.write(batch(writer, 1, [x], 32))
    run = Run(tmp_path)
    assert run.spectrum("weights", "w0", 0).blocks == expected(x, 32)
    assert run.spectrum("weights", "w0", 0, raw=True).blocks == expected(x * 2.0**16, 32)
    assert run.spectrum("weights", "w0", 1).blocks == (measure(x, block=32) + measure(x, block=32)).blocks


def test_ranks_are_added_and_replicas_counted_once(tmp_path: Path) -> None:
    parts = [tensors(rank)[0] for rank in range(3)]
    for rank, part in enumerate(parts):
        with RunWriter(tmp_path, rank=rank, world_size=3) as writer:
            ids = [writer.series("weights", name, format="fp32", shared=name == "parts") for name in ("parts", "same")]
            rows = wide_rows([part, parts[0]], 32)
            blocks = np.array([32, 32])
            writer.write(Batch(step=0, rows=rows, index=np.arange(2), series=np.array(ids), blocks=blocks))
    run = Run(tmp_path)
    assert run.spectrum("weights", "parts", 0).blocks == sum(measure(part, block=32) for part in parts).blocks
    assert run.spectrum("weights", "same", 0).blocks == expected(parts[0], 32)
    row = run.table(name="parts").to_pylist()[0]
    assert row["block"] == 32 and row["blocks"] == 3 * 12


def test_thinning_and_compaction_keep_the_records_of_what_stays(tmp_path: Path) -> None:
    with RunWriter(tmp_path, thin=[(10, 5)], compact_above=4) as writer:
        for step in range(40):
            writer.write(batch(writer, step, tensors(step)[:2], 32 if step % 2 else 0))
            writer.flush()
    run = Run(tmp_path)
    assert len(run.steps) < 40
    for step in run.steps:
        found = run.spectrum("weights", "w0", step)
        assert found.blocks == (expected(tensors(step)[0], 32) if step % 2 else None)


def test_an_older_reader_finds_the_columns_it_knows(tmp_path: Path) -> None:
    """Those of schema 1 as it was: asked for by name, as every reader of it does."""
    with RunWriter(tmp_path / "plain") as writer:
        writer.write(batch(writer, 0, tensors()))
    with RunWriter(tmp_path / "blocks") as writer:
        writer.write(batch(writer, 0, tensors(), 32))
    names = pq.read_schema(next((tmp_path / "plain" / "spectra").glob("*.parquet"))).names
    old, new = (pq.read_table(tmp_path / run / "spectra", columns=names) for run in ("plain", "blocks"))
    assert old.to_pydict().keys() == new.to_pydict().keys()
    extremes = ["min", "max", "absmin", "absmax"]  # some are NaN
    assert same_tables(old.drop_columns(extremes), new.drop_columns(extremes))


def test_sinks_are_given_the_records(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.records: list[StepRecord] = []

        def open(self, run_path: Path, settings: object) -> None: ...
        def put(self, record: StepRecord) -> None:
            self.records.append(record)

        def flush(self) -> None: ...
        def close(self) -> None: ...

    sink = Sink()
    with RunWriter(tmp_path, sinks=[sink]) as writer:
        writer.write(batch(writer, 0, tensors(), 32))
    found = sink.records[0].spectra()
    assert found["weights", "w2"].blocks == expected(tensors()[2], 32)


def test_batches_that_contradict_themselves_are_refused() -> None:
    rows, index = wide_rows(tensors(), 32), np.arange(6)
    whole = {"step": 0, "rows": rows, "index": index, "series": index, "blocks": np.full(6, 32)}
    from_batch(Batch(**whole), 100)
    unmeasured = copy.deepcopy(rows)
    unmeasured[:, row_layout.NARROW :] = 0
    for fields, message in (
        ({"blocks": None}, r"expected rows int64\[n, 289\]; got int64\[6, 848\]"),
        ({"rows": making.rows_of(tensors())}, r"expected rows int64\[n, 848\]; got int64\[6, 289\]"),
        ({"blocks": np.full(5, 32)}, r"expected one block length per entry, 0 for none; got int64\[5\]"),
        ({"blocks": np.full(6, -1)}, "expected one block length per entry"),
        ({"rows": unmeasured}, "expected rows that were measured in blocks; got one that was not, with 32"),
    ):
        with pytest.raises(ArgumentError, match=message):
            from_batch(Batch(**{**whole, **fields}), 100)
