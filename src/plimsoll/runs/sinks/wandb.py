"""Sink for Weights & Biases, with the training step as the axis "plimsoll/step"."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks.tracker import DEFAULT_STATISTICS, MAX_HISTOGRAMS, Selection, Tracker, load
from plimsoll.runs.user_messages import warn_user

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
