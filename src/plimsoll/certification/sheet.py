"""Sheets of a certificate: text for a terminal, Markdown, and a page of HTML that needs no other file."""

import html as _html
import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from plimsoll.text import counted, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plimsoll.certification.certificate import Certificate, Row, Status

_WIDTH = 100
_ORDER: "tuple[Status, ...]" = ("deviates", "refuses", "conforms", "not tried")
_COLOURS: "dict[Status, str]" = {"deviates": "bold red", "refuses": "yellow", "conforms": "green", "not tried": "dim"}
# Chosen for a contrast of at least 4.5 to 1 on white and on the dark background.
_STYLE = """
.plimsoll-certificate{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;max-width:70em}
.plimsoll-certificate table{border-collapse:collapse;margin:.6em 0 1.4em;font-size:.93em}
.plimsoll-certificate th,.plimsoll-certificate td{text-align:left;vertical-align:top;padding:.3em .9em .3em 0;
border-bottom:1px solid #d8dde3;background:none;color:inherit}
.plimsoll-certificate code{font:.95em ui-monospace,monospace;overflow-wrap:anywhere;background:none;color:inherit}
.plimsoll-certificate h1{font-size:1.35em;line-height:1.3}.plimsoll-certificate h2{font-size:1.05em;margin:1.2em 0 0}
.plimsoll-certificate .deviates{color:#b3261e;font-weight:600}.plimsoll-certificate .conforms{color:#1a6b3c}
.plimsoll-certificate .refuses{color:#7a5200}
.plimsoll-certificate .facts,.plimsoll-certificate .not-tried{color:#59636e}
@media(prefers-color-scheme:dark){.plimsoll-certificate{color:#e6e9ed}
.plimsoll-certificate th,.plimsoll-certificate td{border-color:#3b434c}
.plimsoll-certificate .deviates{color:#ff9a90}.plimsoll-certificate .conforms{color:#7fd6a3}
.plimsoll-certificate .refuses{color:#f0c060}
.plimsoll-certificate .facts,.plimsoll-certificate .not-tried{color:#9aa5b1}}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{margin:2em auto;max-width:70em;padding:0 1.2em}}
@media(prefers-color-scheme:dark){{body{{background:#15191e}}}}</style></head>
<body>{body}</body></html>
"""


# ------------------------------------------------------------------------------------------------------ what it has


def sorted_rows(certificate: "Certificate") -> "list[Row]":
    """Return the rows that deviate first, then refusals, those that conform, and those that were not tried."""
    return sorted(certificate.rows, key=lambda row: _ORDER.index(row.status))


def specification_lines(certificate: "Certificate") -> list[str]:
    """Return for each specification a sentence on the rows that cite it."""
    lines: list[str] = []
    for name in dict.fromkeys(row.source.split(",")[0] for row in certificate.rows):
        rows = [row for row in certificate.rows if row.source.split(",")[0] == name]
        deviating = [row.requirement for row in rows if row.status == "deviates"]
        conforming = sum(row.status == "conforms" for row in rows)
        if not deviating and not conforming:
            continue
        parts = [f"conforms in {counted(conforming, 'row')}"] if conforming else []
        parts += [f"deviates in {len(deviating)} ({', '.join(deviating)})"] if deviating else []
        lines.append(f"{name}: {', '.join(parts)}")
    return lines


def facts_line(certificate: "Certificate") -> str:
    """Return versions, machine, day, calls and time in one line."""
    versions = [f"{name} {version}" for name, version in certificate.versions.items()]
    work = f"{counted(certificate.calls, 'call')} in {certificate.seconds:.1f} s on {certificate.device}"
    return ", ".join([*versions, certificate.date, work])


def inferred_lines(certificate: "Certificate") -> list[tuple[str, str]]:
    """Return names and values of what was inferred; facts without a value are left out."""
    shown = {True: "yes", False: "no"}
    return [
        (name.replace("_", " "), shown[value] if isinstance(value, bool) else str(value))
        for name, value in certificate.inferred.items()
        if value is not None
    ]


def remark(row: "Row") -> str:
    """Return the counterexample of a row that deviates, the error of a refusal, or the detail of another."""
    if row.counterexample is not None:
        return str(row.counterexample)
    return row.detail


def _counts(row: "Row") -> str:
    """Return how many inputs were tried, and how many of them were wrong."""
    if row.status == "not tried":
        return "not tried"
    tried = f"{row.tried:,} tried"
    return f"{tried}, {row.wrong:,} wrong" if row.status == "deviates" and row.tried > 1 else tried


def _paragraphs(certificate: "Certificate") -> list[tuple[str, tuple[str, ...]]]:
    return [("Not tried", certificate.not_tried), ("Noticed", certificate.notes)]


# ------------------------------------------------------------------------------------------------------------- text


def renderables(certificate: "Certificate") -> "Iterator[RenderableType]":
    """Yield the sheet's parts for a console of any width."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    yield Text(printable(certificate.verdict), style="bold green" if certificate.conforms else "bold red")
    yield Text(printable(facts_line(certificate)), style="dim")
    yield Text()
    for line in specification_lines(certificate):
        yield Padding(Text(line), (0, 0, 0, 2))
    yield Text()
    known = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    known.add_column(style="dim", no_wrap=True)
    known.add_column(overflow="fold")
    for name, value in inferred_lines(certificate):
        known.add_row(name, Text(printable(value)))
    yield Text("Inferred", style="bold")
    yield Padding(known, (0, 0, 1, 2))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for row in sorted_rows(certificate):
        said = Text(printable(row.says)).append(f" {row.source}; {_counts(row)}.", style="dim")
        if note := remark(row):
            said.append(f"\n{printable(note)}", style=_COLOURS["deviates"] if row.status == "deviates" else "dim")
        table.add_row(Text(row.status, style=_COLOURS[row.status]), row.requirement, said)
    yield Text("Requirements", style="bold")
    yield Padding(table, (0, 0, 0, 2))
    for title, sentences in _paragraphs(certificate):
        if sentences:
            yield Text(f"\n{title}", style="bold")
            for sentence in sentences:
                yield Padding(Text(printable(sentence)), (0, 0, 0, 2))


def text(certificate: "Certificate") -> str:
    """Return the sheet as text of `_WIDTH` columns, without colours."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, highlight=False, markup=False)
    for part in renderables(certificate):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# --------------------------------------------------------------------------------------------------------- Markdown


def markdown(certificate: "Certificate") -> str:
    """Return the sheet in Markdown."""
    lines = [f"**{_marked(certificate.verdict)}**", "", _marked(facts_line(certificate)), ""]
    lines += [*(f"- {_marked(line)}" for line in specification_lines(certificate)), ""]
    lines += _rows_of_markdown(("inferred", ""), [(_marked(n), _marked(v)) for n, v in inferred_lines(certificate)])
    rows = [
        (row.status if row.status != "deviates" else "**deviates**", f"`{row.requirement}`", _said_in_markdown(row),
         _marked(row.source), _counts(row))
        for row in sorted_rows(certificate)
    ]  # fmt: skip
    lines += _rows_of_markdown(
        ("", "requirement", "what holds, or the smallest counterexample", "source", "tried"), rows
    )
    for title, sentences in _paragraphs(certificate):
        if sentences:
            lines += [f"{title}:", "", *(f"- {_marked(sentence)}" for sentence in sentences), ""]
    return "\n".join(lines)


def _said_in_markdown(row: "Row") -> str:
    note = remark(row)
    return _marked(row.says) + (f"<br>*{_marked(note)}*" if note else "")


def _rows_of_markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = f"| {' | '.join(heads)} |"
    return [head, f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _marked(value: str) -> str:
    """Return text that Markdown shows as it is: on one line, without marks of its own."""
    return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", " ".join(printable(value).split()))


# ------------------------------------------------------------------------------------------------------------- HTML


def html(certificate: "Certificate") -> str:
    """Return the sheet as a part of a page of HTML, with its style."""
    state = "conforms" if certificate.conforms else "deviates"
    parts = [f"<h1 class='{state}'>{_shown(certificate.verdict)}</h1>"]
    parts.append(f"<p class='facts'>{_shown(facts_line(certificate))}</p><ul>")
    parts += [f"<li>{_shown(line)}</li>" for line in specification_lines(certificate)]
    parts.append("</ul><h2>Inferred</h2><table>")
    parts += [f"<tr><td>{_shown(n)}</td><td>{_shown(v)}</td></tr>" for n, v in inferred_lines(certificate)]
    parts.append("</table><h2>Requirements</h2><table><tr><th></th><th>requirement</th>")
    parts.append("<th>what holds, or the smallest counterexample</th><th>source</th><th>tried</th></tr>")
    for row in sorted_rows(certificate):
        kind, note = row.status.replace(" ", "-"), remark(row)
        said = _shown(row.says) + (f"<br><code class='{kind}'>{_shown(note)}</code>" if note else "")
        parts.append(
            f"<tr><td class='{kind}'>{row.status}</td><td><code>{_shown(row.requirement)}</code></td><td>{said}</td>"
            f"<td>{_shown(row.source)}</td><td>{_counts(row)}</td></tr>"
        )
    parts.append("</table>")
    for title, sentences in _paragraphs(certificate):
        if sentences:
            listed = "".join(f"<li>{_shown(sentence)}</li>" for sentence in sentences)
            parts.append(f"<h2>{title}</h2><ul>{listed}</ul>")
    return f"<div class='plimsoll-certificate'><style>{_STYLE}</style>{''.join(parts)}</div>"


def page(certificate: "Certificate") -> str:
    """Return the sheet as a whole page."""
    title = f"{certificate.function}: certificate for {certificate.format}"
    return _PAGE.format(title=_shown(title), body=html(certificate))


def _shown(value: str) -> str:
    return _html.escape(printable(value))
