"""Many steps in few columns and many layers in few rows: nothing is left out."""

import numpy as np
from hypothesis import given, strategies as st

from plimsoll.report.drawing.aggregation import MOST_CELLS, MOST_COLUMNS, MOST_ROWS, Columns, Rows, few
from tests.support.cases import each

REFERENCE = {"max": np.nanmax, "min": np.nanmin, "sum": np.nansum, "mean": np.nanmean}


@given(samples=st.integers(1, 300), most=st.integers(1, 50), seed=st.integers(0, 9))
def test_columns_hold_every_sample_once(samples: int, most: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=(3, samples))
    values[:, random.random(samples) < 0.2] = np.nan
    steps = np.cumsum(random.integers(1, 5, samples))
    columns = Columns.of(steps, most)
    assert len(columns.starts) <= most and len(columns.at) == len(columns.starts)
    assert set(columns.at.tolist()) <= set(steps.tolist())
    pieces = [values[:, columns.place == i] for i in range(len(columns.starts))]
    for how, reference in REFERENCE.items():
        merged = columns.merged(values, how)
        for i, piece in enumerate(pieces):
            known = piece[:, ~np.isnan(piece).any(axis=0)]
            wanted = reference(known, axis=1) if known.size else np.full(3, np.nan)
            assert np.allclose(merged[:, i], wanted, equal_nan=True), how


@given(count=st.integers(1, 400), most=st.integers(1, 60), width=st.integers(1, 9))
def test_rows_hold_every_layer_once(count: int, most: int, width: int) -> None:
    names = [f"model.blocks.{i // width}.part{i % width}.weight" for i in range(count)]
    rows = Rows.of(names, most)
    assert len(rows.names) <= most and len(set(rows.names)) == len(rows.names)
    assert sorted(rows.order.tolist()) == list(range(count))
    values = np.arange(count, dtype=np.float64)[:, None]
    for how, reference in REFERENCE.items():
        merged = rows.merged(values, how)[:, 0]
        wanted = [reference(values[rows.place == i]) for i in range(len(rows.names))]
        assert np.allclose(merged, wanted), how


def test_rows_bear_the_longest_prefix_that_fits() -> None:
    names = [f"blocks.{i}.{part}.weight" for i in range(8) for part in ("attn", "mlp")]
    assert Rows.of(names, 16).names == tuple(names)
    assert Rows.of(names, 8).names == tuple(f"blocks.{i}" for i in range(8))
    assert Rows.of(names, 4).names == ("blocks.{0-1}", "blocks.{2-3}", "blocks.{4-5}", "blocks.{6-7}")
    assert "16 layers in 8 rows, the highest of each" in Rows.of(names, 8).said("max")
    assert Rows.of(names, 16).said("max") == ""


def test_names_without_structure_are_merged_with_their_neighbours() -> None:
    rows = Rows.of([f"layer{i}" for i in range(100)], 10)
    assert len(rows.names) == 10 and rows.names[0] == "layer{0-9}"


@each("shape", [(1, 1), (5, 100_000), (2000, 10_000), (2000, 3), (150, 150)])
def test_cells_are_few_whatever_the_run(shape: tuple[int, int]) -> None:
    names = [f"blocks.{i // 12}.part{i % 12}.weight" for i in range(shape[0])]
    rows, columns = few(names, np.arange(shape[1]))
    assert len(rows.names) * len(columns.at) <= MOST_CELLS
    assert len(rows.names) <= MOST_ROWS and len(columns.at) <= MOST_COLUMNS
    assert len(columns.at) >= min(shape[1], 100)
