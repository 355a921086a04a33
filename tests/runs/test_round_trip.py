"""What is written comes back: every field of a spectrum, scalars, events, extras, at any step, under any scale."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from plimsoll import row_layout
from plimsoll.runs import Batch, Event, Run, RunWriter, Scalars
from plimsoll.runs.columns.schema import SCHEMAS, Series
from plimsoll.runs.columns.spectrum_columns import columns_of, rows_of, spectra_table
from plimsoll.spectrum import Source
from tests.support.runs import making


def test_every_kind_of_spectrum_comes_back_equal(tmp_path: Path) -> None:
    tensors = making.tensors(20)
    named = {("gradients", f"layer.{i}"): x for i, x in enumerate(tensors)}
    with RunWriter(tmp_path / "run") as writer:
        writer.write(making.batch(writer, 7, named))
    run = Run(tmp_path / "run")
    for (collection, name), row in zip(named, making.rows_of(tensors), strict=True):
        assert run.spectrum(collection, name, 7) == making.spectrum_of(row)
    assert [(s, c, n) for s, c, n, _ in run.spectra()] == [(7, *key) for key in sorted(named)]


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Rows as a bank may hold them: any counts, extremes that agree with them, any sums."""
    count = draw(st.integers(1, 4))
    result = np.zeros((count, row_layout.NARROW), dtype=np.int64)
    floats = result.view(np.float64)
    for row, sums in zip(result, floats, strict=True):
        occupied = draw(st.dictionaries(st.integers(0, 276), st.integers(1, 2**50), max_size=5))
        for index, values in occupied.items():
            row[row_layout.HISTOGRAM + index] = values
        row[row_layout.ZEROS : row_layout.NEG_INFS + 1] = draw(st.lists(st.integers(0, 2**40), min_size=4, max_size=4))
        row[row_layout.COUNT] = row[row_layout.ZEROS : row_layout.NEG_INFS + 1].sum() + sum(occupied.values())
        if occupied:
            top, bottom = (math.ldexp(draw(st.floats(1, 1.99)), i - 149) for i in (max(occupied), min(occupied)))
            sign = draw(st.sampled_from([row_layout.POSITIVE, row_layout.NEGATIVE]))
            sums[sign] = max(top, bottom)
            row[row_layout.NEAREST] = row_layout.ABSMIN_TOP - int(np.float64(min(top, bottom)).view(np.int64))
            sums[row_layout.SUMS] = draw(st.lists(st.floats(-1e300, 1e300), min_size=4, max_size=4))
    return result


@given(rows(), st.integers(-(2**62), 2**62))
def test_any_row_comes_back_bit_for_bit_from_the_columns(given_rows: np.ndarray, step: int) -> None:
    from plimsoll.runs.columns.step_table import from_batch

    index = np.arange(len(given_rows))
    entries = from_batch(Batch(step=step, rows=given_rows, index=index, series=index), len(index))
    series = [Series(collection="c", name=f"{i}", format="fp32", shared=True) for i in index]
    table = spectra_table([columns_of(step, entries)], series).cast(SCHEMAS["spectra"])
    assert np.array_equal(rows_of(table), given_rows)
    assert table["step"].to_pylist() == [step] * len(index)


def test_steps_of_long_runs_and_their_counts_do_not_overflow(tmp_path: Path) -> None:
    steps = [10_000_000, 2**31 + 5, 2**40, 2**62]
    row = making.rows_of([torch.tensor([1.0])])
    row[0, [row_layout.COUNT, row_layout.HISTOGRAM + 149]] = 2**53 + 1
    with RunWriter(tmp_path / "run") as writer:
        series = np.array([writer.series("weights", "w", format="fp32")])
        for step in steps:
            writer.write(Batch(step=step, rows=row.copy(), index=np.array([0]), series=series))
            writer.write(Scalars(step=step, values={"loss": float(step)}))
            writer.write(Event(step=step, kind="tick", message=f"{step}"))
            writer.flush()
    run = Run(tmp_path / "run")
    assert run.steps == steps
    assert run.spectrum("weights", "w", 2**62).count == 2**53 + 1
    assert run.series("weights", "w", "count")[0].tolist() == steps
    assert run.scalars("loss")[0].tolist() == steps and [e.step for e in run.events()] == steps


def test_extras_come_back_where_they_were_given(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        x = torch.tensor([3.0, 0.0, 4.0, 0.0])
        given = {"pushed": 4.0, "unmoved": 1.0, "weight_norm": 50.0, "underflowed": 1.0, "structural": 2.0}
        extras = {name: np.array([value]) for name, value in given.items()}
        writer.write(making.batch(writer, 1, {("updates", "w"): x}, extras=extras))
        writer.write(making.batch(writer, 2, {("updates", "w"): x}))
    run = Run(tmp_path / "run")
    expected = {
        "ratio": 0.1,
        "unmoved": 0.25,
        "pushed": 4.0,
        "weight_norm": 50.0,
        "underflowed": 0.25,
        "structural": 0.5,
    }
    for statistic, value in expected.items():
        steps, values = run.series("updates", "w", statistic)
        assert steps.tolist() == [1] and values.tolist() == [value], statistic
    table = run.table().to_pylist()
    assert [{name: row[name] for name in given} for row in table] == [given, dict.fromkeys(given)]


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-3, 1.0])
def test_a_power_of_two_is_undone_and_named_in_the_source(tmp_path: Path, scale: float) -> None:
    true = torch.tensor([0.5, -2.0, 0.0, 3e-5])
    with RunWriter(tmp_path / "run") as writer:
        writer.write(making.batch(writer, 0, {("gradients", "w"): true * scale}, scales=np.array([scale])))
    run = Run(tmp_path / "run")
    found = run.spectrum("gradients", "w", 0)
    expected = making.spectrum_of(making.rows_of([true])[0])
    assert found._counts() == expected._counts() and found._floats() == expected._floats()
    assert np.array_equal(found.binades, expected.binades)
    assert found.source == Source("fp32", scale)
    raw = run.spectrum("gradients", "w", 0, raw=True)
    assert raw == making.spectrum_of(making.rows_of([true * scale])[0])
    for statistic in ("min", "absmax", "sum", "norm", "std", "rms", "absmin"):
        assert run.series("gradients", "w", statistic)[1].tolist() == [getattr(expected, statistic)]
        assert run.series("gradients", "w", statistic, raw=True)[1].tolist() == [getattr(raw, statistic)]
    assert run.series("gradients", "w", "scale")[1].tolist() == [scale]


def test_another_scale_cannot_be_undone_in_a_spectrum_and_can_in_a_statistic(tmp_path: Path) -> None:
    stored = torch.tensor([3.0, -6.0])
    with RunWriter(tmp_path / "run") as writer:
        writer.write(making.batch(writer, 0, {("gradients", "w"): stored}, scales=np.array([3.0])))
    run = Run(tmp_path / "run")
    found = run.spectrum("gradients", "w", 0)
    assert found.source is None and found.absmax == 6.0
    assert run.series("gradients", "w", "absmax")[1].tolist() == [2.0]
    assert run.series("gradients", "w", "sumsq")[1].tolist() == [5.0]


def test_a_series_in_one_step_under_two_scales_is_one_spectrum_of_true_values(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        series = np.array([writer.series("gradients", "w", format="fp16")] * 2)
        rows = making.rows_of([torch.tensor([1.0]), torch.tensor([8.0])])
        scales = np.array([1.0, 4.0])
        writer.write(Batch(step=0, rows=rows, index=np.array([0, 1]), series=series, scales=scales))
    run = Run(tmp_path / "run")
    found = run.spectrum("gradients", "w", 0)
    assert (found.count, found.sum, found.max) == (2, 3.0, 2.0)
    assert run.series("gradients", "w", "sum")[1].tolist() == [3.0]
    assert len(run.table()) == 2


STATISTICS = (
    "count", "zeros", "nans", "pos_infs", "neg_infs", "min", "max", "absmin", "absmax", "sum", "abssum", "sumsq",
    "sumfourth", "kurtosis", "finite", "nonzero", "nonfinite", "zero_fraction", "mean", "absmean", "rms", "norm", "std",
)  # fmt: skip


@pytest.mark.parametrize("statistic", STATISTICS)
def test_every_statistic_is_the_spectrums_own(tmp_path: Path, statistic: str) -> None:
    tensors = making.tensors(20)
    with RunWriter(tmp_path / "run") as writer:
        for step, x in enumerate(tensors):
            writer.write(making.batch(writer, step, {("weights", "w"): x}))
    run = Run(tmp_path / "run")
    steps, values = run.series("weights", "w", statistic)
    expected = np.array([float(getattr(making.spectrum_of(row), statistic)) for row in making.rows_of(tensors)])
    known = ~np.isnan(expected) if statistic in ("kurtosis", "sumfourth") else np.ones(20, dtype=bool)
    assert steps.tolist() == np.flatnonzero(known).tolist() and values.dtype == np.float64
    assert values.tolist() == pytest.approx(expected[known], rel=1e-15, abs=0, nan_ok=True)


def test_formats_are_kept_and_told_by_the_source(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        ids = [writer.series("weights", fmt, format=fmt) for fmt in ("fp16", "bf16", "float32")]
        rows = making.rows_of([torch.tensor([1.0])])
        writer.write(Batch(step=0, rows=rows, index=np.zeros(3, np.int64), series=np.array(ids)))
    run = Run(tmp_path / "run")
    assert [run.spectrum("weights", n, 0).source for n in run.tensors["weights"]] == [
        Source("fp16"), Source("bf16"), Source("fp32")
    ]  # fmt: skip


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["loss", "lr", "α β"]), st.floats()),
        max_size=12,
    )
)
def test_the_later_of_two_scalars_of_one_step_counts(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[int, str, float]]
) -> None:
    path = tmp_path_factory.mktemp("run")
    with RunWriter(path) as writer:
        for i, (step, name, value) in enumerate(given):
            writer.write(Scalars(step=step, values={name: value}))
            if i % 3 == 2:
                writer.flush()
    run = Run(path)
    expected = {(name, step): value for step, name, value in given}
    assert set(run.scalar_names) == {name for name, _ in expected}
    for name in run.scalar_names:
        steps, values = run.scalars(name)
        assert dict(zip(steps.tolist(), map(repr, values.tolist()), strict=True)) == {
            step: repr(value) for (n, step), value in expected.items() if n == name
        }


def test_events_keep_every_field(tmp_path: Path) -> None:
    details = {
        "scale": 65536.0,
        "ranks": [0, 1],
        "nested": {"ok": True, "none": None},
        "nan": math.nan,
        "path": Path("a"),
    }
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Event(step=3, kind="skipped", message="a step\nwas skipped", details=details, time=12.5))
        writer.write(Event(step=1, kind="scale", message=""))
    first, second = Run(tmp_path / "run").events()
    assert (first.step, first.kind, first.rank, first.details) == (1, "scale", 0, {})
    assert first.time > 1.7e9
    assert second == Event(
        step=3, kind="skipped", message="a step\nwas skipped", details={**details, "nan": "nan", "path": "a"}, time=12.5
    )


def test_a_steps_batches_are_merged_before_they_are_stored(tmp_path: Path) -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([4.0]), torch.tensor([-8.0])]
    with RunWriter(tmp_path / "run") as writer:
        for i, x in enumerate(parts):
            writer.write(making.batch(writer, 5, {("activations", "a"): x}, last=i == 2))
            assert writer.flush()
            assert Run(tmp_path / "run").steps == ([5] if i == 2 else [])
    found = Run(tmp_path / "run").spectrum("activations", "a", 5)
    assert (found.count, found.sum, found.absmax, found.min) == (4, -1.0, 8.0, -8.0)


def test_a_step_whose_last_batch_never_came_is_kept_on_close(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(making.batch(writer, 5, {("activations", "a"): torch.ones(3)}, last=False))
    assert Run(tmp_path / "run").spectrum("activations", "a", 5).count == 3


def test_many_open_steps_do_not_pile_up(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(20):
            writer.write(making.batch(writer, step, {("activations", "a"): torch.ones(3)}, last=False))
        writer.flush()
        assert Run(tmp_path / "run").steps == list(range(12))
