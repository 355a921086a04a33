"""Records to give to sinks, and sinks that do as the tests say."""

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from plimsoll.runs.records import Event, StepRecord
from plimsoll.spectrum import Spectrum, measure

NAME = ("gradients", "blocks.0.mlp.0.weight")
TAG = "/".join(NAME)


def spectrum(*values: float) -> Spectrum:
    """The spectrum of these float32 values."""
    return measure(torch.tensor(values))


def record(step: int, *values: float, events: tuple[Event, ...] = (), **scalars: float) -> StepRecord:
    """A record with one gradient of these values, or without spectra for none."""
    spectra = {NAME: spectrum(*values)} if values else {}
    return StepRecord(step=step, spectra=lambda: spectra, scalars=scalars, events=events)


class Recorder:
    """Notes what is called on it, on which thread; `inside` is set while `put` waits for `go_on`."""

    def __init__(self, *, waits: bool = False) -> None:
        self.calls: list[object] = []
        self.threads: set[str] = set()
        self.inside = threading.Event()
        self.go_on = threading.Event()
        if not waits:
            self.go_on.set()

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("open", run_path, dict(settings)))

    def put(self, record: StepRecord) -> None:
        self.inside.set()
        self.go_on.wait()
        self.calls.append(record.step)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    @property
    def steps(self) -> list[int]:
        """The steps that were put."""
        return [call for call in self.calls if isinstance(call, int)]


class Failing(Recorder):
    """Raises `error` from `operation`, for a put only at the steps of `steps_that_fail` where given."""

    def __init__(self, operation: str, error: BaseException, only: range | None = None) -> None:
        super().__init__()
        self._operation, self._error, self._only = operation, error, only

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        super().open(run_path, settings)
        self._fail("open")

    def put(self, record: StepRecord) -> None:
        if self._only is None or record.step in self._only:
            self._fail("put")
        super().put(record)

    def flush(self) -> None:
        super().flush()
        self._fail("flush")

    def close(self) -> None:
        super().close()
        self._fail("close")

    def _fail(self, operation: str) -> None:
        if operation == self._operation:
            raise self._error
