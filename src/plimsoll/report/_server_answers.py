"""What the live page's API answers, as JSON (docs/how-to/serve.md lists it): made of a run's view and kept with it."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plimsoll.diagnosis import View, whatif
from plimsoll.errors import ArgumentError, NotRecordedError, PlimsollError, RunError
from plimsoll.formats._catalogue import ELEMENTS
from plimsoll.report._live import Live
from plimsoll.report._live_verdicts import Verdicts
from plimsoll.report._live_view import LiveView
from plimsoll.report._runs_list import Listed, within
from plimsoll.report._server_figures import drawn, drawn_of_two, whole
from plimsoll.report._summary import Summary, jsonable, summary
from plimsoll.runs import Run

_ROWS = 50  # layers of a what-if
_EVENTS = 200
_LIST_SECONDS = 0.5  # how old the list may be
OFFERED = tuple(fmt.name for fmt in ELEMENTS if fmt.signed and fmt.name not in ("fp64", "fp32"))


class Answers:
    """The answers to all questions about the runs of a folder. Raises Plimsoll's errors."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.live = Live(Path(folder), clock=clock)
        self.verdicts = Verdicts(lambda: self.live.list.runs(_LIST_SECONDS), self._judged, clock)
        self._clock = clock

    @property
    def root(self) -> Path:
        """The served folder."""
        return self.live.list.folder

    def runs(self) -> bytes:
        """The list of runs."""
        self.verdicts.looked_at()
        found, now = self.live.list.runs(_LIST_SECONDS), self._clock()
        rows = [self._row(run, now) for run in found]
        return encoded({"folder": self.root.name or str(self.root), "version": self.version, "runs": rows})

    @property
    def version(self) -> int:
        """A number that changes with the list."""
        return self.live.list.version + self.verdicts.version

    def run(self, run_id: str) -> bytes:
        """A run's page."""

        def make(view: LiveView) -> bytes:
            events = [
                {"step": e.step, "kind": e.kind, "message": e.message, "details": e.details, "time": e.time}
                for e in view.events[-_EVENTS:]
            ]
            steps = view.run.steps
            return encoded({
                "summary": self._told(self._summary(listed, view)),
                "collections": view.run.tensors,
                "scalars": view.run.scalar_names,
                "steps": {"first": steps[0] if steps else -1, "last": steps[-1] if steps else -1, "count": len(steps)},
                "formats": OFFERED,
                "settings": view.run.settings,
                "events": events,
            })  # fmt: skip

        listed = self.live.listed(run_id)
        token, body = self.live.answer(run_id, "run", make)
        return _with(
            {"id": listed.id, "name": listed.name, "live": listed.is_live(self._clock()), "token": token}, body
        )

    def figure(self, run_id: str, name: str, query: Mapping[str, str]) -> bytes:
        """A figure of a run."""
        listed = self.live.listed(run_id)

        def make(view: LiveView) -> bytes:
            return drawn(view, name, query, lambda: self._summary(listed, view).findings).encode()

        token, body = self.live.answer(run_id, ("figure", name, *sorted(query.items())), make)
        return _with({"token": token}, body)

    def whatif(self, run_id: str, query: Mapping[str, str]) -> bytes:
        """What a format would make of a run."""
        unknown = sorted(query.keys() - {"format", "shift", "collection"})
        if unknown or not query.get("format"):
            raise ArgumentError(
                f"serve: expected format, and perhaps shift and collection; got {', '.join(query)[:200] or 'nothing'}. "
                "Correct the address."
            )
        fmt, collection = query["format"], query.get("collection") or "gradients"
        shift = whole(query["shift"], "shift") if query.get("shift") else None

        def make(view: LiveView) -> bytes:
            return encoded(_whatif(view, fmt, shift, collection))

        token, body = self.live.answer(run_id, ("whatif", fmt, shift, collection), make)
        return _with({"token": token}, body)

    def compare(self, first: str, second: str) -> bytes:
        """Two runs side by side, and where they part."""
        listed = [self.live.listed(each) for each in (first, second)]

        def make(a: LiveView, b: LiveView) -> bytes:
            told = [self._told(self._summary(each, view)) for each, view in zip(listed, (a, b), strict=True)]
            divergence, sentence = _diff(a, b, self.root)
            return encoded({"a": told[0], "b": told[1], "diff": divergence, "sentence": sentence})

        return self.live.answer_of_two(first, second, "compare", make)

    def compare_figure(self, first: str, second: str, name: str, query: Mapping[str, str]) -> bytes:
        """A figure of two runs."""
        question = ("figure", name, *sorted(query.items()))
        return self.live.answer_of_two(first, second, question, lambda a, b: drawn_of_two(a, b, name, query).encode())

    def look(self, run_id: str) -> Mapping[str, object] | None:
        """What a stream tells of a run, or of the list (""); None where nothing can be told."""
        if not run_id:
            self.verdicts.looked_at()
            self.live.list.runs(_LIST_SECONDS)
            return {"version": self.version}
        found = self.live.list.run(run_id)
        if found is None:
            return {"id": run_id, "token": "", "last_step": -1}
        return {"id": found.id, "token": found.token, "last_step": found.last_step}

    def close(self) -> None:
        """Ends the work in the background."""
        self.verdicts.close()

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

    def _summary(self, listed: Listed, view: View) -> Summary:
        """The summary of an open run, made once for each of its states; the list gets its verdict, too."""
        kept: dict[str, Any] = view.__dict__.setdefault("_told", {})
        if kept.get("token") != listed.token:
            begun = time.perf_counter()
            kept.update(token=listed.token, summary=summary(view))
            told: Summary = kept["summary"]
            self.verdicts.say(listed, told.state, told.verdict, time.perf_counter() - begun)
        return kept["summary"]

    def _told(self, found: Summary) -> dict[str, object]:
        problems = [within(problem, self.root) for problem in found.problems]
        return {**found.to_dict(), "path": within(found.path, self.root), "problems": problems}

    def _judged(self, run: Listed) -> tuple[str, str | None]:
        """The verdict on a run that need not be open, for the list."""
        try:
            found = summary(View(Run(run.path, warn=False)))
        except Exception as error:  # noqa: BLE001  (a damaged run must not end the thread; its row says what it met)
            why = within(str(error), self.root) if isinstance(error, PlimsollError) else type(error).__name__
            return "unreadable", f"Cannot be judged: {why}"
        return found.state, found.verdict


def encoded(data: Mapping[str, object]) -> bytes:
    """JSON in ASCII, without what browsers cannot read: numbers that are none are their names."""
    try:
        return json.dumps(data, allow_nan=False).encode()
    except ValueError:
        return json.dumps(jsonable(data), allow_nan=False).encode()


def _with(head: Mapping[str, object], body: bytes) -> bytes:
    """The entries of both; `body` is an object's JSON."""
    return encoded(head)[:-1] + b", " + body[1:]


def _whatif(view: View, fmt: str, shift: int | None, collection: str) -> dict[str, object]:
    best = whatif(view, fmt, None, collection)
    found = best if shift is None else whatif(view, fmt, shift, collection)
    steps, lost, over = found.over_time()
    return {
        "format": found.format,
        "collection": collection,
        "sentence": found.sentence,
        "shift": found.shift,
        "best_shift": best.shift,
        "chosen": found.chosen,
        "censored": found.censored,
        "overall": found.overall.to_dict(),
        "rows": [row.to_dict() for row in found.rows[:_ROWS]],
        "more": max(len(found.rows) - _ROWS, 0),
        "over_time": {"step": steps.tolist(), "lost": lost.tolist(), "overflow": over.tolist()},
        "stretches": [stretch.to_dict() for stretch in found.stretches],
    }


def _diff(first: View, second: View, root: Path) -> tuple[object, str]:
    """Where two runs part, as data and in a sentence; no data where they cannot be compared."""
    from plimsoll.diagnosis import diff

    try:
        found = diff(first, second)
    except (NotRecordedError, ArgumentError, RunError) as error:
        return None, within(str(error), root)
    return found.to_dict(), found.sentence
