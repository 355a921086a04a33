"""`Verdicts`: what the list says of each run, found out in the background, so that the list waits for none.

One run at a time, those written to last first, and only while somebody looks at the list. A training that goes on on
the same machine is not slowed: while any run is live, the thread rests four times as long as it worked, and asks a
live run again only after five times what the last answer took, and five seconds.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from plimsoll.report._runs_list import Listed

_KEPT = 20_000  # verdicts, some 300 bytes each
_SOONEST_SECONDS = 5.0  # between two verdicts on a live run
_SHARE = 0.2  # of one core, while a run is live
_LOOKED_AT_SECONDS = 30.0  # after a look at the list it is kept up to date for so long
_PAUSE_SECONDS = 0.5  # between two looks for something to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said of a run as it was at a token; when that was found, and how long it took."""

    token: str
    state: str
    sentence: str | None
    at: float = 0.0
    took_seconds: float = 0.0


class Verdicts:
    """Verdicts by id. `judge` says state and sentence of a run, and raises nothing."""

    def __init__(
        self,
        runs: Callable[[], list[Listed]],
        judge: Callable[[Listed], tuple[str, str | None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs, self._judge, self._clock = runs, judge, clock
        self._known: OrderedDict[str, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked = float("-inf")
        self.version = 0

    def of(self, run: Listed) -> Verdict | None:
        """The last verdict on a run; None where there is none yet."""
        with self._lock:
            return self._known.get(run.id)

    def say(self, run: Listed, state: str, sentence: str | None, took_seconds: float = 0.0) -> None:
        """Keeps a verdict that was found anyhow."""
        verdict = Verdict(token=run.token, state=state, sentence=sentence, at=self._clock(), took_seconds=took_seconds)
        with self._lock:
            before = self._known.pop(run.id, None)
            self._known[run.id] = verdict
            if before is None or (before.state, before.sentence) != (state, sentence):
                self.version += 1
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)

    def looked_at(self) -> None:
        """Somebody looks at the list: the thread works for a while."""
        self._looked = self._clock()
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._work, name="plimsoll-verdicts", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread; what it is at is not waited for."""
        self._ended.set()

    def judge_next(self) -> float | None:
        """Judges the run that is due; returns how long to rest after it. None where none is due."""
        runs = self._runs()
        self._drop_gone({run.id for run in runs})
        now = self._clock()
        due = next((run for run in runs if self._is_due(run, now)), None)
        if due is None:
            return None
        begun = time.perf_counter()
        state, sentence = self._judge(due)
        took = time.perf_counter() - begun
        self.say(due, state, sentence, took)
        return took * (1 / _SHARE - 1) if any(run.is_live(now) for run in runs) else 0.0

    def _is_due(self, run: Listed, now: float) -> bool:
        if not run.opens:
            return False
        known = self.of(run)
        if known is None or known.token == run.token:
            return known is None
        rest = max(_SOONEST_SECONDS, known.took_seconds / _SHARE)
        return not run.is_live(now) or now - known.at >= rest

    def _drop_gone(self, ids: set[str]) -> None:
        with self._lock:
            for gone in self._known.keys() - ids:
                del self._known[gone]

    def _work(self) -> None:
        while not self._ended.is_set():
            rest = self.judge_next() if self._clock() - self._looked < _LOOKED_AT_SECONDS else None
            self._ended.wait(_PAUSE_SECONDS if rest is None else rest)
