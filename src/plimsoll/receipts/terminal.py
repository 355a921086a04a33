"""A receipt for the terminal: the verdict and the deviations first, then what ran, then notes."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.receipts import wording
from plimsoll.receipts.rows import ReceiptRecord
from plimsoll.text import size


def renderable(receipt: ReceiptRecord, *, full: bool) -> RenderableType:
    """Return the receipt as one renderable.

    Args:
        receipt: The receipt.
        full: Whether every row is listed, in the order of the step.
    """
    return Group(*_parts(receipt, full=full))


def _parts(receipt: ReceiptRecord, *, full: bool) -> Iterator[RenderableType]:
    style = "bold" if receipt.declared is None else "bold red" if receipt.deviations else "bold green"
    yield Text(wording.verdict(receipt), style=style)
    yield Text(wording.facts(receipt), style="dim")
    for group in wording.deviation_groups(receipt.deviations):
        yield Text()
        yield Text.assemble((group.title, "bold"), (f"  {group.where}", "cyan"))
        when = f" ({group.when})" if group.when else ""
        yield _indented(f"expected {group.first.expected}; got {group.first.actual}{when}")
        yield _indented(f"-> {group.first.advice}")
    lines = wording.operation_lines(receipt.rows)
    if lines:
        yield Text()
        yield _operations(lines)
    if receipt.tensors:
        yield Text()
        yield _tensors(receipt)
    closing = [wording.memory_words(receipt.memory), wording.cache_words(receipt), *receipt.notes]
    if any(closing):
        yield Text()
    yield from (Text(line) for line in closing if line)
    if full:
        yield Text()
        yield _rows(receipt)


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 4))


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        options: dict[str, Any] = {"justify": "right", "no_wrap": True} if name in right else {"overflow": "fold"}
        table.add_column(name, **options)
    return table


def _operations(lines: list[wording.OperationLine]) -> Table:
    phases = wording.phases_of(lines)
    table = _table("operation", "formats", "sums", *phases, "where", right=phases)
    for line in lines:
        counts = (line.count(phase) for phase in phases)
        table.add_row(line.what, line.formats, line.sums, *counts, line.where)
    return table


def _tensors(receipt: ReceiptRecord) -> Table:
    table = _table("tensors", "format", "number", "size", right=("number", "size"))
    for line in wording.tensor_lines(receipt.tensors):
        table.add_row(line.role, line.format, f"{line.count:,}", size(line.bytes))
    return table


def _rows(receipt: ReceiptRecord) -> Table:
    table = _table("phase", "operation", "module", "line", "formats", "sums", "calls", right=("calls",))
    for row in receipt.rows:
        table.add_row(
            row.phase, row.operation, row.module or "", row.source_line or "", row.formats, row.accumulate or "",
            f"{row.calls:,}",
        )  # fmt: skip
    return table
