"""How a watch ends: what it has put into the model and into torch goes first, then what is left is written.

An end may be interrupted anywhere, asked for twice, by two threads, or by what it calls itself. Each part of it can be
done again and is dropped only once it is done, so that the next call goes on where an interrupted one was.
"""

import threading
import weakref
from typing import Any

from plimsoll.runs.writing import signal_deferral
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.session import Core
from plimsoll.watch.steps.step_boundary import Steps


class Closing:
    """The end of one watch. `handles` are those of its hooks on the root module."""

    def __init__(self, core: Core, steps: Steps) -> None:
        self._core, self._steps = core, steps
        self.handles: list[Any] = []
        self._lock = threading.RLock()
        self._busy = self._done = False

    def __call__(self) -> None:
        """Ends the watch, or waits for the thread that does."""
        if self._core.left:
            return
        with signal_deferral.deferred(), self._lock:
            if self._busy or self._done:  # busy: something that is called at the end closes the watch
                return
            try:
                self._busy = True
                self._end()
                self._done = True
            finally:
                self._busy = False

    def _end(self) -> None:
        core, steps = self._core, self._steps
        while core.at_close:
            call = core.at_close[-1]
            try:
                call()
            except Exception as error:  # noqa: BLE001  (P2: a guard's mistake must not keep the hooks in)
                core.failed("close", error)
            if call in core.at_close:  # it may have taken itself back
                core.at_close.remove(call)
        for handle in self.handles:
            handle.remove()
        if steps.taps is not None:
            steps.taps.detach()
        for listener in (steps, steps.wiring, steps.origin):
            if listener is not None:
                torch_hooks.forget(listener)
        if core.open:
            steps.settle_if_ended(closing=True)
            steps.recorder.send_facts()
        if core.shadow is not None:  # it has counted until here
            core.shadow.detach()
        core.shut()
        core.writer.close()


def finish(end: "weakref.finalize[Any, Any]") -> None:
    """Calls a finalizer's function and then detaches it, so that after an interruption it can be called again."""
    found = end.peek()
    if found is not None:
        _, call, arguments, named = found
        call(*arguments, **named)
        end.detach()
