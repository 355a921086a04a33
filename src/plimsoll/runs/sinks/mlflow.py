"""Sink for MLflow: metrics with the training step. MLflow has no histograms."""

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
from plimsoll.runs.sinks.tracker import DEFAULT_STATISTICS, Selection, Tracker, load

# Names may have letters, digits and "_-./ :" (no colon on Windows), and must not be paths that a file system reads as
# others ("a//b", "../a"). mlflow.utils.validation: MAX_METRICS_PER_BATCH, MAX_ENTITY_KEY_LENGTH,
# validate_param_and_metric_name.
_BATCH = 1000
_NAME_LENGTH = 250
_FOREIGN = re.compile(r"[^/\w.\- ]" if os.name == "nt" else r"[^/\w.\- :]")


class MLflow(Tracker):
    """Sink for MLflow.

    An event is the metric "events/kind": the number of such events at that step.

    Args:
        experiment: Name of the experiment, which is created if it is missing. The run gets the run folder's name.
        run_id: An existing MLflow run to add to, which is not ended. Default: a new run.
        tracking_uri: Address of the tracking server. Default: MLflow's own setting.
        statistics: Statistics to send, as for `TensorBoard`.
        every: Least number of steps between the spectra that are sent. Default: 1.

    Raises:
        MissingExtraError: MLflow is not installed.
        ArgumentError: A statistic does not exist.
    """

    name = extra = module = "mlflow"

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
        self.require()
        self._experiment = experiment
        self._own = run_id is None
        self._run_id = run_id
        self._tracking_uri = tracking_uri
        self._client: Any = None

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run. None until it is started."""
        return self._run_id

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:  # noqa: ARG002  (a sink's signature)
        """Import MLflow, which takes seconds, and start the run unless there is one."""
        self._client = load("mlflow.tracking").MlflowClient(tracking_uri=self._tracking_uri)
        if self._run_id is None:
            # Without a name, MLflow draws one from Python's random numbers, and the user's sequence changes.
            run = self._client.create_run(
                self._experiment_id(), run_name=run_path.name, tags={"plimsoll.run": str(run_path)}
            )
            self._run_id = str(run.info.run_id)

    def put(self, record: StepRecord) -> None:
        """Log one step's metrics, a thousand per request."""
        metric = load("mlflow.entities").Metric
        now = int(time.time() * 1000)
        metrics = (metric(metric_name(tag), value, now, step) for tag, value, step in self._numbers(record))
        while batch := list(islice(metrics, _BATCH)):
            self._client.log_batch(self._run_id, metrics=batch)

    def flush(self) -> None:
        """Do nothing: metrics are sent by `put`."""

    def close(self) -> None:
        """End the run if this sink started it."""
        if self._own and self._run_id is not None:
            self._client.set_terminated(self._run_id)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(
            experiment.experiment_id if experiment is not None else self._client.create_experiment(self._experiment)
        )

    def _numbers(self, record: StepRecord) -> Iterator[tuple[str, float, int]]:
        for tag, value in self._selection.of(record).scalars.items():
            if not isinf(value):  # MLflow's databases store Inf as 1.8e308; NaN they keep
                yield tag, value, record.step
        kinds = [(event.kind, event.step) for event in record.events]
        for kind, step in dict.fromkeys(kinds):
            yield f"events/{kind}", float(kinds.count((kind, step))), step


def metric_name(tag: str) -> str:
    """Return the name under which MLflow accepts `tag`.

    A name that MLflow refuses gets "_" for each such character, and a hash of the original so that names stay distinct.

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
