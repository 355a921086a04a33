"""The flight recorder: the last steps in full, written when something breaks.

Loss, loss scale and the number of non-finite gradient values are kept for every step, and written for every step too:
they are a few bytes. Collections that it was asked to keep are measured at every step, and their last samples are held
in memory until something breaks; otherwise the oldest is forgotten.
"""

import bisect
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll.kernels.device_value import DeviceValue, ready, resolved
from plimsoll.runs import Event, Record, Scalars
from plimsoll.text import number, power
from plimsoll.watch.sample import FinishedSample, Sample
from plimsoll.watch.session import WatchSession

_SEND_SECONDS = 5.0  # after which numbers are handed over, however few they are
_SEND_EVERY = 32  # steps whose numbers go to the log together, where none of them is sampled
_SPIKE_HISTORY = 20  # steps before a loss can be called a spike
_SPIKE_DEVIATIONS = 10.0  # median absolute deviations above the median
_ADVICE = (
    "plimsoll.locate(closure), with a closure that repeats this batch's forward and backward from the weights before "
    "the step, names the operation; plimsoll.diagnosis.locate_on_trigger does so by itself"
)
_SPIKE_LEAST = 0.2  # and so much of the median itself


@dataclass(slots=True, kw_only=True)
class StepScalars:
    """Numbers of one step, some still computed by a device. `time` is that of its end."""

    step: int
    time: float = field(default_factory=time.time)
    loss: float | DeviceValue | None = None
    other_losses: Mapping[str, float | DeviceValue] = field(default_factory=dict[str, "float | DeviceValue"])
    scale: float | DeviceValue | None = None
    nonfinite: float | DeviceValue | None = None
    skipped: float | DeviceValue | None = None

    def ready(self) -> bool:
        """Return True if all values are known without waiting."""
        known = (self.loss, self.scale, self.nonfinite, self.skipped, *self.other_losses.values())
        return all(ready(value) for value in known)

    def values(self) -> dict[str, float]:
        """Those that there are; waits for the device."""
        numbers = {"loss": self.loss, **self.other_losses, "scale": self.scale, "nonfinite": self.nonfinite}
        known = {name: resolved(value) for name, value in numbers.items()}
        return {name: value for name, value in known.items() if value is not None}


class Recorder:
    """The ring of one watch."""

    def __init__(self, session: WatchSession) -> None:
        self.session = session
        steps = session.settings.recorder_steps
        self._unsent: list[StepScalars] = []
        self._guard = (
            threading.RLock()
        )  # a reader on another thread has them handed over, or a signal's handler on this
        self._sent_at = time.monotonic()
        self._unread: deque[StepScalars] = deque()
        self._losses: deque[float] = deque(maxlen=steps)
        self._ordered: list[float] = []  # the same losses by size
        self._last_scale: float | None = None
        self._samples: deque[tuple[FinishedSample, StepScalars]] = deque()
        self._fired: dict[str, int] = {}
        send = weakref.WeakMethod(self.send_facts)
        session.writer.before_read = lambda: method() if (method := send()) is not None else None

    def end_step(self, facts: StepScalars, sample: Sample | None) -> None:
        """Takes a finished step: what is due goes to the log, the rest into the ring."""
        with self._guard:
            self._unsent.append(facts)
        self._unread.append(facts)
        if sample is not None:
            self._send_sample(sample, facts)
        late = time.monotonic() - self._sent_at >= _SEND_SECONDS
        if sample is not None or late or len(self._unsent) >= _SEND_EVERY:
            self.send_facts()
        while self._unread and self._unread[0].ready():
            self._look_at(self._unread.popleft())

    def size_bytes(self) -> int:
        """Return the memory of the ring's samples."""
        return sum(sealed.size_bytes for sealed, _ in self._samples)

    def send_facts(self) -> None:
        """Hands the numbers of the last steps to the log; on any thread."""
        with self._guard:
            unsent = list(self._unsent)
            self._sent_at = time.monotonic()
            if unsent:
                names = [name for name in ("loss", "scale", "nonfinite") if name in self.session.settings.recorder]
                self.session.writer.submit(lambda: _scalars(unsent, names), 300 * len(unsent), numbers=True)
            del self._unsent[: len(unsent)]  # after it: what an interrupt leaves is sent once more

    def fire(self, reason: str, message: str, step: int | None = None, **details: object) -> None:
        """Writes what the ring holds, with the reason as an event."""
        step = self.session.step if step is None else step
        if step - self._fired.get(reason, -math.inf) < self.session.settings.recorder_steps:
            return
        self._fired[reason] = step
        steps = [sealed.step for sealed, _ in self._samples]
        self.session.writer.write(
            Event(step=step, kind="trigger", message=message, details={"reason": reason, "steps": steps, **details})
        )
        self.send_facts()
        while self._samples:
            sealed, facts = self._samples.popleft()
            self._submit(sealed, facts)

    def _send_sample(self, sample: Sample, facts: StepScalars) -> None:
        ring = self.session.ring_only
        if not sample.entries:
            sample.drop()
            return
        sealed = sample.sealed()
        collections = self.session.collections
        due, waiting = sealed.split(lambda series: collections[series] in ring)
        if due is not None:
            self._submit(due, facts)
        if waiting is not None:
            self._samples.append((waiting, facts))
        while len(self._samples) > self.session.settings.recorder_steps:
            self._samples.popleft()[0].drop()

    def _submit(self, sealed: FinishedSample, facts: StepScalars) -> None:
        def produce() -> list[Record]:
            return list(sealed.batches(resolved(facts.scale)))

        self.session.writer.submit(produce, sealed.size_bytes)

    # The recorder fires on a non-finite loss or gradient, a loss spike, a fall of the loss scale, an exception that
    # leaves the training loop, and a signal; for one reason at most once in as many steps as it keeps.
    def _look_at(self, facts: StepScalars) -> None:
        """Fires if the step's numbers say that something broke."""
        loss, scale = resolved(facts.loss), resolved(facts.scale)
        nonfinite, skipped = resolved(facts.nonfinite), resolved(facts.skipped)
        if skipped:
            message = (
                f"the scaler skipped the step at scale {power(scale)}" if scale is not None else "the step was skipped"
            )
            self.session.writer.write(Event(step=facts.step, kind="skip", message=message, details={"scale": scale}))
        others = {name: resolved(value) for name, value in facts.other_losses.items()}
        for name, value in {"loss": loss, **others}.items():
            if value is not None and not math.isfinite(value):
                self.fire("loss", f"the {name} is {value}", facts.step, loss=str(value), advice=_ADVICE)
        if loss is not None and math.isfinite(loss):
            self._look_for_spike(loss, facts.step)
        if nonfinite:
            message = f"{nonfinite:,.0f} gradient values are not finite"
            self.fire("nonfinite", message, facts.step, count=nonfinite, advice=_ADVICE)
        if scale is not None:
            if self._last_scale is not None and scale < self._last_scale:
                self.fire("scale", f"the loss scale fell from {power(self._last_scale)} to {power(scale)}", facts.step)
            self._last_scale = scale

    def _look_for_spike(self, loss: float, step: int) -> None:
        count, most = len(self._ordered), self._losses.maxlen or _SPIKE_HISTORY
        if count >= min(_SPIKE_HISTORY, most):
            median = (self._ordered[(count - 1) // 2] + self._ordered[count // 2]) / 2
            if loss - median > _SPIKE_LEAST * abs(median):
                deviation = statistics.median(abs(x - median) for x in self._ordered)
                if loss - median > _SPIKE_DEVIATIONS * deviation:
                    self.fire("spike", f"the loss rose from about {number(median)} to {number(loss)}", step, loss=loss)
        if count == most:
            del self._ordered[bisect.bisect_left(self._ordered, self._losses[0])]
        bisect.insort(self._ordered, loss)
        self._losses.append(loss)


def _scalars(steps: list[StepScalars], kept: list[str]) -> list[Record]:
    records: list[Record] = []
    for facts in steps:
        values = {name: value for name, value in facts.values().items() if name.partition(":")[0] in kept}
        if values:
            records.append(Scalars(step=facts.step, values=values, time=facts.time))
    return records
