"""Errors of shadow steps in runs: written, merged, compacted, and read beside parts that have none."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.runs import Batch, Run, RunWriter
from plimsoll.runs.records import ERRORS
from plimsoll.spectrum import ErrorSums
from tests.support.runs import making

NAMES = ("a", "b")


def pair(name: str, step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + NAMES.index(name))
    reference = torch.randn(40, generator=generator)
    values = reference.bfloat16().float()
    values[0] = torch.nan
    return values, reference


def sums(values: Tensor, reference: Tensor) -> ErrorSums:
    row = torch.zeros(row_layout.ERRORS, dtype=torch.float64)
    kernels.compare_into(values, reference, row)
    return ErrorSums.from_row(row.numpy())


def write(writer: RunWriter, step: int, *, rank: int = 0, errors: bool = True, scale: float = 1.0) -> None:
    """A row for each name; with errors for all of them."""
    pairs = {name: pair(name, step, rank) for name in NAMES}
    extras = {}
    if errors:
        found = [sums(values * scale, reference * scale).to_dict() for values, reference in pairs.values()]
        extras = {key: np.array([one[key] for one in found]) for key in ERRORS}
    ids = np.array([writer.series("gradients", name, format="fp32") for name in NAMES])
    rows = making.rows_of([values * scale for values, _ in pairs.values()])
    scales = None if scale == 1.0 else np.full(len(NAMES), scale)
    writer.write(Batch(step=step, rows=rows, index=np.arange(len(NAMES)), series=ids, extras=extras, scales=scales))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(3):
            write(writer, step)
    run = Run(tmp_path)
    for name in NAMES:
        found = list(run.errors("gradients", name))
        assert [(step, n) for step, _, n, _ in found] == [(step, name) for step in range(3)]
        assert [errors for *_, errors in found] == [sums(*pair(name, step)) for step in range(3)]
        for statistic in ("relative_error", "snr_db", "cosine", "along_reference", "constant", "largest_error"):
            steps, values = run.series("gradients", name, statistic)
            assert steps.tolist() == [0, 1, 2]
            assert values.tolist() == [getattr(errors, statistic) for *_, errors in found]
        assert run.series("gradients", name, "made_nonfinite")[1].tolist() == [1, 1, 1]
    assert [name for _, _, name, _ in run.errors(steps=slice(1, 2))] == list(NAMES)


def test_a_run_without_errors_has_no_columns_of_them(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        write(writer, 0, errors=False)
    for part in (tmp_path / "spectra").glob("*.parquet"):
        assert not set(ERRORS) & set(pq.read_schema(part).names)
    run = Run(tmp_path)
    assert list(run.errors()) == [] and not set(ERRORS) & set(run.table().column_names)
    assert run.series("gradients", "a", "relative_error")[0].tolist() == []


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_parts_with_and_without_errors_stand_side_by_side(tmp_path: Path, order: tuple[bool, bool]) -> None:
    for session, errors in enumerate(order):
        with RunWriter(tmp_path, compact_above=2) as writer:
            for step in range(3 * session, 3 * session + 3):
                write(writer, step, errors=errors)
                writer.flush()
    run = Run(tmp_path)
    wanted = [step for step in range(6) if order[step // 3]]
    assert [step for step, *_ in run.errors(name="a")] == wanted
    assert [errors for *_, errors in run.errors(name="a")] == [sums(*pair("a", step)) for step in wanted]
    assert run.table(name="a")["compared"].to_pylist() == [39.0 if order[step // 3] else None for step in range(6)]


def test_a_loss_scale_is_undone(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        write(writer, 0, scale=1024.0)
    ((*_, found),) = Run(tmp_path).errors(name="a")
    for name, value in sums(*pair("a", 0)).to_dict().items():
        assert found.to_dict()[name] == pytest.approx(value, rel=1e-12), name


def test_ranks_add_up(tmp_path: Path) -> None:
    for rank in (0, 1):
        with RunWriter(tmp_path, rank=rank, world_size=2) as writer:
            write(writer, 0, rank=rank)
    expected = sums(*pair("a", 0, 0)) + sums(*pair("a", 0, 1))
    run = Run(tmp_path)
    ((*_, found),) = run.errors(name="a")
    for name, value in expected.to_dict().items():
        assert found.to_dict()[name] == pytest.approx(value, rel=1e-14), name
    row = run.table(name="a").to_pylist()[0]
    assert {name: row[name] for name in ERRORS} == pytest.approx(expected.to_dict(), rel=1e-14)
