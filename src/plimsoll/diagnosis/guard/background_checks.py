"""Background checks of a run in progress: the rules, on a thread, at bounded cost.

A look up to step s reads only what steps up to s have left, so that it finds what ``diagnose(run, until=s)`` finds at
any later time. One look at a time; after one that took t seconds of a core the next begins t / share seconds later, or
not at all if nothing asks by then.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from plimsoll.diagnosis.guard.records import Look
from plimsoll.diagnosis.rules.base import Rule
from plimsoll.diagnosis.run_rules import diagnose
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16
from plimsoll.runs import Run
from plimsoll.tensor_collections import WITH_LOSS_SCALE

_RECENT = 8  # samples whose largest gradient tells how much room there is
_CLOSE_SECONDS = 5.0


class BackgroundChecker:
    """Looks at one run.

    - `gather`: called on the looking thread before each look, with its step; says whether all is on disk.
    - `failed`: hears what a look raised.
    """

    def __init__(
        self,
        path: Path,
        rules: Sequence[Rule],
        *,
        share: float,
        gather: Callable[[int], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self._path, self._rules, self._share = path, tuple(rules), share
        self._gather, self._failed = gather, failed
        self._done: Look | None = None
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self.closing = threading.Event()

    def ask(self, step: int) -> bool:
        """Begin a background look up to that step; return False if it must wait.

        It waits while one runs, and if it would cost too much.
        """
        busy = self._thread is not None and self._thread.is_alive()
        if busy or self._done is not None or time.monotonic() < self._not_before:
            return False
        self._thread = threading.Thread(target=self._work, args=(step,), name="plimsoll-guard", daemon=True)
        self._thread.start()
        return True

    def take(self) -> Look | None:
        """The look that has come to an end since the last call, if any; never waits."""
        look, self._done = self._done, None
        return look

    def now(self, step: int) -> Look | None:
        """Return a look on this thread, after a running one; None if data came too late."""
        if self._thread is not None:
            self._thread.join()
            self._done = None  # what was looked at before is older
        return self._look(step) if self._gather(step) else None

    def close(self) -> None:
        """Ends a look that is under way, at its next rest."""
        self.closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _work(self, step: int) -> None:
        started = time.thread_time()
        try:
            if self._gather(step) and not self.closing.is_set():
                self._done = self._look(step)
        except Exception as error:  # noqa: BLE001  (P2: a run that cannot be read must not stop training)
            self._failed(error)
        self._not_before = time.monotonic() + (time.thread_time() - started) * (1 / self._share - 1)

    def _look(self, step: int) -> Look:
        view = View(Run(self._path), step)
        findings = diagnose(view, rules=self._rules)
        newest = {"": view.last_step}
        for collection in {f.collection for f in findings if f.collection is not None}:
            cells = view.cells(collection)
            if cells is not None:
                newest[collection] = int(cells.steps[-1])
        return Look(step=step, findings=tuple(findings), newest=newest, room=room(view) if findings else None)


def room(view: View) -> int | None:
    """Return the highest shift without overflow of recent gradients; None if unseen.

    Of parameters and of activations, as true values, against the narrowest format that held them, or FP16.
    """
    rooms: list[int] = []
    for collection in WITH_LOSS_SCALE:
        narrow = view.narrow(collection)
        if narrow is None:
            continue
        largest_of_formats = [fmt.max for fmt in narrow.known if fmt.max < FP16.max * 2]
        largest = float(np.fmax.reduce(narrow.cells.true_absmax[:, -_RECENT:], axis=None, initial=np.nan))
        if largest > 0 and math.isfinite(largest):
            rooms.append(math.floor(math.log2(min([FP16.max, *largest_of_formats]) / largest)))
    return min(rooms, default=None)
