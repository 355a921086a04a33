"""`Certificate` and its sheets: terminal text, Markdown, and one HTML page."""

import html as _html
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plimsoll.certification.certificate import CertificateRecord, Row, Status
from plimsoll.results import NotebookRepr
from plimsoll.text import counted, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 100
_HEADS = ("", "requirement", "what holds, or the smallest counterexample", "source", "tried")
_ORDER: tuple[Status, ...] = ("deviates", "refuses", "conforms", "not tried")
_COLOURS: dict[Status, str] = {"deviates": "bold red", "refuses": "yellow", "conforms": "green", "not tried": "dim"}
# Chosen for a contrast of at least 4.5 to 1 on white and on the dark background.
_STYLE = """
.plimsoll-certificate{font:15px/1.5 system-ui,sans-serif;color:#1b1f24;max-width:70em;overflow-x:auto}
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


def sorted_rows(certificate: CertificateRecord) -> list[Row]:
    """Return the rows sorted: deviations, refusals, conforming ones, untried ones."""
    return sorted(certificate.rows, key=lambda row: _ORDER.index(row.status))


def specification_lines(certificate: CertificateRecord) -> list[str]:
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


def facts_line(certificate: CertificateRecord) -> str:
    """Return versions, machine, day, calls and time in one line."""
    versions = [f"{name} {version}" for name, version in certificate.versions.items()]
    work = f"{counted(certificate.calls, 'call')} in {certificate.seconds:.1f} s on {certificate.device}"
    return ", ".join([*versions, certificate.date, work])


def inferred_lines(certificate: CertificateRecord) -> list[tuple[str, str]]:
    """Return names and values of the inferred facts, without empty ones."""
    shown = {True: "yes", False: "no"}
    return [
        (name.replace("_", " "), shown[value] if isinstance(value, bool) else str(value))
        for name, value in certificate.inferred.items()
        if value is not None
    ]


def remark(row: Row) -> str:
    """Return the counterexample of a row that deviates, or else the row's detail."""
    if row.counterexample is not None:
        return str(row.counterexample)
    return row.detail


def _counts(row: Row) -> str:
    if row.status == "not tried":
        return "not tried"
    tried = f"{row.tried:,} tried"
    return f"{tried}, {row.wrong:,} wrong" if row.status == "deviates" and row.tried > 1 else tried


def _paragraphs(certificate: CertificateRecord) -> list[tuple[str, tuple[str, ...]]]:
    lists = [("Not tried", certificate.not_tried), ("Noticed", certificate.notes)]
    return [(title, sentences) for title, sentences in lists if sentences]


# ------------------------------------------------------------------------------------------------------------- text


def renderables(certificate: CertificateRecord) -> "Iterator[RenderableType]":
    """Yield the sheet's parts for a console of any width."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def table(columns: int) -> Table:
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for _ in range(columns - 1):
            grid.add_column(no_wrap=True)
        grid.add_column(ratio=1, overflow="fold")
        return grid

    yield Text(printable(certificate.verdict), style="bold green" if certificate.conforms else "bold red")
    yield Text(printable(facts_line(certificate)), style="dim")
    yield Text()
    for line in specification_lines(certificate):
        yield Padding(Text(line), (0, 0, 0, 2))
    facts, rows = table(2), table(3)
    for name, value in inferred_lines(certificate):
        facts.add_row(Text(name, style="dim"), Text(printable(value)))
    for row in sorted_rows(certificate):
        said = Text(printable(row.says)).append(f" {row.source}; {_counts(row)}.", style="dim")
        if note := remark(row):
            said.append(f"\n{printable(note)}", style=_COLOURS["deviates"] if row.status == "deviates" else "dim")
        rows.add_row(Text(row.status, style=_COLOURS[row.status]), row.requirement, said)
    for title, part in (("Inferred", facts), ("Requirements", rows)):
        yield Text(f"\n{title}", style="bold")
        yield Padding(part, (0, 0, 0, 2))
    for title, sentences in _paragraphs(certificate):
        yield Text(f"\n{title}", style="bold")
        for sentence in sentences:
            yield Padding(Text(printable(sentence)), (0, 0, 0, 2))


def text(certificate: CertificateRecord) -> str:
    """Return the sheet as text of `_WIDTH` columns, without colours."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, highlight=False, markup=False)
    console.print(*renderables(certificate), sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# -------------------------------------------------------------------------------------------------- Markdown and HTML


def markdown(certificate: CertificateRecord) -> str:
    """Return the sheet in Markdown."""

    def shown(value: str) -> str:  # as it is: on one line, without marks of its own
        return re.sub(r"([\\|*_<>`\[\]])", r"\\\1", " ".join(printable(value).split()))

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        lines = [heads, ["---"] * len(heads), *rows]
        return [*(f"| {' | '.join(line)} |" for line in lines), ""]

    lines = [f"**{shown(certificate.verdict)}**", "", shown(facts_line(certificate)), ""]
    lines += [*(f"- {shown(line)}" for line in specification_lines(certificate)), ""]
    lines += table(("inferred", ""), [(shown(name), shown(value)) for name, value in inferred_lines(certificate)])
    rows: list[Sequence[str]] = []
    for row in sorted_rows(certificate):
        status = f"**{row.status}**" if row.status == "deviates" else row.status
        said = shown(row.says) + (f"<br>*{shown(remark(row))}*" if remark(row) else "")
        rows.append((status, f"`{row.requirement}`", said, shown(row.source), _counts(row)))
    lines += table(_HEADS, rows)
    for title, sentences in _paragraphs(certificate):
        lines += [f"{title}:", "", *(f"- {shown(sentence)}" for sentence in sentences), ""]
    return "\n".join(lines)


def html(certificate: CertificateRecord) -> str:
    """Return the sheet as a part of a page of HTML, with its style."""

    def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        lines = ["".join(f"<th>{head}</th>" for head in heads)]
        lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def listed(sentences: Iterable[str]) -> str:
        return f"<ul>{''.join(f'<li>{_shown(sentence)}</li>' for sentence in sentences)}</ul>"

    rows: list[Sequence[str]] = []
    for row in sorted_rows(certificate):
        kind, said = row.status.replace(" ", "-"), _shown(row.says)
        said += f"<br><code class='{kind}'>{_shown(remark(row))}</code>" if remark(row) else ""
        status, requirement = f"<span class='{kind}'>{row.status}</span>", f"<code>{_shown(row.requirement)}</code>"
        rows.append((status, requirement, said, _shown(row.source), _counts(row)))
    facts = [(_shown(name), _shown(value)) for name, value in inferred_lines(certificate)]
    parts = [
        f"<h1 class='{'conforms' if certificate.conforms else 'deviates'}'>{_shown(certificate.verdict)}</h1>",
        f"<p class='facts'>{_shown(facts_line(certificate))}</p>{listed(specification_lines(certificate))}",
        f"<h2>Inferred</h2>{table((), facts)}<h2>Requirements</h2>{table(_HEADS, rows)}",
        *(f"<h2>{title}</h2>{listed(sentences)}" for title, sentences in _paragraphs(certificate)),
    ]
    return f"<div class='plimsoll-certificate'><style>{_STYLE}</style>{''.join(parts)}</div>"


def page(certificate: CertificateRecord) -> str:
    """Return the sheet as a whole page."""
    title = f"{certificate.function}: certificate for {certificate.format}"
    return _PAGE.format(title=_shown(title), body=html(certificate))


def _shown(value: str) -> str:
    return _html.escape(printable(value))


@dataclass(frozen=True, kw_only=True)
class Certificate(CertificateRecord, NotebookRepr):
    """The result of `certify`.

    Attributes:
        function: Name of the function.
        format: Name of the number format.
        kind: Kind of the function.
        device: Device of the tensors that it was given.
        inferred: What the implementation does, by name. A cast has ``rounding``, ``saturate``, ``infinities``, ``nan``,
            ``negative_zero`` and ``subnormals``. A block format adds ``scale_rule``. A product or a sum has
            ``accumulate``, ``accumulate_rounding`` and ``order``. The reference lists all.
        rows: The requirements, each with its status.
        not_tried: Sentences on what was not tried, and why.
        notes: Sentences on what else was noticed: text that the function prints, warnings that it gives.
        calls: Number of calls of the function.
        seconds: Time that they and the checks took.
        versions: Versions of the packages and the machine.
        date: Day of the certificate, as 2026-11-24.
    """

    def to_markdown(self) -> str:
        """Return the sheet in Markdown, for a bug report or a page."""
        return markdown(self)

    def to_html(self) -> str:
        """Return the sheet as one page of HTML, which needs no other file."""
        return page(self)

    def _repr_html_(self) -> str:
        return html(self)

    def __str__(self) -> str:
        """Return the sheet as text, 100 columns wide."""
        return text(self)
