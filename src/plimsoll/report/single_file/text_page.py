"""Text of a report without scripts: verdict, findings, what-if, events, record."""

import html
from collections.abc import Iterable, Sequence

from plimsoll.diagnosis import Finding, View, shown
from plimsoll.diagnosis.what_if.result import estimate_words, interval_words
from plimsoll.diagnosis.what_if.scale_windows import scales
from plimsoll.diagnosis.wording import collection_words
from plimsoll.report.single_file.offline_whatif import Offline
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary

_SPOTS = 60  # layers of a finding that are listed
_ROWS = 15  # of the what-if table


def text_page(view: View, summary: Summary, answers: Sequence[Offline], collection: str | None) -> str:
    """Return the text of a report as HTML. Everything from the run is escaped.

    Args:
        view: The run.
        summary: Its summary.
        answers: What each offered format would make of the collection.
        collection: The collection that what-if is about; None for none.
    """
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
    noun = summary_text.sentence_case(summary_text.spot_noun(finding))
    return "\n".join(
        [
            f'<article class="finding {finding.severity}"><h3>{_text(summary_text.heading(finding))}</h3>',
            f"<p>{_text(summary_text.STATES[finding.severity])}. {_text(summary_text.explanation(finding))}</p>",
            f"<p>{_text(summary_text.sentence_case(summary_text.when(finding)))}{_text(where and f', in {where}')}</p>",
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
    return html.escape(summary_text.printable(text))
