"""Deferral of signals while a run is closed. A second signal ends the waiting."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from plimsoll.text import warn_user

SECONDS = 5.0  # that a run has to be written, once a signal has come
_PARTING_SECONDS = 1.0  # and at the process's end, once somebody did not want to wait
_TURN_SECONDS = 0.1
_TELL_SECONDS = 1.0
# SIGINT last: it is restored last, and what it raises then finds the others restored.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


class _Deferral:
    """Signals received while it is active. `until`: the time that ends all waiting."""

    def __init__(self) -> None:
        self.previous: dict[int, Any] = {}
        self.until = math.inf
        self._came: list[tuple[int, FrameType | None]] = []
        self._told = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Keep the first signal. A second one ends the waiting."""
        self._came.append((number, frame))
        self.until = min(self.until, time.monotonic() + SECONDS)
        if len(self._came) > 1:
            _state.impatient = True
            self.end()

    def tell(self) -> None:
        """Warn once, if it takes long, why the process has not ended."""
        if not self._told and self.until - time.monotonic() < SECONDS - _TELL_SECONDS:
            self._told = True
            warn_user(
                f"plimsoll: the signal waits until the run is written, {SECONDS:g} s at most; a second one does not."
            )

    def defer(self, number: int) -> None:
        """Start to keep back a signal."""
        previous = signal.getsignal(number)
        if callable(previous) or previous is signal.SIG_DFL:
            self.previous[number] = previous
            signal.signal(number, self.handle)

    def end(self) -> None:
        """Restore the handlers and apply the signals, those that end the process first."""
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


# A Ctrl-C or a scheduler's SIGTERM often comes at the end of a training, when the writer's thread has seconds of the
# record in memory, which would be lost with the process. So while a run is closed on the main thread, a signal is kept
# back. The run is written, for at most `SECONDS` more. Then the signal has its usual effect: the former handler is
# called, or the system's default applies. Signals that the process ignores stay ignored.
@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Defer signals until the end of the block. Only the main thread can set handlers."""
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
    """Wait until a condition holds. Return False if it does not in time.

    `until` waits for a number of seconds and returns whether the condition holds. After a deferred signal the wait is
    at most `deferring` seconds long.
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
    """Return whether a signal is deferred."""
    active = _state.active
    return active is not None and active.until < math.inf


def restore(number: int, ours: object, previous: Any) -> None:
    """Restore a former handler where `ours` is set, also behind a deferral."""
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
