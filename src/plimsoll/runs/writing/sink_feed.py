"""Records for sinks: one `StepRecord` per step, as soon as its batch is complete."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plimsoll.runs.columns.schema import Series
from plimsoll.runs.columns.spectrum_columns import true_spectrum
from plimsoll.runs.columns.step_table import StepTable
from plimsoll.runs.records import Event, Scalars, Sink, StepRecord
from plimsoll.runs.user_messages import warn_user
from plimsoll.runs.writing import signal_deferral
from plimsoll.spectrum import Spectrum

if TYPE_CHECKING:
    from plimsoll.runs.sinks.runner import SinkRunner

_SAY_SECONDS = 2.0  # after which it is said which sinks are waited for
_CLOSE_SECONDS = 10.0  # that all sinks together have to take what waits and to close
_DEFERRING_SECONDS = 2.0  # and where a signal waits

Spectra = Mapping[tuple[str, str], Spectrum]


class SinkFeed:
    """Feed of records to sinks. `SinkRunner` handles sinks that raise or hang."""

    def __init__(self, sinks: Sequence[Sink], path: Path, settings: Mapping[str, object]) -> None:
        self._runners: list[SinkRunner] = []
        self._waiting: dict[int, tuple[dict[str, float], list[Event]]] = {}
        self._told: set[int] = set()
        if sinks:
            from plimsoll.runs.sinks import runner as _runner

            self._runners = [_runner.SinkRunner(sink) for sink in sinks]
            for runner in self._runners:
                runner.open(path, settings)

    def scalars(self, record: Scalars) -> None:
        """Keep scalars until the batch of their step, or a later step, comes."""
        if self._runners:
            self._of(record.step)[0].update(record.values)

    def event(self, record: Event) -> None:
        """Keep an event until the batch of its step, or a later step, comes."""
        if self._runners:
            self._of(record.step)[1].append(record)

    def batch(self, step: int, entries: StepTable, series: Sequence[Series]) -> None:
        """Send a complete step, and before it the records kept for earlier steps."""
        if not self._runners:
            return
        self.release(before=step)
        scalars, events = self._waiting.pop(step, ({}, []))
        self._put(StepRecord(step=step, spectra=_lazily(entries, series), scalars=scalars, events=tuple(events)))

    def release(self, before: float = math.inf) -> None:
        """Send the scalars and events of earlier steps that have no batch."""
        for step in sorted(s for s in self._waiting if s < before):
            scalars, events = self._waiting.pop(step)
            self._put(StepRecord(step=step, scalars=scalars, events=tuple(events)))

    def flush(self) -> None:
        """Send all records and flush the sinks."""
        self.release()
        for runner in self._runners:
            runner.flush()

    def end(self) -> None:
        """Send all records and let the sinks close after them, without waiting."""
        self.release()
        for runner in self._runners:
            runner.end(flushing=True)

    def close(self) -> None:
        """Wait for all sinks to close at the same time, for at most 10 seconds."""
        self.end()
        late = list(self._runners)

        def have_ended(seconds: float) -> bool:
            late[:] = [runner for runner in late if not runner.has_ended(seconds / len(late))]
            return not late

        if signal_deferral.wait(have_ended, _SAY_SECONDS, deferring=_DEFERRING_SECONDS):
            return
        rest = _CLOSE_SECONDS - _SAY_SECONDS
        warn_user(
            f"plimsoll: waiting for {', '.join(runner.name for runner in late)} to close, {rest:g} s more at most."
        )
        if not signal_deferral.wait(have_ended, rest, deferring=_DEFERRING_SECONDS):
            for runner in late:
                runner.give_up("close", _CLOSE_SECONDS)

    def failures(self) -> list[str]:
        """Return the failures of sinks since the last call, each once."""
        new_failures = {
            i: r.failure for i, r in enumerate(self._runners) if r.failure is not None and i not in self._told
        }
        self._told.update(new_failures)
        return list(new_failures.values())

    def dropped(self) -> int:
        """Return how many records sinks did not receive."""
        return sum(runner.dropped for runner in self._runners)

    def _of(self, step: int) -> tuple[dict[str, float], list[Event]]:
        if step not in self._waiting:
            self.release(before=step)
        return self._waiting.setdefault(step, ({}, []))

    def _put(self, record: StepRecord) -> None:
        for runner in self._runners:
            runner.put(record)


def _lazily(entries: StepTable, series: Sequence[Series]) -> Callable[[], Spectra]:
    """Return a function that decodes a step's spectra when it is first called."""
    named: list[Series] = [series[int(i)] for i in entries.series]
    decoded: dict[tuple[str, str], Spectrum] = {}

    def spectra() -> Spectra:
        if not decoded:
            made: dict[tuple[str, str], Spectrum] = {}
            blocks = np.zeros(len(entries), dtype=np.int64) if entries.blocks is None else entries.blocks
            for s, scale, row, block in zip(named, entries.scales, entries.rows, blocks.tolist(), strict=True):
                spectrum, key = true_spectrum(row, s.format, float(scale), block), (s.collection, s.name)
                made[key] = made[key] + spectrum if key in made else spectrum
            decoded.update(made)
        return decoded

    return spectra
