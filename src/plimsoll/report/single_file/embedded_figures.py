"""The figures of a report as JSON in a page: those of findings, and those to explore, within a budget of bytes.

A figure that has nothing to show is left out. Themes are the page's business: a figure's template is taken off it, and
the page puts its own on.
"""

import html as markup
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plimsoll.diagnosis import Finding, View, shown
from plimsoll.diagnosis.wording import collection_words
from plimsoll.errors import NotRecordedError
from plimsoll.report.drawing.theme import TEMPLATES
from plimsoll.report.figure_declaration import Case
from plimsoll.report.verdicts.summary_text import cut

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

BUDGET_BYTES = 4_200_000  # with Plotly's 4.8 MB that leaves a tenth of ten for the text
_FINDINGS = 24  # whose figures are shown; the gravest come first
_SPECTROGRAMS = 40
_EACH = 3  # tensors that a finding names
_HEIGHT = 420
_TOP, _TOP_WITHOUT_TITLE = TEMPLATES["light"]["layout"]["margin"]["t"], 52  # pixels of margin, for a legend and marks
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure in the page: title and subtitle, which stand above it as text, its height, and all of it as JSON."""

    title: str
    subtitle: str
    height: int
    json: str


class Plots:
    """The figures of one page by their ids; adding tells the id, or None for a figure that is left out."""

    def __init__(self) -> None:
        self.found: dict[str, Plot] = {}
        self.bytes = 0

    def add(self, make: "Callable[[], Figure]", budget: int = BUDGET_BYTES) -> str | None:
        """Makes a figure and keeps it, unless it is empty or there is no room left."""
        if self.bytes >= budget:
            return None
        try:
            whole: dict[str, Any] = json.loads(str(make().to_json()))  # pyright: ignore[reportUnknownMemberType]
        except NotRecordedError:  # what it would show was not recorded
            return None
        return None if (whole["layout"].get("meta") or {}).get("empty") else self._keep(plot_of(whole))

    def _keep(self, plot: Plot) -> str:
        for key, known in self.found.items():
            if known.json == plot.json:
                return key
        key = f"figure-{len(self.found) + 1}"
        self.found[key] = plot
        self.bytes += len(plot.json)
        return key


def plot_of(whole: dict[str, Any]) -> Plot:
    """A figure, as JSON-able data, as a page holds it."""
    layout = whole["layout"]
    for name in ("template", "meta", "width"):
        layout.pop(name, None)
    height = int(layout.pop("height", None) or _HEIGHT)
    title = layout.pop("title", {})
    above = {"title": _words(title) or "Figure", "subtitle": _words(title.get("subtitle") or {})}
    margin = layout.setdefault("margin", {})
    height, margin["t"] = height - (margin.get("t", _TOP) - _TOP_WITHOUT_TITLE), _TOP_WITHOUT_TITLE
    return Plot(**above, height=height, json=in_page({**above, "height": height, "figure": whole}))


def in_page(value: object) -> str:
    """JSON that can stand within a script element: nothing in it ends one or begins a comment."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)


def _words(title: dict[str, Any]) -> str:
    """A figure's title as plain text: what figures escape comes back, and powers are written 2^10."""
    text = re.sub(r"<sup>(.*?)</sup>", r"^\1", str(title.get("text") or ""))
    return cut(markup.unescape(re.sub(r"<[^>]*>", " ", text)).strip().replace("\N{MINUS SIGN}", "-"))


def of_findings(plots: Plots, view: View, findings: Sequence[Finding]) -> list[str | None]:
    """The id of each finding's figure; None where there is none, or no room."""
    from plimsoll.report.figure_registry import figure_for
    from plimsoll.report.figures.loss_and_scale import loss_and_scale

    def figure(finding: Finding) -> "Figure":
        # One figure of the loss tells of all findings; each would else have the same curve with another mark.
        return loss_and_scale(view, findings) if finding.figure == "loss_and_scale" else figure_for(view, finding)

    return [plots.add(lambda f=f: figure(f)) if i < _FINDINGS else None for i, f in enumerate(findings)]


def of_scale(plots: Plots, view: View, findings: Sequence[Finding]) -> list[str]:
    """Add the figures that are offered with the loss scale. Return their ids."""
    return [key for key, _ in _offered(plots, view, "scale", findings)]


def of_layers(plots: Plots, view: View, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Add the figures of layers over steps. Return ids and labels, those that findings show already last."""
    return _offered(plots, view, "layers", findings)


def _offered(plots: Plots, view: View, section: str, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    from plimsoll.report.figure_registry import figures_of

    above = {(f.figure.removesuffix("_heatmap"), f.collection) for f in findings}

    def is_above(case: Case) -> bool:
        return (case.arguments.get("statistic"), case.arguments.get("collection")) in above

    added: list[tuple[str, str]] = []
    for declared in figures_of(1).values():
        if declared.offered != section:
            continue
        cases = [Case(label=declared.name, arguments={})] if declared.cases is None else declared.cases(view)
        shared = {"findings": findings} if declared.takes_findings else {}
        # The budget of bytes may end first: what findings already show is added last.
        for case in sorted(cases, key=is_above):
            key = plots.add(lambda c=case, d=declared, s=shared: d.function(view, **c.arguments, **s))
            if key is not None:
                added.append((key, case.label))
    return added


def of_tensors(
    plots: Plots, view: View, findings: Sequence[Finding], hardest: Sequence[tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """Spectrograms of the tensors that matter most: id, what it is called in a list, and its whole name."""
    from plimsoll.report.figures.spectrogram import spectrogram

    found: list[tuple[str, str, str]] = []
    for collection, name in _ordered(view, findings, hardest):
        if len(found) >= _SPECTROGRAMS:
            break
        key = plots.add(lambda c=collection, n=name: spectrogram(view, c, n))
        if key is not None and all(key != known for known, *_ in found):
            found.append((key, f"{shown(name)} · {_kind(collection)}", cut(name)))
    return found


def _kind(collection: str) -> str:
    return cut(collection_words(collection))


def _ordered(view: View, findings: Sequence[Finding], hardest: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Tensors, each once: those that findings name, those that are hardest to hold, then some of each collection."""
    named = [(f.collection, name) for f in findings if f.collection for name in f.where[:_EACH]]
    spread = [(c, names[int(i * len(names) / 6)]) for c, names in view.run.tensors.items() if names for i in range(6)]
    for collection, name in dict.fromkeys([*named, *hardest[:12], *spread]):
        if name in view.run.tensors.get(collection, ()):
            yield collection, name
