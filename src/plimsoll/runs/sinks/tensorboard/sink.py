"""Sink for TensorBoard: scalars by tensor and statistic, histograms from spectra, events as text.

A spectrum counts magnitudes by binade and keeps no sign for each, so its histogram is that of log2(abs(x)): values in
[2^e, 2^(e+1)) are shown at [e, e+1). Zeros and non-finite values have no place on that axis; they are the statistics
`zero_fraction` and `nonfinite`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks.selection import DEFAULT_STATISTICS, MAX_HISTOGRAMS, Selection
from plimsoll.runs.sinks.tensorboard import event_file
from plimsoll.runs.sinks.tensorboard.event_file import EventFile
from plimsoll.runs.sinks.tracker import Tracker


class TensorBoard(Tracker):
    """Sink for ``tensorboard --logdir RUN/tensorboard``.

    Where a run is continued, TensorBoard drops what it had from the session's first step on.

    Args:
        folder: Folder of the event files. Default: "tensorboard" in the run's folder.
        statistics: Statistics of a `Spectrum` to write, as "gradients/blocks.0.mlp.0.weight/norm".
        histograms: Whether to write histograms of log2 of the magnitudes, as "gradients/blocks.0.mlp.0.weight".
        every: Least number of steps between the spectra that are written. Logged numbers, under their names ("loss"),
            and events, as the text "events/kind", are always written. Default: 1.
        max_histograms: Most histograms per step. Default: 1,000.

    Raises:
        MissingExtraError: TensorBoard is not installed.
        ArgumentError: A statistic does not exist.
    """

    name = extra = module = "tensorboard"

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        statistics: Sequence[str] = DEFAULT_STATISTICS,
        histograms: bool = True,
        every: int = 1,
        max_histograms: int = MAX_HISTOGRAMS,
    ) -> None:
        self._selection = Selection("TensorBoard", statistics, every, max_histograms if histograms else 0)
        self.require()
        self._folder = None if folder is None else Path(folder)
        self._file: EventFile | None = None

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:  # noqa: ARG002  (a sink's signature)
        """Create the folder, so that TensorBoard can be started on it at once."""
        self._folder = self._folder or run_path / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, record: StepRecord) -> None:
        """Write one step: one record for its values, one for each event."""
        file = self._current_file(record.step)
        values = self._selection.of(record)
        if values.scalars or values.histograms:
            file.write(event_file.values(record.step, values))
        for event in record.events:
            file.write(event_file.text(event))

    def flush(self) -> None:
        """Do nothing: event files have no buffer."""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _current_file(self, step: int) -> EventFile:
        """Return the open file: a new one at first, and after the old one was removed."""
        if self._file is not None and self._file.path.exists():
            return self._file
        self.close()
        self._file = None
        assert self._folder is not None, "open comes first"
        self._file = _started(EventFile(self._folder), step)
        return self._file


def _started(file: EventFile, step: int) -> EventFile:
    try:
        for payload in event_file.opening(step):
            file.write(payload)
    except OSError:
        file.close()
        file.path.unlink(missing_ok=True)
        raise
    return file
