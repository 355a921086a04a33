"""Answers of the live page's API as JSON, cached with the run's view.

docs/how-to/serve.md lists them.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from plimsoll.diagnosis import Finding, View
from plimsoll.errors import ArgumentError, PlimsollError, RunError
from plimsoll.report.live.background_verdicts import Verdict, Verdicts
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
from plimsoll.report.verdicts.run_summary import Summary, first_step, median_loss, seconds_of, summary
from plimsoll.tensor_collections import LABELS

MOST_COLUMNS = 16  # settings that a list shows at a time
_MOST_SETTINGS = 200  # names that are offered
_LIST_SECONDS = 0.5  # how old the list may be
_FOLLOWED_SECONDS = 1.5  # the same for who only waits to hear of a change


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
        """Return the list of runs.

        Args:
            columns: Names of settings whose values are wanted.

        Raises:
            ArgumentError: There are more than `MOST_COLUMNS` names.
        """
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
            return encoded(run_answer(view, _renewed(_summary_of(verdict), view), self.root))

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


def _renewed(found: Summary, view: View) -> Summary:
    """A summary with the facts of now, where its verdict is a few steps old."""
    run = view.run
    last = {name: view.scalar(name)[1] for name in ("loss", "scale")}
    return replace(
        found,
        first_step=first_step(view, run.steps),
        last_step=view.last_step,
        samples=len(run.steps),
        tensors={collection: len(names) for collection, names in run.tensors.items()},
        scalars=tuple(run.scalar_names),
        ranks=len(run.ranks),
        closed=run.closed,
        seconds=seconds_of(run, found.created),
        loss=float(last["loss"][-1]) if len(last["loss"]) else None,
        median_loss=median_loss(last["loss"]),
        scale=float(last["scale"][-1]) if len(last["scale"]) else None,
        problems=tuple(run.problems),
        dropped=run.dropped,
    )


def _token(listed: Listed, verdict: Verdict | None) -> str:
    """Token that changes when a run has something new to show: data or a verdict."""
    return listed.token if verdict is None else f"{listed.token}-{verdict.serial}"


def _with(head: Mapping[str, object], body: bytes) -> bytes:
    """The entries of both; `body` is an object's JSON."""
    return encoded(head)[:-1] + b", " + body[1:]
