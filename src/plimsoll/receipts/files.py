"""Files of a receipt: text, Markdown, JSON and HTML."""

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console

from plimsoll.receipts import page, terminal, wording
from plimsoll.receipts.rows import ReceiptRecord
from plimsoll.runs.storage.atomic_files import check_place, write_text
from plimsoll.text import escaped_cell, printable

_WIDTH = 120


def text(receipt: ReceiptRecord, *, full: bool = False) -> str:
    """Return the receipt as plain text of at most 120 columns."""
    target = Console(file=io.StringIO(), width=_WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    with target.capture() as captured:
        target.print(terminal.renderable(receipt, full=full))
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
        "deviations": [deviation.to_dict() for deviation in receipt.deviations],
        "notes": list(receipt.notes),
        "memory": receipt.memory.to_dict(),
        "cache": {"hits": receipt.cache_hits, "misses": receipt.cache_misses},
        "settings": dict(receipt.settings),
        "rows": [row.to_dict() for row in receipt.rows],
        "tensors": [tensor.to_dict() for tensor in receipt.tensors],
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
        parts.append(_table(("deviation", "where", "expected", "got", "what to do"), rows))
    for heads, lines in (wording.operation_table(receipt.rows), wording.tensor_table(receipt.tensors)):
        if lines:
            parts.append(_table(heads, lines))
    parts.append("\n".join(f"- {escaped_cell(line)}" for line in wording.closing(receipt)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(escaped_cell(cell) for cell in line)} |" for line in lines)


_FORMS: Mapping[str, Callable[[ReceiptRecord], str]] = {
    ".html": page.html, ".json": as_json, ".md": markdown, ".txt": text,
}  # fmt: skip
ENDINGS = tuple(_FORMS)


def write(receipt: ReceiptRecord, path: str | os.PathLike[str]) -> None:
    """Write a receipt in the form that the path's ending names.

    Raises:
        ArgumentError: The ending is none of these, or the folder does not exist.
        RunError: The file cannot be written.
    """
    place = check_place("receipt", path, _FORMS)
    write_text("receipt", place, _FORMS[place.suffix.lower()](receipt))
