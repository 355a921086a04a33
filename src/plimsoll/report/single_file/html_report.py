"""`html`: a run as one file that needs nothing else: no network, no server, no Plimsoll to read it.

A content security policy in the file itself forbids every request, and every script but the file's own three, which are
known by their hashes. The file is written under a hidden name and renamed: it is there whole, or not at all.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.diagnosis import Finding, View, shown
from plimsoll.diagnosis.what_if.result import estimate_words, interval_words
from plimsoll.diagnosis.what_if.scale_windows import scales
from plimsoll.diagnosis.wording import collection_words
from plimsoll.errors import ArgumentError, MissingExtraError, RunError
from plimsoll.extras import install_line
from plimsoll.report.drawing.plotly_parts import Source, view_of
from plimsoll.report.single_file import embedded_figures
from plimsoll.report.single_file.assets import assets, marked, powers
from plimsoll.report.single_file.offline_whatif import SHIFTS, Offline, collection_of, offline
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import summary
from plimsoll.runs.storage.atomic_files import replacing
from plimsoll.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template

_ENDINGS = (".html", ".htm")
_SPOTS = 60  # layers of a finding that are listed
_ROWS = 15  # of the what-if table, before a script shows others


def html(
    run: Source,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    findings: Sequence[Finding] | None = None,
    until: int | None = None,
) -> Path:
    """Writes the report of a run as one HTML file, and returns its path.

    - `title`: as it comes, the name of the run's folder. `findings`: those of `diagnose`, unless others are given.
    - `until`: tells of the run as it was at this step; not with a `View`, which has its own.

    Raises `ArgumentError` for a path that is a folder, is in one that does not exist, or does not end in .html;
    `RunError` for a folder that holds no run and for a file that cannot be written; `MissingExtraError` without plotly
    and jinja2.
    """
    target = checked_path(path)
    template = _template()
    page = template.render(_content(view_of(run, until, "report"), title, findings))
    try:
        with replacing(target) as file:
            file.write(page.encode("utf-8", "replace"))  # lone surrogates, which no file can hold
    except OSError as error:
        raise RunError(
            f"report: expected a file that can be written; got {target} ({error}). Choose another."
        ) from error
    return target


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path to write a page to; `ArgumentError` for one that cannot be a page's file."""
    path = Path(path)
    if path.suffix.lower() not in ("", *_ENDINGS):
        raise ArgumentError(
            f"report: expected a file that ends in .html, which is what a page is written in; got {path}. "
            f"Write to {path.with_suffix('.html').name}, and print that from a browser for a PDF."
        )
    if path.is_dir():
        raise ArgumentError(f"report: expected the path of a file; got {path}, a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise ArgumentError(f"report: expected a path in a folder that exists; got {path}. Make its folder first.")
    return path


def _template() -> "Template":
    try:
        import plotly  # noqa: F401  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError(
            f"report: expected the packages plotly and jinja2; got no {error.name}. "
            f"Install them: {install_line('report')}"
        ) from error
    loader = PackageLoader("plimsoll.report.single_file", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["powers"] = powers
    return environment.get_template("report.html.jinja")


def _content(view: View, title: str | None, findings: Sequence[Finding] | None) -> dict[str, Any]:
    """All that the template asks for."""
    told, plots = summary(view, findings), embedded_figures.Plots()
    found = told.findings
    keys = embedded_figures.of_findings(plots, view, found)
    scale = [key for key in embedded_figures.of_scale(plots, view, found) if key not in keys]
    layers = embedded_figures.of_layers(plots, view, found)
    collection = collection_of(view)
    answers = offline(view, collection) if collection else []
    hardest = [(collection, name) for name in answers[0].names] if collection and answers else []
    tensors = embedded_figures.of_tensors(plots, view, found, hardest)
    events, events_words = summary_text.events(view.events)
    return {
        "title": summary_text.cut(told.name if title is None else title, 120) or "Run",
        "summary": told,
        "state_word": summary_text.STATES[told.state],
        "counts": summary_text.counted(told),
        "facts": list(summary_text.facts(told)),
        "findings": _findings(found, keys),
        "scale": scale,
        "layers": layers,
        "spectrograms": tensors,
        "spectrogram_words": _of_all(len(tensors), sum(told.tensors.values())),
        "whatif": _whatif(collection or "", answers),
        "events": events,
        "events_words": events_words,
        "problems": [summary_text.cut(problem) for problem in told.problems[:100]],
        "record": list(summary_text.record(told))[:100],
        "settings": summary_text.settings(told)[:100],
        "figures": {key: {**asdict(p), "json": marked(p.json)} for key, p in plots.found.items()},
        "sections": _sections(bool(scale or layers or tensors), bool(answers), bool(events)),
        "path": summary_text.cut(told.path),
        "made": summary_text.moment(time.time()),
        "version": __version__,
        **assets(),
    }


def _findings(found: Sequence[Finding], keys: Sequence[str | None]) -> list[dict[str, Any]]:
    """The findings as the template shows them; a figure that an earlier one has is referred to."""
    first: dict[str, int] = {}
    shown_as: list[dict[str, Any]] = []
    for number, (finding, key) in enumerate(zip(found, keys, strict=True), 1):
        earlier = first.setdefault(key, number) if key else number
        spots = [
            (
                summary_text.cut(summary_text.named(finding, s.name), 160),
                f"{s.since_step:,}",
                summary_text.spot_value(finding, s.value),
            )
            for s in finding.spots[:_SPOTS]
        ]
        shown_as.append(
            {
                "rule": summary_text.cut(finding.rule, 60),
                "severity": finding.severity,
                "severity_word": summary_text.STATES[finding.severity],
                "title": summary_text.heading(finding),
                "explanation": summary_text.explanation(finding),
                "when": summary_text.sentence_case(summary_text.when(finding)),
                "where": summary_text.where(finding),
                "meaning": finding.meaning,
                "advice": finding.advice,
                "evidence": summary_text.evidence(finding),
                "figure": key if earlier == number else None,
                "as_above": earlier if earlier != number else None,
                "spots": spots if len(finding.where) > 1 else [],
                "spots_head": summary_text.spot_heading(finding),
                "spots_noun": summary_text.sentence_case(summary_text.spot_noun(finding)),
                "spots_words": _of_all(len(spots), len(finding.spots), summary_text.spot_noun(finding)),
            }
        )
    return shown_as


def _of_all(kept: int, whole: int, noun: str = "tensor") -> str:
    plural = f"{noun}{'s' if whole != 1 else ''}"
    return f"{whole:,} {plural}" if kept >= whole else f"{kept:,} of {whole:,} {plural}, those that matter most."


def _whatif(collection: str, answers: Sequence[Offline]) -> dict[str, Any] | None:
    if not answers:
        return None
    lead, formats = answers[0], [each.to_dict() for each in answers]
    rows = [
        (shown(row.name), estimate_words(row.fit.lost), estimate_words(row.fit.overflow), _window(row.window))
        for row in lead.answer.rows[:_ROWS]
    ]
    return {
        "collection": collection_words(collection),
        "note": lead.censored,
        "low": SHIFTS[0],
        "high": SHIFTS[-1],
        "formats": [{**each, **{f"{name}_best": interval_words(a.at_best(name)) for name in ("lost", "overflow")}}
                    for each, a in zip(formats, answers, strict=True)],
        "rows": rows,
        "json": marked(embedded_figures.in_page({"low": SHIFTS[0], "high": SHIFTS[-1], "formats": formats})),
    }  # fmt: skip


def _window(window: tuple[int, int] | None) -> str:
    return "none" if window is None else scales(*window)


def _sections(explore: bool, whatif: bool, events: bool) -> list[tuple[str, str]]:
    wanted = [
        ("findings", "Findings", True), ("explore", "Explore", explore), ("whatif", "What if", whatif),
        ("events", "Events", events), ("record", "Record", True),
    ]  # fmt: skip
    return [(anchor, name) for anchor, name, there in wanted if there]
