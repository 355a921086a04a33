"""Rows of one step merged: against `Spectrum`'s own addition."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.runs import EXTRAS, Batch
from plimsoll.runs.columns import row_order
from plimsoll.runs.columns.schema import SCHEMAS, Series, conformed
from plimsoll.runs.columns.spectrum_columns import columns_of, rows_of, spectra_table, summed
from plimsoll.runs.columns.step_table import StepTable, concatenated, from_batch, merged
from tests.support.cases import each
from tests.support.runs import making

ROWS = making.rows_of(making.tensors(12))


def entries(index: list[int], series: list[int], **more: object) -> StepTable:
    return from_batch(
        Batch(step=0, rows=ROWS, index=np.array(index, np.int64), series=np.array(series, np.int64), **more), 100
    )


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), min_size=1, max_size=30))
def test_merged_rows_are_the_sum_of_their_spectra(pairs: list[tuple[int, int]]) -> None:
    found = entries([i for i, _ in pairs], [s for _, s in pairs])
    expected = {s: sum(making.spectrum_of(ROWS[i]) for i, t in pairs if t == s) for _, s in pairs}
    assert found.series.tolist() == sorted(expected)
    for series, row in zip(found.series.tolist(), found.rows, strict=True):
        spectrum = making.spectrum_of(row)
        assert spectrum._counts() == expected[series]._counts()
        assert spectrum._floats() == pytest.approx(expected[series]._floats(), rel=1e-12, nan_ok=True)
        assert np.array_equal(spectrum.binades, expected[series].binades)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), min_size=1, max_size=30))
def test_stored_rows_add_up_as_those_of_a_bank_do(pairs: list[tuple[int, int]]) -> None:
    index, series = np.array(pairs, np.int64).T
    empty = np.full((len(pairs), len(EXTRAS)), np.nan)
    steps = StepTable(series=series, scales=np.ones(len(pairs)), rows=ROWS[index], extras=empty)
    known = [Series(collection="weights", name=f"w{i}", format="fp32", shared=True) for i in range(5)]
    stored = conformed(spectra_table([columns_of(0, steps)], known), SCHEMAS["spectra"])
    found = summed(stored, row_order.starts([row_order.codes(stored["name"])]))
    expected = merged(steps)
    assert found["name"].to_pylist() == [f"w{i}" for i in expected.series]
    rows, sums = rows_of(found), row_layout.SUMS
    expected_sums = expected.rows[:, sums].copy().view(np.float64)
    assert rows[:, sums].copy().view(np.float64) == pytest.approx(expected_sums, rel=1e-12, nan_ok=True)
    rows[:, sums] = expected.rows[:, sums]
    assert np.array_equal(rows, expected.rows)


def test_one_row_may_be_several_entries() -> None:
    found = entries([3, 3, 1], [7, 8, 7])
    assert making.spectrum_of(found.rows[1]) == making.spectrum_of(ROWS[3])
    assert found.rows[0, 0] == ROWS[3, 0] + ROWS[1, 0]


def test_entries_of_different_scales_stay_apart() -> None:
    found = entries([1, 3, 5], [2, 2, 2], scales=np.array([1.0, 4.0, 1.0]))
    assert found.series.tolist() == [2, 2] and found.scales.tolist() == [1.0, 4.0]
    assert found.rows[:, 0].tolist() == [ROWS[1, 0] + ROWS[5, 0], ROWS[3, 0]]


def test_extras_add_up_but_norms_add_as_squares() -> None:
    extras = {name: np.array([3.0, 4.0, math.nan, 0.1]) for name in EXTRAS}
    found = entries([0, 1, 2, 3], [0, 0, 1, 2], extras=extras)
    others = {"weight_norm": 5.0, "largest_error": 4.0}
    assert found.extras[0].tolist() == [others.get(name, 7.0) for name in EXTRAS]
    assert np.isnan(found.extras[1]).all()
    assert (found.extras[2] == 0.1).all()  # alone, not rounded by a square and its root


def test_an_extra_that_one_of_two_entries_lacks_is_the_others() -> None:
    found = entries([0, 1], [0, 0], extras={"pushed": np.array([math.nan, 4.0]), "weight_norm": np.array([0.1, NAN])})
    assert found.extras[0, EXTRAS.index("pushed")] == 4.0
    assert found.extras[0, EXTRAS.index("weight_norm")] == 0.1
    assert np.isnan(found.extras[0, EXTRAS.index("unmoved")])


NAN = math.nan


def test_merging_in_two_goes_is_merging_at_once() -> None:
    together = entries([0, 1, 3, 5], [1, 0, 1, 1])
    apart = merged(concatenated([entries([0, 1], [1, 0]), entries([3, 5], [1, 1])]))
    assert np.array_equal(together.rows, apart.rows) and together.series.tolist() == apart.series.tolist()


def test_no_entries_are_no_rows() -> None:
    assert len(entries([], [])) == 0


@each(
    ("fields", "message"),
    [
        ({"index": np.array([12])}, r"Batch: expected indices below 12 rows; got up to 12\. Build it from one bank"),
        ({"series": np.array([100])}, r"Batch: expected series below 100; got up to 100\."),
        ({"series": np.array([-1])}, r"Batch: expected series below 100"),
        ({"series": np.array([1, 2])}, r"Batch: expected index, series and scales of one length; got 1, 2, 1\."),
        ({"scales": np.array([0.0])}, r"Batch: expected positive finite scales; got 0\.0"),
        ({"scales": np.array([math.inf])}, r"Batch: expected positive finite scales; got inf"),
        ({"rows": ROWS[:, :-1]}, r"Batch: expected rows int64\[n, 289\]; got int64\[12, 288\]"),
        ({"rows": ROWS.view(np.float64)}, r"Batch: expected rows int64\[n, 289\]; got float64"),
        ({"extras": {"pushd": np.array([1.0])}}, r"Batch: expected extras among .*; got 'pushd' of shape \(1,\)"),
        ({"extras": {"pushed": np.array([1.0, 2.0])}}, r"got 'pushed' of shape \(2,\)"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(fields: dict[str, object], message: str) -> None:
    whole = {"step": 0, "rows": ROWS, "index": np.array([0]), "series": np.array([0]), **fields}
    with pytest.raises(ArgumentError, match=message):
        from_batch(Batch(**whole), 100)
