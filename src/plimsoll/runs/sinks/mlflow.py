"""Sends a run's numbers to MLflow, as metrics with the training step.

MLflow has no histograms. It takes letters, digits and ``_-./ :`` in names (no colon on Windows), 250 characters, and no
name that a file system would read as another ("a//b", "../a"). A name that does not fit gets ``_`` for what it may not
hold and a hash of the original behind it, so that no two become one. MLflow's databases store Inf as 1.8e308, a number
that never was: infinite values are left out. NaN is kept.
"""

import hashlib
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import isinf
from pathlib import Path
from typing import Any

from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks.extras import load, require
from plimsoll.runs.sinks.selection import DEFAULT_STATISTICS, Selection

# mlflow.utils.validation: MAX_METRICS_PER_BATCH, MAX_ENTITY_KEY_LENGTH, validate_param_and_metric_name.
_BATCH = 1000
_NAME_LENGTH = 250
_FOREIGN = re.compile(r"[^/\w.\- ]" if os.name == "nt" else r"[^/\w.\- :]")


class MLflow:
    """The sink for MLflow.

    - `experiment`: the name of the experiment, which is made if it is missing; the run bears the run folder's name.
    - `run_id`: an existing run to add to instead, which is not ended.
    - `tracking_uri`: where to; None is MLflow's own setting.
    - `statistics`, `every` as for `TensorBoard`. An event is the metric "events/kind": how many at that step.

    Raises `MissingExtraError` without mlflow, `ArgumentError` for a statistic that does not exist.
    """

    def __init__(
        self,
        experiment: str = "plimsoll",
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        every: int = 1,
    ) -> None:
        self._selection = Selection("MLflow", statistics, every, 0)
        require("mlflow", "MLflow")
        self._experiment = experiment
        self._own = run_id is None
        self._run_id = run_id
        self._tracking_uri = tracking_uri
        self._client: Any = None

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None until it is started."""
        return self._run_id

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:  # noqa: ARG002  (a sink's signature)
        """Imports MLflow, which takes seconds, and starts the run unless there is one."""
        self._client = load("mlflow.tracking").MlflowClient(tracking_uri=self._tracking_uri)
        if self._run_id is None:
            # With a name of its own: MLflow would draw one from Python's random numbers, which are the user's.
            run = self._client.create_run(
                self._experiment_id(), run_name=run_path.name, tags={"plimsoll.run": str(run_path)}
            )
            self._run_id = str(run.info.run_id)

    def put(self, record: StepRecord) -> None:
        """Logs one step's metrics, a thousand at a time."""
        metric = load("mlflow.entities").Metric
        now = int(time.time() * 1000)
        metrics = (metric(metric_name(tag), value, now, step) for tag, value, step in self._numbers(record))
        while batch := list(islice(metrics, _BATCH)):
            self._client.log_batch(self._run_id, metrics=batch)

    def flush(self) -> None:
        """Has nothing to do: metrics are sent when they are put."""

    def close(self) -> None:
        """Ends the run if it is our own."""
        if self._own and self._run_id is not None:
            self._client.set_terminated(self._run_id)

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        return str(found.experiment_id if found is not None else self._client.create_experiment(self._experiment))

    def _numbers(self, record: StepRecord) -> Iterator[tuple[str, float, int]]:
        for tag, value in self._selection.of(record).scalars.items():
            if not isinf(value):
                yield tag, value, record.step
        kinds = [(event.kind, event.step) for event in record.events]
        for kind, step in dict.fromkeys(kinds):
            yield f"events/{kind}", float(kinds.count((kind, step))), step


def metric_name(tag: str) -> str:
    """The name under which MLflow takes `tag`: itself wherever it can be.

    >>> metric_name("gradients/blocks.0.weight/norm"), metric_name("loss (train)")
    ('gradients/blocks.0.weight/norm', 'loss _train_-dbbf7c64')
    """
    name = _FOREIGN.sub("_", tag)
    unclear = not name or name.startswith(("/", "..")) or posixpath.normpath(name) != name or name == "."
    if name == tag and not unclear and len(name) <= _NAME_LENGTH:
        return tag
    digest = hashlib.sha256(tag.encode(errors="surrogatepass")).hexdigest()[:8]
    parts = [part for part in name.split("/") if part.strip(".")] if unclear else [name]
    return f"{'/'.join(parts)[: _NAME_LENGTH - 9]}-{digest}"
