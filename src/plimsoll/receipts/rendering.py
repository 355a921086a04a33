"""Renderings of a receipt: terminal, text, Markdown, JSON and HTML, and their files."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.receipts import wording
from plimsoll.receipts.rows import ReceiptRecord
from plimsoll.results import as_data
from plimsoll.runs.storage.atomic_files import check_place, write_text
from plimsoll.text import escaped_cell, in_html, printable

# -- terminal: verdict, deviations, operations, notes ------------------------------------------------------------------


def renderable(receipt: ReceiptRecord, *, full: bool) -> RenderableType:
    """Return the receipt as one renderable; in full, every row is listed in the order of the step."""
    return Group(*_terminal_parts(receipt, full=full))


def _terminal_parts(receipt: ReceiptRecord, *, full: bool) -> Iterator[RenderableType]:
    style = "bold" if receipt.declared is None else "bold red" if receipt.deviations else "bold green"
    yield Text(wording.verdict(receipt), style=style)
    yield Text(wording.facts(receipt), style="dim")
    for group in wording.deviation_groups(receipt.deviations):
        yield Text()
        yield Text.assemble((group.title, "bold"), (f"  {group.where}", "cyan"))
        when = f" ({group.when})" if group.when else ""
        yield _indented(f"expected {group.first.expected}; got {group.first.actual}{when}")
        yield _indented(f"-> {group.first.advice}")
    for heads, lines in (wording.operation_table(receipt.rows, sizes=False), wording.tensor_table(receipt.tensors)):
        if lines:
            yield Text()
            yield _terminal_table(heads, lines)
    closing = wording.closing(receipt)
    if closing:
        yield Text()
    yield from map(Text, closing)
    if full:
        yield Text()
        yield _terminal_table(*wording.row_table(receipt.rows))


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 4))


def _terminal_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in heads:
        options: dict[str, Any] = {"overflow": "fold"}
        if head in wording.NUMBERS:
            options = {"justify": "right", "no_wrap": True}
        table.add_column(head, **options)
    for row in rows:
        table.add_row(*row)
    return table


# -- one HTML file that loads nothing, and a notebook's part of it -----------------------------------------------------

# The colours are those of the report (report/page/files/css/base.css).
_STYLE = """
:root { --paper: #ffffff; --ink: #1d252c; --soft: #5a656f; --line: #e1e5e9; --wash: #f4f6f8;
  --alarm: #b3301f; --healthy: #18724f; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14191f; --ink: #e3e8ed; --soft: #9aa5b0; --line: #2b333c; --wash: #1b222a;
    --alarm: #ff8d7d; --healthy: #63c79b; } }
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
body { max-width: 76rem; margin: 0 auto; padding: clamp(1rem, 2.4vw, 2rem); }
h1 { margin: 0; font-size: 1.5rem; line-height: 1.25; text-wrap: balance; }
h1.deviates { color: var(--alarm); } h1.clean { color: var(--healthy); }
h2 { margin: 2.25rem 0 0.5rem; font-size: 1.05rem; }
h3 { margin: 0; font-size: 1rem; }
p, ul { margin: 0.25rem 0; }
.soft, th, summary { color: var(--soft); }
.deviation { margin: 1rem 0; padding: 0.25rem 0 0.25rem 1rem; border-left: 3px solid var(--alarm); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 1.2rem 0.3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.plain, th { white-space: nowrap; }
td.name { min-width: 14rem; overflow-wrap: anywhere; }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; margin: 1.25rem 0 0.5rem; }
@media print { details > * { display: block; } }
"""
_LONG = frozenset(("where", "module", "value"))


def html(receipt: ReceiptRecord) -> str:
    """Return the receipt as one page. It loads nothing, and shows every row on demand."""
    rows = "".join(_html_rows(receipt))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{in_html(receipt.subject)}: precision receipt</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{_html_body(receipt)}\n{rows}\n</main>\n</body>\n</html>\n"
    )


def fragment(receipt: ReceiptRecord) -> str:
    """Return the receipt for a notebook, which has colours and sizes of its own."""
    return f"<div>{_html_body(receipt)}</div>"


def _html_body(receipt: ReceiptRecord) -> str:
    return "\n".join(_html_sections(receipt))


def _html_sections(receipt: ReceiptRecord) -> Iterator[str]:
    state = "" if receipt.declared is None else ' class="deviates"' if receipt.deviations else ' class="clean"'
    yield f"<h1{state}>{in_html(wording.verdict(receipt))}</h1>"
    yield f'<p class="soft">{in_html(wording.facts(receipt))}</p>'
    for group in wording.deviation_groups(receipt.deviations):
        when = f" ({group.when})" if group.when else ""
        yield (
            f'<section class="deviation"><h3>{in_html(group.title)}</h3>'
            + (f"<p><code>{in_html(group.where)}</code></p>" if group.where else "")
            + f"<p>Expected {in_html(group.first.expected)}; got {in_html(group.first.actual)}{in_html(when)}.</p>"
            f"<p>{in_html(group.first.advice)}</p></section>"
        )
    operations, kept = wording.operation_table(receipt.rows), wording.tensor_table(receipt.tensors)
    for title, (heads, lines) in (("Operations", operations), ("Tensors that last", kept)):
        if lines:
            yield f"<h2>{title}</h2>"
            yield _html_table(heads, lines)
    if receipt.memory.peak:
        yield f"<p>{in_html(wording.memory_words(receipt.memory))}</p>"
    notes = [line for line in (wording.cache_words(receipt), *receipt.notes) if line]
    if notes:
        yield "<h2>Notes</h2>"
        yield "<ul>" + "".join(f"<li>{in_html(line)}</li>" for line in notes) + "</ul>"


def _html_rows(receipt: ReceiptRecord) -> Iterator[str]:
    if receipt.rows:
        yield f"<details><summary>All {len(receipt.rows):,} rows, in the order of the step</summary>"
        yield _html_table(*wording.row_table(receipt.rows))
        yield "</details>"
    if receipt.settings:
        yield "<details><summary>Settings</summary>"
        yield _html_table(("setting", "value"), receipt.settings.items())
        yield "</details>"


def _html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    classes = ["number" if head in wording.NUMBERS else "name" if head in _LONG else "plain" for head in heads]
    head = "".join(f'<th scope="col" class="{c}">{in_html(h)}</th>' for h, c in zip(heads, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{c}">{in_html(x)}</td>' for x, c in zip(row, classes, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


# -- text, Markdown, JSON, and files -----------------------------------------------------------------------------------

_WIDTH = 120


def text(receipt: ReceiptRecord, *, full: bool = False) -> str:
    """Return the receipt as plain text of at most 120 columns."""
    target = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    with target.capture() as captured:
        target.print(renderable(receipt, full=full))
    return printable("\n".join(line.rstrip() for line in captured.get().rstrip().split("\n")))


def data(receipt: ReceiptRecord) -> dict[str, object]:
    """Return the receipt as data that JSON can hold."""
    return {
        "receipt": 1,
        "subject": receipt.subject,
        "verdict": wording.verdict(receipt),
        "declared": receipt.declared,
        "did": list(receipt.did),
        "parameters": receipt.parameters,
        "deviations": as_data(receipt.deviations),
        "notes": list(receipt.notes),
        "memory": receipt.memory.to_dict(),
        "cache": {"hits": receipt.cache_hits, "misses": receipt.cache_misses},
        "settings": dict(receipt.settings),
        "rows": as_data(receipt.rows),
        "tensors": as_data(receipt.tensors),
    }


def as_json(receipt: ReceiptRecord) -> str:
    """Return the receipt as JSON in printable ASCII."""
    return json.dumps(data(receipt), indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def markdown(receipt: ReceiptRecord) -> str:
    """Return the receipt as Markdown, for an issue or a pull request."""
    parts = [f"**{escaped_cell(wording.verdict(receipt))}**", escaped_cell(wording.facts(receipt))]
    groups = wording.deviation_groups(receipt.deviations)
    if groups:
        rows = [(g.title, g.where, g.first.expected, g.first.actual, g.first.advice) for g in groups]
        parts.append(_markdown_table(("deviation", "where", "expected", "got", "what to do"), rows))
    for heads, lines in (wording.operation_table(receipt.rows), wording.tensor_table(receipt.tensors)):
        if lines:
            parts.append(_markdown_table(heads, lines))
    parts.append("\n".join(f"- {escaped_cell(line)}" for line in wording.closing(receipt)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(escaped_cell(cell) for cell in line)} |" for line in lines)


_FORMS: Mapping[str, Callable[[ReceiptRecord], str]] = {
    ".html": html, ".json": as_json, ".md": markdown, ".txt": text,
}  # fmt: skip
ENDINGS = tuple(_FORMS)


def write(receipt: ReceiptRecord, path: str | os.PathLike[str]) -> None:
    """Write a receipt in the form that the path's ending names."""
    place = check_place("receipt", path, _FORMS)
    write_text("receipt", place, _FORMS[place.suffix.lower()](receipt))
