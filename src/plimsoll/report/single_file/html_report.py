"""`html`: a run as one file that needs no network, no server, no Plimsoll."""

import base64
import gzip
import hashlib
import html as markup
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from plimsoll.checks import regular_file
from plimsoll.diagnosis import Finding, View, shown
from plimsoll.diagnosis.estimates.usable_scales import scales
from plimsoll.diagnosis.finding import collection_words
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.diagnosis.what_if.result import estimate_words, interval_words
from plimsoll.errors import ArgumentError, MissingExtraError, RunError
from plimsoll.extras import install_line
from plimsoll.report.page.assets import FILES, PLOTLY, script
from plimsoll.report.single_file.embedded_answers import Offline, collection_of, embedded, offline
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary, summary
from plimsoll.results import as_data
from plimsoll.runs.storage.atomic_files import replacing
from plimsoll.text import capital
from plimsoll.version import __version__

_ENDINGS = (".html", ".htm")
_LINKS = re.compile(r'^ *<(?:link rel="(?:icon|stylesheet)"|script (?:type|src)=|!-- ).*\n', re.MULTILINE)
_NOSCRIPT = re.compile(r"<noscript>.*?</noscript>", re.DOTALL)


def html(
    run: Source,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    findings: Sequence[Finding] | None = None,
    until: int | None = None,
) -> Path:
    """Write the report of a run as one HTML file.

    Args:
        run: The run, its folder, or a view of it.
        path: The file to write. Its name ends in .html.
        title: The title. Default: the name of the run's folder.
        findings: The findings to show. Default: those of `diagnose`.
        until: Show the run as it was at this step; not with a `View`, which has its own.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: The path is a folder, is in one that does not exist, or does not end in .html.
        RunError: The folder holds no run, or the file cannot be written.
        MissingExtraError: plotly is not installed.
    """
    target = checked_path(path)
    _needs_plotly()
    page = _page(view_of(run, until, "report"), title, findings)
    try:
        # Written under a hidden name and renamed: the file is there whole, or not at all.
        with replacing(target) as file:
            file.write(page.encode("utf-8", "replace"))  # lone surrogates, which no file can hold
    except OSError as error:
        raise RunError(
            f"report: expected a file that can be written; got {target} ({error}). Choose another."
        ) from error
    return target


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path to write a page to; ArgumentError if no page can be written there."""
    path = regular_file("report", path)
    if path.suffix.lower() not in ("", *_ENDINGS):
        raise ArgumentError(
            f"report: expected a file that ends in .html, which is what a page is written in; got {path}. "
            f"Write to {path.with_suffix('.html').name}, and print that from a browser for a PDF."
        )
    if not path.parent.is_dir():
        raise ArgumentError(f"report: expected a path in a folder that exists; got {path}. Make its folder first.")
    return path


def _needs_plotly() -> None:
    try:
        import plotly  # noqa: F401  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]
    except ImportError as error:
        raise MissingExtraError(
            f"report: expected the package plotly; got none. Install it: {install_line('report')}"
        ) from error


def _page(view: View, title: str | None, findings: Sequence[Finding] | None) -> str:
    judged = summary(view, findings)
    name = summary_text.cut(judged.name if title is None else str(title), 120) or "Run"
    collection = collection_of(view)
    answers = offline(view, collection) if collection else []
    content = embedded(view, judged, answers, collection)
    content["run"] |= {
        "id": "run",
        "name": name,
        "live": False,
        "token": "",
        "made": f"Made by Plimsoll {__version__} on {summary_text.moment(time.time())} from "
        f"{summary_text.cut(judged.path)}. This file is self-contained and makes no network requests.",
    }
    text = text_page(view, judged, answers, collection)
    return _assembled(f"{name} ({judged.state})", content, text, content["run"]["made"])


def _assembled(title: str, content: object, text: str, made: str) -> str:
    """Return the page's HTML with style, scripts and answers inside, and without links to files."""
    first, plotly, page = (FILES / "js" / "first.js").read_text("utf-8"), PLOTLY.read_text("utf-8"), script()
    style = "".join((FILES / "css" / f"{name}.css").read_text("utf-8") for name in ("base", "parts", "views"))
    answers = json.dumps(as_data(content), separators=(",", ":"), allow_nan=False)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy((first, plotly, page))}">\n'
        f'<meta name="generator" content="Plimsoll {__version__}">\n'
        f"<title>{markup.escape(summary_text.printable(title))} - Plimsoll</title>\n"
        f"<style>{style}</style>\n<script>{first}</script>\n"
    )
    body = (
        f'<script type="text/plain" id="answers">{packed(answers)}</script>\n'
        f'<script type="text/plain" id="plotly">{packed(plotly)}</script>\n<script>{page}</script>\n'
    )
    index = _LINKS.sub("", (FILES / "index.html").read_text("utf-8"))
    index = re.sub(r" *<title>.*</title>\n", lambda _: head, index)
    index = _NOSCRIPT.sub(
        lambda _: f'<noscript><div class="view text">\n{text}\n<footer>{markup.escape(made)}</footer></div></noscript>',
        index,
    )
    return index.replace("  </body>", f"{body}  </body>")


def packed(text: str) -> str:
    """Return text for browsers to unpack, without a time: equal texts pack alike."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


# The file holds the page of `plimsoll serve` and the answers to its questions. A content security policy in the file
# forbids every request, and every script but the file's own three, which it knows by their hashes.
def policy(scripts: Iterable[str]) -> str:
    """Return the content security policy: no sources but the page, scripts by hash.

    Plotly writes its own styles.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


# -- text without scripts: verdict, findings, what-if, events, record --------------------------------------------------

_SPOTS = 60  # layers of a finding that are listed
_ROWS = 15  # of the what-if table


def text_page(view: View, summary: Summary, answers: Sequence[Offline], collection: str | None) -> str:
    """Return a report's text as HTML, with what-if answers on `collection`, if any. Text of the run is escaped."""
    nothing = "There is nothing to judge: the run holds no records." if summary.state == "empty" else "No findings."
    counts = summary_text.counted(summary)
    parts = [
        f"<p>{_text(summary_text.STATES[summary.state])}{f': {counts}' if counts else ''}</p>",
        f"<h1>{_text(summary.verdict)}</h1>",
        _pairs(summary_text.facts(summary)),
        "<h2>Findings</h2>",
        *([] if summary.findings else [f"<p>{nothing}</p>"]),
        *map(_finding, summary.findings),
        "<p>The figures need JavaScript.</p>",
    ]
    if answers and collection:
        parts += ["<h2>What if</h2>", *_what_if(answers, collection)]
    rows, words = summary_text.events(view.events)
    if rows:
        joined = [(step, kind, f"{message} {details}".strip(), when) for step, kind, message, details, when in rows]
        parts += ["<h2>Events</h2>", f"<p>{_text(words)}</p>", _table(("Step", "What", "Message", "When"), joined)]
    parts.append("<h2>The record</h2>")
    if summary.problems:
        parts += ["<h3>Problems</h3>", *(f"<p>{_text(summary_text.cut(p))}</p>" for p in summary.problems[:100])]
    parts += [_pairs(list(summary_text.record(summary))[:100]), _pairs(summary_text.settings(summary)[:100])]
    return "\n".join(parts)


def _finding(finding: Finding) -> str:
    where = summary_text.where(finding)
    spots = [
        (
            summary_text.cut(summary_text.named(finding, spot.name), 160),
            f"{spot.since_step:,}",
            summary_text.spot_value(finding, spot.value),
        )
        for spot in finding.spots[:_SPOTS]
    ]
    noun = capital(summary_text.spot_noun(finding))
    return "\n".join(
        [
            f'<article class="finding {finding.severity}"><h3>{_text(summary_text.heading(finding))}</h3>',
            f"<p>{_text(summary_text.STATES[finding.severity])}. {_text(summary_text.explanation(finding))}</p>",
            f"<p>{_text(capital(summary_text.when(finding)))}{_text(where and f', in {where}')}</p>",
            f"<p>{_text(finding.meaning)}</p>",
            f"<p>What to do: {_text(advice)}</p>" if (advice := summary_text.advice(finding)) else "",
            _pairs(summary_text.evidence(finding)),
            _table((noun, "Since step", summary_text.spot_heading(finding)), spots) if len(spots) > 1 else "",
            "</article>",
        ]
    )


def _what_if(answers: Sequence[Offline], collection: str) -> list[str]:
    lead = answers[0]
    needs = [
        (
            answer.answer.format.upper(),
            answer.sentence,
            f"2^{answer.best}",
            interval_words(answer.at_best("lost")),
            interval_words(answer.at_best("overflow")),
        )
        for answer in answers
    ]
    rows = [
        (
            shown(row.name),
            estimate_words(row.fit.lost),
            estimate_words(row.fit.overflow),
            "none" if row.window is None else scales(*row.window),
        )
        for row in lead.answer.rows[:_ROWS]
    ]
    return [
        f"<p>Another format for this run's {_text(collection_words(collection))}. {_text(lead.censored)}</p>",
        _table(("Format", "What it needs", "Best scale", "Lost there", "Overflow"), needs),
        f"<h3>{_text(lead.answer.format.upper())} at its best scale: tensors, the worst first</h3>",
        _table(("Tensor", "Lost", "Overflow", "Scales that work"), rows),
    ]


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    inside = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{inside}</dl>' if inside else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(text)}</th>' for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _text(text: str) -> str:
    return markup.escape(summary_text.printable(text))
