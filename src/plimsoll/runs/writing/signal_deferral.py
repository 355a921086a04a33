"""Signals that come while a run is closed: the first one waits until the run is written, a second one does not.

A Ctrl-C or a scheduler's SIGTERM likes to come right at the end of a training, when the writer's thread still has
seconds of the record in memory: the process would end without them. So for as long as a run is closed on the main
thread, a signal that comes is noted. The run is written, for at most `SECONDS` more, and then the signal has the effect
that it always has: whatever handler was there before is called, or the default of the system carried out. A signal
that the process ignores is ignored.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from plimsoll.runs.user_messages import warn_user

SECONDS = 5.0  # that a run has to be written, once a signal has come
_PARTING_SECONDS = 1.0  # and at the process's end, once somebody did not want to wait
_TURN_SECONDS = 0.1
_TELL_SECONDS = 1.0
# SIGINT last: it is restored last, and what it raises then finds the others restored.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


class _Deferral:
    """What has come while it is active; `until` is when all waiting ends."""

    def __init__(self) -> None:
        self.previous: dict[int, Any] = {}
        self.until = math.inf
        self._came: list[tuple[int, FrameType | None]] = []
        self._told = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Notes the first signal; at the second one, nothing is waited for any more."""
        self._came.append((number, frame))
        self.until = min(self.until, time.monotonic() + SECONDS)
        if len(self._came) > 1:
            _state.impatient = True
            self.end()

    def tell(self) -> None:
        """Says, once and where it takes long, why the process has not ended."""
        if not self._told and self.until - time.monotonic() < SECONDS - _TELL_SECONDS:
            self._told = True
            warn_user(
                f"plimsoll: the signal waits until the run is written, {SECONDS:g} s at most; a second one does not."
            )

    def defer(self, number: int) -> None:
        """Begins to note a signal."""
        previous = signal.getsignal(number)
        if callable(previous) or previous is signal.SIG_DFL:
            self.previous[number] = previous
            signal.signal(number, self.handle)

    def end(self) -> None:
        """Puts the handlers back that were there, and has what came take effect; what ends the process first."""
        came, self._came = self._came, []
        effects = [(number, frame, self.previous[number]) for number, frame in came]
        with contextlib.ExitStack() as last_first:  # goes on with the next whatever one of them raises
            for number, frame, previous in sorted(effects, key=lambda effect: not callable(effect[2])):
                last_first.callback(_take_effect, number, frame, previous)
            for number in reversed(list(self.previous)):
                last_first.callback(self._restore, number)

    def _restore(self, number: int) -> None:
        previous = self.previous.pop(number, None)
        if previous is not None and signal.getsignal(number) == self.handle:  # else somebody else's by now
            signal.signal(number, previous)


class _State:
    active: _Deferral | None = None
    impatient = False  # a second signal has come in this process


_state = _State()


@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Defers signals to the end of the block, on the main thread: no other one can set handlers."""
    if _state.active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = _state.active = _Deferral()
    try:
        for number in _SIGNALS:
            mine.defer(number)
        yield
    finally:
        _state.active = None
        mine.end()


def wait(until: Callable[[float], object], seconds: float | None, *, deferring: float = SECONDS) -> bool:
    """Calls `until`, which waits so many seconds, till it is true; False when it is not in time.

    Where a signal waits for the end of the waiting, it ends `deferring` seconds after that came.
    """
    start = time.monotonic()
    end = math.inf if seconds is None else start + seconds
    if _state.impatient and not threading.main_thread().is_alive():  # nobody else can tell that the interpreter ends
        end = min(end, start + _PARTING_SECONDS)
    while not until(max(0.0, min(_TURN_SECONDS, end - time.monotonic()))):
        active = _state.active
        if active is not None:
            active.tell()
        if time.monotonic() >= (end if active is None else min(end, active.until - SECONDS + deferring)):
            return False
    return True


def is_hurried() -> bool:
    """Whether a signal waits."""
    active = _state.active
    return active is not None and active.until < math.inf


def restore(number: int, ours: object, previous: Any) -> None:
    """Puts a handler back in place of ours, where ours still is the one, be it behind a deferral."""
    if threading.current_thread() is not threading.main_thread():
        return
    active = _state.active
    if active is not None and active.previous.get(number) is ours:
        active.previous[number] = previous
    elif signal.getsignal(number) is ours:
        signal.signal(number, previous)


def _take_effect(number: int, frame: FrameType | None, previous: Any) -> None:
    if callable(previous):
        previous(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
