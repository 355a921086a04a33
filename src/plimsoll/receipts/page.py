"""A receipt as one HTML file that loads nothing, and as a notebook's part of it."""

from collections.abc import Iterable, Iterator, Sequence

from plimsoll.receipts import wording
from plimsoll.receipts.rows import ReceiptRecord
from plimsoll.text import in_html

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
    rows = "".join(_rows(receipt))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{in_html(receipt.subject)}: precision receipt</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{_body(receipt)}\n{rows}\n</main>\n</body>\n</html>\n"
    )


def fragment(receipt: ReceiptRecord) -> str:
    """Return the receipt for a notebook, which has colours and sizes of its own."""
    return f"<div>{_body(receipt)}</div>"


def _body(receipt: ReceiptRecord) -> str:
    return "\n".join(_sections(receipt))


def _sections(receipt: ReceiptRecord) -> Iterator[str]:
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
            yield _table(heads, lines)
    if receipt.memory.peak:
        yield f"<p>{in_html(wording.memory_words(receipt.memory))}</p>"
    notes = [line for line in (wording.cache_words(receipt), *receipt.notes) if line]
    if notes:
        yield "<h2>Notes</h2>"
        yield "<ul>" + "".join(f"<li>{in_html(line)}</li>" for line in notes) + "</ul>"


def _rows(receipt: ReceiptRecord) -> Iterator[str]:
    if receipt.rows:
        yield f"<details><summary>All {len(receipt.rows):,} rows, in the order of the step</summary>"
        yield _table(*wording.row_table(receipt.rows))
        yield "</details>"
    if receipt.settings:
        yield "<details><summary>Settings</summary>"
        yield _table(("setting", "value"), receipt.settings.items())
        yield "</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    classes = ["number" if head in wording.NUMBERS else "name" if head in _LONG else "plain" for head in heads]
    head = "".join(f'<th scope="col" class="{c}">{in_html(h)}</th>' for h, c in zip(heads, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{c}">{in_html(x)}</td>' for x, c in zip(row, classes, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
