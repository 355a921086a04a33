"""A receipt for the terminal: verdict, deviations, operations, notes."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.receipts import wording
from plimsoll.receipts.rows import ReceiptRecord


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
    for heads, lines in (wording.operation_table(receipt.rows, sizes=False), wording.tensor_table(receipt.tensors)):
        if lines:
            yield Text()
            yield _table(heads, lines)
    closing = wording.closing(receipt)
    if closing:
        yield Text()
    yield from map(Text, closing)
    if full:
        yield Text()
        yield _table(*wording.row_table(receipt.rows))


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 4))


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for head in heads:
        options: dict[str, Any] = {"overflow": "fold"}
        if head in wording.NUMBERS:
            options = {"justify": "right", "no_wrap": True}
        table.add_column(head, **options)
    for row in rows:
        table.add_row(*row)
    return table
