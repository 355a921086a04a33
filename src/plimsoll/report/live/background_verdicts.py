"""`Verdicts`: verdicts on runs, made in the background.

Neither the list nor a page waits for them.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from plimsoll.report.live.run_index import Listed
from plimsoll.report.verdicts.run_summary import Summary

# One run at a time, those whose page is open first, then those written to last, and only while somebody looks. A
# training that goes on on the same machine is not slowed: while any run is live, the thread rests four times as long as
# it worked, and a live run is judged again only after five times what the last verdict took. A run that takes too long
# is left to itself, and the others go on.
_SHARE = 0.2  # of one core, while a run is live
_SOONEST_SECONDS = 5.0  # between two verdicts on a live run
_SOONEST_OPEN_SECONDS = 1.5  # the same while its page is open
_LOOKED_AT_SECONDS = 30.0  # after a look at the list or a page they are kept up to date for so long
_PAUSE_SECONDS = 0.5  # between two looks for something to do
_PATIENCE_SECONDS = 60.0  # for one verdict
_KEPT = 20_000  # verdicts, some 300 bytes each
_SUMMARIES = 300  # of these with their findings, up to some 50 KB each


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on a run at a token; `summary` is None if dropped or impossible.

    `identity`: of the run, as in `Listed`; `serial`: different for each verdict; `at`: when it was found;
    `took_seconds`.
    """

    token: str
    identity: tuple[object, ...]
    state: str
    sentence: str | None
    summary: Summary | None
    serial: int
    at: float
    took_seconds: float


class Verdicts:
    """Verdicts by id. `judge` makes a run's summary, or a reason. For any thread."""

    def __init__(
        self,
        runs: Callable[[], list[Listed]],
        judge: Callable[[Listed], Summary | str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs, self._judge, self._clock = runs, judge, clock
        self._known: OrderedDict[str, Verdict] = OrderedDict()
        self._looked: dict[str, float] = {}
        self._judging: dict[str, threading.Lock] = {}
        self._overdue: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.version = 0

    def of(self, run: Listed) -> Verdict | None:
        """Return the last verdict on a run, which may be outdated; None without one."""
        with self._lock:
            known = self._known.get(run.id)
        # A run that was put in the place of another one is no newer state of that.
        return known if known is not None and known.identity == run.identity else None

    def for_page(self, run: Listed) -> Verdict:
        """Return the last verdict with its summary; make it now if there is none."""
        self.looked_at(run.id)
        known = self.of(run)
        if known is not None and (
            known.summary is not None or (known.token == run.token and known.state == "unreadable")
        ):
            return known
        return self._judged(run, self.version)

    def looked_at(self, run_id: str = "") -> None:
        """Somebody looks at a run, or at the list (""): the thread works for a while."""
        with self._lock:
            self._looked[run_id] = self._clock()
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._work, name="plimsoll-verdicts", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread; what it is at is not waited for."""
        self._ended.set()

    def judge_next(self) -> float | None:
        """Judge the run that is due; return how long to rest, or None if none is due."""
        since = self.version  # read before the rows
        runs, now = self._runs(), self._clock()
        opened = self._drop_old({run.id for run in runs}, now)
        ordered = sorted(runs, key=lambda run: run.id not in opened)  # stable: else those written to last first
        due = next((run for run in ordered if self._is_due(run, now, run.id in opened)), None)
        if due is None:
            return None
        thread = threading.Thread(target=self._judged, args=(due, since), name="plimsoll-verdict", daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
        if thread.is_alive():
            self._overdue[due.id] = thread
        known = self.of(due)
        took = _PATIENCE_SECONDS if thread.is_alive() or known is None else known.took_seconds
        return took * (1 / _SHARE - 1) if any(run.is_live(now) for run in runs) else 0.0

    def _is_due(self, run: Listed, now: float, is_open: bool) -> bool:
        known = self.of(run)
        if not run.opens or (known is not None and known.token == run.token):
            return False
        if run.id in self._overdue and self._overdue[run.id].is_alive():
            return False
        if known is None or not run.is_live(now):
            return True
        soonest = _SOONEST_OPEN_SECONDS if is_open else _SOONEST_SECONDS
        return now - known.at >= max(soonest, known.took_seconds / _SHARE)

    def _judged(self, run: Listed, since: int) -> Verdict:
        """A new verdict, or one made after `since`; who asks for one that is being made waits for it."""
        with self._lock:
            lock = self._judging.setdefault(run.id, threading.Lock())
        with lock:
            known = self._known.get(run.id)
            # A later one is of what is written now, and `run` may be an older row of the list.
            if known is not None and known.summary is not None and (known.token == run.token or known.serial > since):
                return known
            begun = time.perf_counter()
            judged = self._judge(run)
            return self._keep(run, judged, time.perf_counter() - begun)

    def _keep(self, run: Listed, found: Summary | str, took_seconds: float) -> Verdict:
        with self._lock:
            self.version += 1
            verdict = Verdict(
                token=run.token,
                identity=run.identity,
                state="unreadable" if isinstance(found, str) else found.state,
                sentence=found if isinstance(found, str) else found.verdict,
                summary=None if isinstance(found, str) else found,
                serial=self.version,
                at=self._clock(),
                took_seconds=took_seconds,
            )
            self._known[run.id] = verdict
            self._known.move_to_end(run.id)
            self._trim()
            return verdict

    def _trim(self) -> None:
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        whole = [run_id for run_id, verdict in self._known.items() if verdict.summary is not None]
        for run_id in whole[: max(len(whole) - _SUMMARIES, 0)]:
            self._known[run_id] = replace(self._known[run_id], summary=None)

    def _drop_old(self, ids: set[str], now: float) -> set[str]:
        """Forgets the runs that have gone; returns those whose page somebody looks at."""
        with self._lock:
            for gone in self._known.keys() - ids:
                del self._known[gone]
            self._overdue = {run_id: thread for run_id, thread in self._overdue.items() if thread.is_alive()}
            self._judging = {run_id: lock for run_id, lock in self._judging.items() if run_id in ids or lock.locked()}
            self._looked = {key: at for key, at in self._looked.items() if now - at < _LOOKED_AT_SECONDS}
            return set(self._looked) - {""}

    def _work(self) -> None:
        while not self._ended.is_set():
            rest = self.judge_next() if self._looked else None
            self._ended.wait(_PAUSE_SECONDS if rest is None else rest)
