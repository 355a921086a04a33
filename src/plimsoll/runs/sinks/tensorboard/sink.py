"""Writes a run for TensorBoard: scalars by tensor and statistic, histograms from spectra, events as text.

A spectrum counts magnitudes by binade and keeps no sign for each, so its histogram is that of log2(abs(x)): values in
[2^e, 2^(e+1)) are shown at [e, e+1). Zeros and non-finite values have no place on that axis; they are the statistics
`zero_fraction` and `nonfinite`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks.extras import require
from plimsoll.runs.sinks.selection import DEFAULT_STATISTICS, MAX_HISTOGRAMS, Selection
from plimsoll.runs.sinks.tensorboard import messages
from plimsoll.runs.sinks.tensorboard.event_file import EventFile


class TensorBoard:
    """The sink for ``tensorboard --logdir RUN/tensorboard``.

    - `folder`: where the event files go; None is "tensorboard" in the run's folder.
    - `statistics`: those of a `Spectrum` to write, as "gradients/blocks.0.mlp.0.weight/norm".
    - `histograms`: whether to write them, as "gradients/blocks.0.mlp.0.weight", of log2 of the magnitudes; at most
      `max_histograms` a step.
    - `every`: spectra are written when at least so many steps lie between. Logged numbers, under their own names
      ("loss"), and events, as the text "events/kind", always are.

    Where a run is continued, TensorBoard is told to forget what lay past its first step.
    Raises `MissingExtraError` without TensorBoard, `ArgumentError` for a statistic that does not exist.
    """

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
        require("tensorboard", "TensorBoard")
        self._folder = None if folder is None else Path(folder)
        self._file: EventFile | None = None

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:  # noqa: ARG002  (a sink's signature)
        """Makes the folder, so that TensorBoard can be started on it at once."""
        self._folder = self._folder or run_path / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, record: StepRecord) -> None:
        """Writes one step: one record for its values, one for each event."""
        file = self._current_file(record.step)
        values = self._selection.of(record)
        if values.scalars or values.histograms:
            file.write(messages.values(record.step, values))
        for event in record.events:
            file.write(messages.text(event))

    def flush(self) -> None:
        """Has nothing to do: nothing is held back."""

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _current_file(self, step: int) -> EventFile:
        """The open file; a new one at first, and where the old one was removed under way."""
        if self._file is not None and self._file.path.exists():
            return self._file
        self.close()
        self._file = None
        assert self._folder is not None, "open comes first"
        self._file = _started(EventFile(self._folder), step)
        return self._file


def _started(file: EventFile, step: int) -> EventFile:
    try:
        for payload in messages.opening(step):
            file.write(payload)
    except OSError:
        file.close()
        file.path.unlink(missing_ok=True)
        raise
    return file
