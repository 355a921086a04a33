"""Answers stored in a report: the run, figures within a size limit, and what-if."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.what_if.result import interval_words
from plimsoll.errors import NotRecordedError
from plimsoll.report.drawing.plotly_parts import TEMPLATES
from plimsoll.report.figure_registry import FIGURES
from plimsoll.report.page.answers import first_tensor, run_answer
from plimsoll.report.page.figures import drawn, offered
from plimsoll.report.page.scalars import in_order, scalar_answer
from plimsoll.report.single_file.offline_whatif import SHIFTS, Offline
from plimsoll.report.verdicts.run_summary import Summary

BUDGET_BYTES = 1_600_000  # of figures, packed; in base64 that is 2.2 MB of a file whose goal is 3 MB
_FINDINGS = 24  # whose figures are shown; the most severe come first
_SPECTROGRAMS = 40
_EACH = 3  # tensors that a finding names
_SCALARS, _POINTS = 40, 300  # some 4 KB each, packed
_DRAWN = ("loss", "scale", "nonfinite")  # the figure of loss and scale shows them; a report has no figure twice


class Figures:
    """Figures of a report by question, without empty ones and those without room."""

    def __init__(self, view: View, findings: Sequence[Finding]) -> None:
        self._view, self._findings = view, findings
        self.asked: list[tuple[str, Mapping[str, Any], int]] = []
        self.bodies: list[dict[str, Any]] = []
        self._texts: dict[str, int] = {}
        self.bytes = 0

    def add(self, name: str, arguments: Mapping[str, Any], budget: int = BUDGET_BYTES) -> int | None:
        """Draw a figure as the live page's API does.

        Args:
            name: The figure.
            arguments: Its arguments, as in an address.
            budget: The packed size from which on no figure is added, in bytes.

        Returns:
            The place of its body; None for a figure that is left out.
        """
        return self._add(name, arguments, lambda: drawn(self._view, name, _query(arguments), self._findings), budget)

    def add_of_finding(self, index: int) -> int | None:
        """Draw a finding's figure and return its place; None if it is left out."""
        name, arguments = self._findings[index].figure, {"finding": index}
        if name not in FIGURES:  # a custom rule may name a figure that does not exist
            return None
        # One figure of the loss shows all findings. Each would else have the same curve with another mark.
        query = {} if name == "loss_and_scale" else _query(arguments)
        return self._add(name, arguments, lambda: drawn(self._view, name, query, self._findings), BUDGET_BYTES)

    def _add(self, name: str, arguments: Mapping[str, Any], draw: Callable[[], str], budget: int) -> int | None:
        if self.bytes >= budget:
            return None
        try:
            body: dict[str, Any] = json.loads(draw())["figure"]
        except NotRecordedError:  # what it would show was not recorded
            return None
        if (body["layout"].get("meta") or {}).get("empty"):
            return None
        del body["layout"]["template"]  # the page puts its own on, in the theme that is shown
        text = json.dumps(body, separators=(",", ":"))
        if text not in self._texts:
            self._texts[text] = len(self.bodies)
            self.bodies.append(body)
            self.bytes += _packed_bytes(text)
        self.asked.append((name, arguments, self._texts[text]))
        return self._texts[text]


def _packed_bytes(text: str) -> int:
    return len(zlib.compress(text.encode(), 1))


def embedded(view: View, summary: Summary, answers: Sequence[Offline], collection: str | None) -> dict[str, Any]:
    """Return all that a report's page asks for: run, figures, what-if answers.

    Args:
        view: The run.
        summary: Its summary.
        answers: What each offered format would make of the collection.
        collection: The collection that what-if is about; None for none.
    """
    findings = summary.findings
    figures = Figures(view, findings)
    logged = [name for name in in_order(view.run.scalar_names) if name not in _DRAWN]
    scalars = [scalar_answer(view, name, _POINTS) for name in logged[:_SCALARS]]
    figures.bytes += _packed_bytes(json.dumps(scalars, separators=(",", ":")))
    bodies = [figures.add_of_finding(i) if i < _FINDINGS else None for i in range(len(findings))]
    first = {body: i for i, body in reversed(list(enumerate(bodies))) if body is not None}
    above = {(f.figure.removesuffix("_heatmap"), f.collection) for f in findings}

    def is_above(drawing: Mapping[str, Any]) -> bool:
        return (drawing["arguments"].get("statistic"), drawing["arguments"].get("collection")) in above

    # The budget of bytes may end first: what findings already show is added last.
    pictures = [
        d
        for d in sorted(_pictures(view, findings), key=is_above)
        if figures.add(d["figure"], d["arguments"]) is not None
    ]
    hardest = [(collection, name) for name in answers[0].names] if collection and answers else []
    tensors = spectrograms(figures, view, findings, hardest)
    included, series = sum(map(len, tensors.values())), sum(summary.tensors.values())
    run = {
        **run_answer(view, summary),
        "same_figure": [None if body is None else first[body] for body in bodies],
        "pictures": pictures,
        "collections": tensors,
        "tensors_kept": "" if included == series else f"{included:,} of {series:,} tensors, those that matter most.",
        "formats": [answer.answer.format for answer in answers],
        "whatif": _needs(collection, answers) if collection and answers else None,
        "scalars": [scalar["name"] for scalar in scalars],
        "events": [],  # the page shows the words for events and settings, and not their data
        "settings": {},
    }
    formats = [answer.to_dict() for answer in answers]
    return {
        "run": run,
        "templates": {name: dict(template) for name, template in TEMPLATES.items()},
        "scalars": scalars,
        "figures": figures.asked,
        "bodies": figures.bodies,
        "whatif": {"low": SHIFTS[0], "high": SHIFTS[-1], "collection": collection, "formats": formats},
    }


def spectrograms(
    figures: Figures, view: View, findings: Sequence[Finding], hardest: Sequence[tuple[str, str]]
) -> dict[str, list[str]]:
    """Add spectrograms of the tensors that matter most; return names by collection."""
    tensors: dict[str, list[str]] = {}
    count = 0
    for collection, name in _ordered(view, findings, hardest):
        if count >= _SPECTROGRAMS:
            break
        if figures.add("spectrogram", {"collection": collection, "name": name}) is not None:
            tensors.setdefault(collection, []).append(name)
            count += 1
    return tensors


def _pictures(view: View, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return list(offered(view, findings))


def _query(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in arguments.items()}


def _needs(collection: str, answers: Sequence[Offline]) -> dict[str, object]:
    """Needs of each format, in words."""
    return {
        "collection": collection,
        "note": answers[0].censored,
        "needs": [
            {
                "format": answer.answer.format,
                "sentence": answer.sentence,
                "best": answer.best,
                "lost": interval_words(answer.at_best("lost")),
                "overflow": interval_words(answer.at_best("overflow")),
            }
            for answer in answers
        ],
    }


def _ordered(view: View, findings: Sequence[Finding], hardest: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield each tensor once: those of findings, the hardest to hold, then others."""
    first = first_tensor(view, findings)
    named = [] if first is None else [(first["collection"], first["name"])]
    named += [(f.collection, name) for f in findings if f.collection for name in f.where[:_EACH]]
    spread = [(c, names[int(i * len(names) / 6)]) for c, names in view.run.tensors.items() if names for i in range(6)]
    for collection, name in dict.fromkeys([*named, *hardest[:12], *spread]):
        if name in view.run.tensors.get(collection, ()):
            yield collection, name
