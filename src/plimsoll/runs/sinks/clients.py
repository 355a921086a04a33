"""Sinks that send through a tracker's own client: Weights & Biases, and MLflow."""

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

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks.tracker import DEFAULT_STATISTICS, MAX_HISTOGRAMS, Selection, Tracker, load
from plimsoll.text import warn_user

# -- Weights & Biases, with the training step as the axis "plimsoll/step" ----------------------------------------------

_STEP = "plimsoll/step"


class WandB(Tracker):
    """Sink for Weights & Biases.

    Names begin with "plimsoll/". Histograms are of log2 of the magnitudes. An event is its count and its message under
    "plimsoll/events/kind".

    Args:
        project: Project of the new run.
        name: Name of the new run. Default: that of the run's folder.
        run: An existing ``wandb.Run`` to write to, which is not finished. Values wait for your next ``run.log``, so
            that your steps stay as they are. If several steps meet in one of your rows, only the last is kept, with
            one warning. Default: a new run next to any other, in the run's folder, with the run's settings as config.
        mode: As for ``wandb.init``.
        commit: With `run`, whether each step gets a row. That advances W&B's step: only if you never log with
            ``step=``. Default: False.
        statistics: As for `TensorBoard`, like `histograms`, `every` and `max_histograms`.
        histograms: Whether to send histograms.
        every: Least number of steps between the spectra that are sent. Default: 1.
        max_histograms: Most histograms per step. Default: 1,000.
        init_arguments: Further arguments of ``wandb.init``.

    Raises:
        MissingExtraError: W&B is not installed.
        ArgumentError: Arguments contradict each other, or a statistic does not exist.
    """

    name = extra = module = "wandb"

    def __init__(
        self,
        project: str = "plimsoll",
        *,
        name: str | None = None,
        run: Any = None,
        mode: str | None = None,
        commit: bool = False,
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        histograms: bool = True,
        every: int = 1,
        max_histograms: int = MAX_HISTOGRAMS,
        **init_arguments: object,
    ) -> None:
        if run is not None and (name is not None or mode is not None or init_arguments):
            raise ArgumentError(
                "WandB: expected either run= or arguments for a new run; got both. Leave out one of them."
            )
        self._selection = Selection("WandB", statistics, every, max_histograms if histograms else 0)
        self.require()
        self._own = run is None
        self._run: Any = run
        self._commit = commit or self._own
        self._init_arguments: dict[str, Any] = {"project": project, "name": name, "mode": mode, **init_arguments}
        self._last_row: int | None = None
        self._warned = False

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        """Start the run, unless there is one, and define the axis."""
        if self._own:
            self._run = self._start(run_path, settings)
        self._run.define_metric(_STEP, hidden=True)
        # Without step_sync: the step is in every row, and W&B need not add it.
        self._run.define_metric("plimsoll/*", step_metric=_STEP, step_sync=False)

    def put(self, record: StepRecord) -> None:
        """Log one step's row, and a row for each event of another step."""
        for step, row in self._rows(record).items():
            if row:
                self._log({_STEP: step, **{f"plimsoll/{tag}": value for tag, value in row.items()}})

    def flush(self) -> None:
        """Do nothing: W&B sends rows itself."""

    def close(self) -> None:
        """Finish the run if this sink started it."""
        if self._own and self._run is not None:
            self._run.finish()

    def _start(self, run_path: Path, settings: Mapping[str, object]) -> Any:
        wandb = load("wandb")

        arguments = {**self._init_arguments}
        arguments["name"] = arguments["name"] or run_path.name
        arguments.setdefault("dir", str(run_path))
        arguments.setdefault("config", dict(settings))
        if "settings" not in arguments:
            # The script's output belongs to the user's run.
            arguments["settings"] = wandb.Settings(console="off")
            _check_login(wandb, arguments["mode"])
        # create_new leaves another active run, and wandb.run, alone.
        return wandb.init(reinit="create_new", **arguments)

    # W&B numbers the rows of a run itself, ignores rows with a smaller number than the last, and counts up with every
    # row. Rows of a sink must not displace the user's. They go to a separate run or, in the user's run, into the row
    # that the user's next `wandb.log` completes.
    def _rows(self, record: StepRecord) -> dict[int, dict[str, object]]:
        wandb = load("wandb")

        values = self._selection.of(record)
        row: dict[str, object] = {**values.scalars}
        for tag, histogram in values.histograms.items():
            row[tag] = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        rows = {record.step: row}
        for event in record.events:
            cells = rows.setdefault(event.step, {})
            count = cells.get(f"events/{event.kind}", 0)
            cells[f"events/{event.kind}"] = count + 1 if isinstance(count, int) else 1
            cells[f"events/{event.kind}/message"] = event.message
        return rows

    def _log(self, row: Mapping[str, object]) -> None:
        if self._commit:
            self._run.log(row, commit=True)
            return
        current = self._run.step
        if current == self._last_row and not self._warned:
            self._warned = True
            warn_user(
                "WandB: several steps fell into one row of your W&B run, and only the last is kept. Log more often "
                "than plimsoll does, give commit=True, or leave out run= for a run of its own."
            )
        self._last_row = current
        self._run.log(row, commit=False)


def _check_login(wandb: Any, mode: str | None) -> None:
    """Raise if W&B would ask for an API key, on this thread, in the user's terminal."""
    mode = mode or wandb.setup().settings.mode
    if mode not in {"offline", "disabled", "dryrun"} and not wandb.login(prompt=False):
        raise PlimsollError(
            "WandB: expected a login to W&B; got none. Run `wandb login`, or give mode='offline' and sync later."
        )


# -- MLflow: metrics with the training step; it has no histograms ------------------------------------------------------

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
