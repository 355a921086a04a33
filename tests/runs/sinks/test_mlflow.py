"""What MLflow's own client reads back is what the spectra hold. (Importing MLflow takes seconds: few tests use it.)"""

import math
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from plimsoll.runs.records import Event, StepRecord
from plimsoll.runs.sinks import MLflow
from plimsoll.runs.sinks.clients import metric_name
from tests.support.runs.sinks import TAG, record, spectrum


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # MLflow 3 asks for a database unless set otherwise; this store needs nothing but MLflow.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    pytest.importorskip("mlflow.tracking", reason="the extra mlflow is not installed")
    return (tmp_path / "mlruns").as_uri()


def random_states() -> tuple[object, ...]:
    legacy = np.random.get_state()  # noqa: NPY002  (the generator that users' code draws from)
    return random.getstate(), legacy[1].tolist(), torch.get_rng_state().tolist()


def history(sink: MLflow, uri: str, name: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    found = MlflowClient(tracking_uri=uri).get_metric_history(sink.run_id, name)
    return [(metric.step, metric.value) for metric in found]


def test_a_run_of_its_own_is_read_back_and_draws_no_random_numbers(uri: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    # Making an experiment draws from Python's generator in one case of ten; starting a run must never.
    client.create_experiment("mine")
    before = random_states()
    sink = MLflow("mine", tracking_uri=uri, statistics=("norm", "mean"))
    sink.open(tmp_path / "exp1", {})
    sink.put(record(10, 3.0, -4.0, **{"loss (train)": 0.5, "grad": math.inf}))
    sink.put(record(20, math.nan, events=(Event(step=19, kind="skip", message="a"),) * 2))
    sink.flush()
    sink.close()
    assert random_states() == before
    assert history(sink, uri, f"{TAG}/norm") == [(10, 5.0), (20, 0.0)]
    (_, mean), (_, of_nan) = history(sink, uri, f"{TAG}/mean")
    assert mean == -0.5 and math.isnan(of_nan)
    assert history(sink, uri, metric_name("loss (train)")) == [(10, 0.5)]
    assert history(sink, uri, "events/skip") == [(19, 2.0)]
    run = client.get_run(sink.run_id)
    assert "grad" not in run.data.metrics
    assert (run.info.run_name, run.info.status) == ("exp1", "FINISHED")


def test_an_existing_run_gets_more_metrics_than_a_batch_holds(uri: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    run_id = client.create_run(client.create_experiment("mine"), run_name="theirs").info.run_id
    sink = MLflow(run_id=run_id, tracking_uri=uri, statistics=("norm",))
    sink.open(tmp_path, {})
    spectra = {("optimizer", f"p{i}:exp_avg"): spectrum(float(i)) for i in range(1001)}
    with patch.object(sink._client, "log_batch", wraps=sink._client.log_batch) as log_batch:
        sink.put(StepRecord(step=5, spectra=lambda: spectra))
    sink.close()
    # The client would split a longer batch itself today; a server refuses it.
    assert [len(call.kwargs["metrics"]) for call in log_batch.call_args_list] == [1000, 1]
    found = client.get_run(run_id)
    assert found.data.metrics == {f"optimizer/p{i}:exp_avg/norm": float(i) for i in range(1001)}
    assert found.info.status == "RUNNING"


ODD = ["loss (train)", "a//b", "/a", "a/", "../a", "..", ".", "", "a\\b", "a%b", "x" * 300, "é/ü", "a/./b", "\n", "a:b"]


def test_every_name_becomes_one_that_mlflow_takes(uri: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    for tag in [*ODD, TAG]:
        _validate_metric_name(metric_name(tag))
        assert len(metric_name(tag)) <= 250


@given(st.text(max_size=300), st.text(max_size=300))
def test_names_stay_apart_and_are_what_they_were_where_they_can(one: str, other: str) -> None:
    assert (metric_name(one) == metric_name(other)) == (one == other)
    assert len(metric_name(one)) <= 250
    assert metric_name(metric_name(one)) == metric_name(one)


def test_names_of_tensors_are_kept() -> None:
    for tag in ("activations/head:output.0/norm", "optimizer/blocks.0.weight:exp_avg_sq/mean", "loss"):
        assert metric_name(tag) == tag
    assert len({metric_name(tag) for tag in ("a(b", "a)b", "a_b")}) == 3
