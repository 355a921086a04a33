"""`Run.to_pandas`: scalars as columns, and the statistics of tensors as rows."""

import sys
from pathlib import Path

import numpy as np
import pytest

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.runs import making

pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(making.written(tmp_path_factory.mktemp("frames") / "run", [0, 10, 20]))


def test_scalars_are_columns_over_steps(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(6):
            sometimes = {"val/acc": step / 10} if step % 2 else {}
            writer.write(Scalars(step=step, values={"loss": 1.0 / (1 + step), **sometimes}))
    frame = Run(tmp_path / "run").to_pandas()
    assert frame.index.name == "step" and frame.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert set(frame.columns) == {"loss", "val/acc"}
    assert frame["loss"].tolist() == [1.0 / (1 + step) for step in range(6)]
    assert frame["val/acc"].isna().tolist() == [True, False] * 3
    assert frame["val/acc"].dropna().tolist() == [0.1, 0.3, 0.5]
    part = Run(tmp_path / "run").to_pandas(steps=slice(1, 6, 2))
    assert part.index.tolist() == [1, 3, 5]


def test_a_run_without_scalars_or_tensors_is_an_empty_frame(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run"):
        pass
    run = Run(tmp_path / "run")
    assert len(run.to_pandas()) == len(run.to_pandas("*")) == 0
    assert {"step", "collection", "name", "norm"} <= set(run.to_pandas("*").columns)


def test_a_row_has_the_statistics_of_one_tensor_at_one_step(run: Run) -> None:
    frame = run.to_pandas("*")
    series = {(collection, name) for collection, names in run.tensors.items() for name in names}
    assert set(zip(frame["collection"], frame["name"], strict=True)) == series
    for collection, name in sorted(series):
        rows = frame[(frame["collection"] == collection) & (frame["name"] == name)]
        for statistic in ("count", "zeros", "norm", "absmax", "min", "zero_fraction", "std", "scale"):
            steps, values = run.series(collection, name, statistic)
            assert rows["step"].tolist() == steps.tolist()
            np.testing.assert_array_equal(rows[statistic].to_numpy(), values)


def test_collections_names_and_steps_are_chosen(run: Run) -> None:
    collection = next(iter(run.tensors))
    name = run.tensors[collection][-1]
    assert set(run.to_pandas(collection)["collection"]) == {collection}
    one = run.to_pandas(collection, name, slice(10, 30))
    assert set(one["name"]) == {name} and one["step"].tolist() == [10, 20]
    assert set(run.to_pandas(name=name)["name"]) == {name}


def test_ranks_are_merged(tmp_path: Path) -> None:
    for rank in range(2):
        with RunWriter(tmp_path / "run", rank=rank, world_size=2) as writer:
            writer.write(Scalars(step=0, values={"loss": float(rank)}))
    assert Run(tmp_path / "run").to_pandas()["loss"].tolist() == [0.5]


def test_without_pandas_the_error_has_the_install_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="Run.to_pandas: expected the package pandas; got none") as error:
        run.to_pandas()
    assert install_line("pandas") in str(error.value)
