"""Answers of the live page's API as JSON, cached with the run's view, and verdicts.

docs/how-to/serve.md lists the answers.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plimsoll.diagnosis import Finding
from plimsoll.errors import ArgumentError, PlimsollError, RunError
from plimsoll.report.live.live_runs import Live, LiveView
from plimsoll.report.live.run_index import Listed
from plimsoll.report.page.answers import (
    difference,
    drawn,
    drawn_of_two,
    encoded,
    listed,
    needs_findings,
    run_answer,
    scalar_answer,
    summary_answer,
    whatif_answer,
    whole,
    within,
)
from plimsoll.report.verdicts.run_summary import Summary, summary, with_present_numbers
from plimsoll.tensor_collections import LABELS

# -- `Verdicts`: verdicts on runs, made in the background --------------------------------------------------------------

# Neither the list nor a page waits for them.

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


# -- `Api`: answers ----------------------------------------------------------------------------------------------------

MOST_COLUMNS = 16  # settings that a list shows at a time
_MOST_SETTINGS = 200  # names that are offered
_LIST_SECONDS = 0.5  # how old the list may be
_FOLLOWED_SECONDS = 1.5  # the same for a client that only waits for a change


class Api:
    """Answers to all questions about a folder's runs. Raises Plimsoll's errors."""

    def __init__(self, folder: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.live = Live(folder, clock=clock)
        self.verdicts = Verdicts(lambda: self._found(_LIST_SECONDS), self._judged, clock)
        self._clock = clock

    @property
    def root(self) -> Path:
        """The served folder."""
        return self.live.list.folder

    def runs(self, columns: Sequence[str] = ()) -> bytes:
        """Return the list of runs, with the values of the settings in `columns`."""
        if len(columns) > MOST_COLUMNS:
            raise ArgumentError(
                f"serve: expected at most {MOST_COLUMNS} columns; got {len(columns)}. Ask for fewer at a time."
            )
        self.verdicts.looked_at()
        listed, now = self.live.list.runs(_LIST_SECONDS), self._clock()
        rows = [self._row(run, now) for run in listed]
        for row, run in zip(rows, listed, strict=True):
            row["settings"] = {name: run.settings[name] for name in columns if name in run.settings}
        folder = self.root.name or str(self.root)
        return encoded({"folder": folder, "version": self.version, "settings": _settings(listed), "runs": rows})

    def figures(self) -> bytes:
        """All figures and their arguments."""
        return encoded({"figures": listed()})

    @property
    def version(self) -> int:
        """A number that changes with the list."""
        return self.live.list.version + self.verdicts.version

    def run(self, run_id: str) -> bytes:
        """A run's page."""
        listed = self.live.opened(run_id)
        verdict = self.verdicts.for_page(listed)

        def make(view: LiveView) -> bytes:
            return encoded(run_answer(view, with_present_numbers(_summary_of(verdict), view), self.root))

        _, body = self.live.answer(run_id, ("run", verdict.serial), make)
        live = listed.is_live(self._clock())
        return _with({"id": listed.id, "name": listed.name, "live": live, "token": _token(listed, verdict)}, body)

    def figure(self, run_id: str, name: str, query: Mapping[str, str]) -> bytes:
        """A figure of a run."""
        listed = self.live.opened(run_id)
        findings: Sequence[Finding] = ()
        if needs_findings(name, query):  # asked for before the run's lock is taken, under which the verdict is made
            verdict = self.verdicts.for_page(listed)
            findings = _summary_of(verdict).findings
        else:
            verdict = self.verdicts.of(listed)

        def make(view: LiveView) -> bytes:
            return drawn(view, name, query, findings).encode()

        question = ("figure", name, *sorted(query.items()), None if verdict is None else verdict.serial)
        _, body = self.live.answer(run_id, question, make)
        return _with({"token": _token(listed, verdict)}, body)

    def scalar(self, run_id: str, query: Mapping[str, str]) -> bytes:
        """Return a scalar of a run."""
        unknown = sorted(query.keys() - {"name"})
        if unknown or not query.get("name"):
            raise ArgumentError(
                f"serve: expected the name of a scalar; got {', '.join(query)[:200] or 'nothing'}. Correct the address."
            )
        name = query["name"]
        listed, body = self.live.answer(run_id, ("scalar", name), lambda view: encoded(scalar_answer(view, name)))
        return _with({"token": _token(listed, self.verdicts.of(listed))}, body)

    def whatif(self, run_id: str, query: Mapping[str, str]) -> bytes:
        """Return the effect of a format and a scale on a run."""
        unknown = sorted(query.keys() - {"format", "shift", "collection"})
        if unknown or not query.get("format"):
            raise ArgumentError(
                f"serve: expected format, and perhaps shift and collection; got {', '.join(query)[:200] or 'nothing'}. "
                "Correct the address."
            )
        fmt, collection = query["format"], query.get("collection") or "gradients"
        shift = whole(query["shift"], "shift") if query.get("shift") else None

        def make(view: LiveView) -> bytes:
            return encoded(whatif_answer(view, fmt, shift, collection))

        listed, body = self.live.answer(run_id, ("whatif", fmt, shift, collection), make)
        return _with({"token": _token(listed, self.verdicts.of(listed))}, body)

    def compare(self, first: str, second: str) -> bytes:
        """Two runs side by side, and where they part."""
        listed = [self.live.opened(run_id) for run_id in (first, second)]
        verdicts = [self.verdicts.for_page(run) for run in listed]
        summaries = [summary_answer(_summary_of(verdict), self.root) for verdict in verdicts]

        def make(a: LiveView, b: LiveView) -> bytes:
            divergence, sentence = difference(a, b, self.root)
            return encoded(
                {
                    "a": summaries[0],
                    "b": summaries[1],
                    "diff": divergence,
                    "sentence": sentence,
                    "collection_labels": LABELS,
                }
            )

        question = ("compare", *(verdict.serial for verdict in verdicts))
        # Apart from the remembered answer: a run that stops being written does not change.
        live = any(run.is_live(self._clock()) for run in listed)
        return _with({"live": live}, self.live.answer_of_two(first, second, question, make))

    def compare_figure(self, first: str, second: str, name: str, query: Mapping[str, str]) -> bytes:
        """A figure of two runs."""
        question = ("figure", name, *sorted(query.items()))
        return self.live.answer_of_two(first, second, question, lambda a, b: drawn_of_two(a, b, name, query).encode())

    def look(self, run_id: str) -> Mapping[str, object] | None:
        """Return the news of a run, or of the list (""), for a stream; None if unknown."""
        if not run_id:
            self.verdicts.looked_at()
            self._found(_FOLLOWED_SECONDS)
            return {"version": self.version}
        try:
            run = self.live.list.run(run_id)
        except RunError:  # storage that does not answer now
            return None
        if run is None:
            return {"id": run_id, "token": "", "last_step": -1}
        self.verdicts.looked_at(run_id)
        return {"id": run.id, "token": _token(run, self.verdicts.of(run)), "last_step": run.last_step}

    def close(self) -> None:
        """Ends the work in the background."""
        self.verdicts.close()

    def _found(self, max_age_seconds: float) -> list[Listed]:
        """The list; that of the last look where storage does not answer."""
        try:
            return self.live.list.runs(max_age_seconds)
        except RunError:
            return self.live.list.known()

    def _row(self, run: Listed, now: float) -> dict[str, object]:
        verdict = self.verdicts.of(run)
        state = "unreadable" if run.problem else "unknown" if verdict is None else verdict.state
        return {
            "id": run.id,
            "name": run.name,
            "state": state,
            "verdict": None if run.problem or verdict is None else verdict.sentence,
            "last_step": run.last_step,
            "closed": run.closed,
            "live": run.is_live(now),
            "created": run.created,
            "modified": run.modified,
            "tensors": run.tensors,
            "ranks": run.ranks,
            "problem": run.problem,
        }

    def _judged(self, run: Listed) -> Summary | str:
        """Return the summary of a run, or why there is none."""
        try:
            return self.live.judged(run, summary)
        except Exception as error:  # noqa: BLE001  (a damaged run must end neither the thread nor the list)
            why = within(str(error), self.root) if isinstance(error, PlimsollError) else type(error).__name__
            return f"Cannot be judged: {why}"


def _settings(runs: Sequence[Listed]) -> list[dict[str, object]]:
    """Return the runs' settings by name, those that differ among them first."""
    values: dict[str, set[object]] = {}
    counts: Counter[str] = Counter()
    readable = [run for run in runs if run.settings]
    for run in readable:
        for name, value in run.settings.items():
            values.setdefault(name, set()).add((type(value), value))
            counts[name] += 1
    differs = {name: len(known) > 1 or counts[name] < len(readable) for name, known in values.items()}
    ordered = sorted(differs, key=lambda name: not differs[name])
    return [{"name": name, "differs": differs[name]} for name in ordered[:_MOST_SETTINGS]]


def _summary_of(verdict: Verdict) -> Summary:
    if verdict.summary is None:
        raise RunError(f"serve: expected a run that can be judged; got one that cannot. {verdict.sentence}")
    return verdict.summary


def _token(listed: Listed, verdict: Verdict | None) -> str:
    """Token that changes when a run has something new to show: data or a verdict."""
    return listed.token if verdict is None else f"{listed.token}-{verdict.serial}"


def _with(head: Mapping[str, object], body: bytes) -> bytes:
    """The entries of both; `body` is an object's JSON."""
    return encoded(head)[:-1] + b", " + body[1:]
