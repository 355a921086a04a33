"""A receipt in few words: the verdict, grouped deviations and grouped rows."""

import fnmatch
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from plimsoll.receipts.declared.deviations import KINDS
from plimsoll.receipts.recording.operations import KINDS as OPERATION_KINDS
from plimsoll.receipts.rows import Deviation, MemoryUse, ReceiptRecord, Role, Row, TensorRow
from plimsoll.text import counted, grouped, size

_PHASES = ("forward", "recomputation", "backward", "optimizer")
_WIDEST = 48  # characters of the modules of a line, for which there is room in 120 columns
_CAUSES = {
    "script": "cast by the script", "autocast": "cast by autocast", "torch": "cast by torch itself",
    "level": "cast by Plimsoll", "emulation": "cast by an emulation", "backward": "cast of a gradient",
    "operation": "cast by the operation itself",
}  # fmt: skip


def verdict(receipt: ReceiptRecord) -> str:
    """Return what was declared, and how many deviations there are."""
    if receipt.declared is None:
        return "Nothing declared."
    groups = deviation_groups(receipt.deviations)
    if not groups:
        return f"Declared {receipt.declared}. No deviations."
    places = sum(len(group.modules) or 1 for group in groups)
    where = f" in {places:,} places" if places > len(groups) else ""
    return f"Declared {receipt.declared}. {counted(len(groups), 'deviation')}{where}."


def matches(module: str, glob: str) -> bool:
    """Return whether a module has that name, or a name like the glob."""
    return module == glob or fnmatch.fnmatchcase(module, glob)


def facts(receipt: ReceiptRecord) -> str:
    """Return what ran, on which devices."""
    did = ", ".join(receipt.did) or "nothing"
    size_of = f"{receipt.subject}, {receipt.parameters:,} parameters" if receipt.parameters else receipt.subject
    devices = receipt.settings.get("devices")
    return f"{size_of}: {did}{f' on {devices}' if devices else ''}."


# -- deviations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviationGroup:
    """Deviations of one kind with one line, in one or several modules."""

    first: Deviation
    modules: tuple[str, ...]
    calls: int

    @property
    def title(self) -> str:
        """The kind, as a sentence."""
        meaning = KINDS[self.first.kind].meaning
        return f"{meaning[0].upper()}{meaning[1:]}"

    @property
    def where(self) -> str:
        """The line and the modules."""
        parts = [self.first.source_line or "", grouped(self.modules) if self.modules else ""]
        return " in ".join(part for part in parts if part)

    @property
    def when(self) -> str:
        """The phases, and how many operations."""
        phases = " and ".join(self.first.phases)
        many = f", {counted(self.calls, 'call')}" if self.calls > 1 and self.first.operation else ""
        return f"{phases}{many}" if phases else ""


def deviation_groups(deviations: Iterable[Deviation]) -> list[DeviationGroup]:
    """Return deviations in order, those alike in kind, line and formats as one."""
    groups: dict[tuple[object, ...], list[Deviation]] = {}
    for deviation in deviations:
        key = (deviation.kind, deviation.source_line, deviation.expected, deviation.actual, deviation.advice)
        groups.setdefault(key, []).append(deviation)
    return [
        DeviationGroup(
            first=several[0],
            modules=tuple(dict.fromkeys(deviation.module for deviation in several if deviation.module is not None)),
            calls=sum(deviation.calls for deviation in several),
        )
        for several in groups.values()
    ]


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLine:
    """Rows that are alike but for their modules and lines."""

    first: Row
    calls: Counter[str]  # by phase
    modules: tuple[str, ...]
    bytes: int

    @property
    def what(self) -> str:
        """The kind; of a cast with who asked for it."""
        row = self.first
        name = _CAUSES[row.cause] if row.cause is not None else row.kind
        return name if row.where == "eager" else f"{name}, {row.where}"

    @property
    def sums(self) -> str:
        """The format that is added up in."""
        row = self.first
        if row.accumulate is None:
            return "unknown" if row.kind in ("product", "attention") else ""
        return f"{row.accumulate}, partial sums {row.partial}" if row.partial is not None else row.accumulate

    @property
    def formats(self) -> str:
        """Operands and result."""
        return self.first.formats + ("" if self.first.rounded else " (not rounded)")

    def count(self, phase: str) -> str:
        """Return the number of calls in a phase; empty for none."""
        return f"{self.calls[phase]:,}" if self.calls[phase] else ""

    @property
    def where(self) -> str:
        """The modules in few words."""
        several = grouped(self.modules, 2)
        return several if len(several) <= _WIDEST else grouped(self.modules, 1)


def operation_lines(rows: Iterable[Row]) -> list[OperationLine]:
    """Return rows as lines by kind and formats, products first, no exact ones."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.kind != "exact":
            key = (row.kind, row.formats, row.accumulate, row.partial, row.cause, row.where, row.rounded)
            groups.setdefault(key, []).append(row)
    lines = [
        OperationLine(
            first=several[0],
            calls=sum((Counter({row.phase: row.calls}) for row in several), Counter[str]()),
            modules=tuple(dict.fromkeys(row.module for row in several if row.module is not None)),
            bytes=sum(row.bytes for row in several),
        )
        for several in groups.values()
    ]
    return sorted(lines, key=lambda line: (OPERATION_KINDS.index(line.first.kind), -sum(line.calls.values())))


# -- tables ------------------------------------------------------------------------------------------------------------


TableData = tuple[tuple[str, ...], list[tuple[str, ...]]]  # heads and rows
NUMBERS = frozenset((*_PHASES, "number", "size", "calls", "bytes"))  # heads of columns that are aligned to the right


def operation_table(rows: Iterable[Row], *, sizes: bool = True) -> TableData:
    """Return lines of operations as a table, with their bytes if `sizes`."""
    lines = operation_lines(rows)
    ran = {phase for line in lines for phase, count in line.calls.items() if count}
    phases = [phase for phase in _PHASES if phase in ran]
    heads = ("operation", "formats", "sums", *phases, *(("bytes",) if sizes else ()), "where")
    return heads, [
        (x.what, x.formats, x.sums, *map(x.count, phases), *((size(x.bytes),) if sizes else ()), x.where)
        for x in lines
    ]  # fmt: skip


def tensor_table(tensors: Iterable[TensorRow]) -> TableData:
    """Return tensors by role and format as a table."""
    totals: dict[tuple[Role, str], list[int]] = {}
    for tensor in tensors:
        totals.setdefault((tensor.role, tensor.format), []).append(tensor.bytes)
    roles = get_args(Role)
    listed = sorted(totals.items(), key=lambda one: (roles.index(one[0][0]), -sum(one[1])))
    lines = [
        (role, fmt, f"{len(bytes_each):,}", size(sum(bytes_each)) if any(bytes_each) else "unknown")
        for (role, fmt), bytes_each in listed
    ]
    return ("tensors", "format", "number", "size"), lines


def row_table(rows: Iterable[Row]) -> TableData:
    """Return every row as a table."""
    return ("phase", "operation", "module", "line", "formats", "sums", "calls", "bytes"), [
        (x.phase, x.operation, x.module or "", x.source_line or "", x.formats, x.accumulate or "", f"{x.calls:,}",
         size(x.bytes))
        for x in rows
    ]  # fmt: skip


# -- sentences ---------------------------------------------------------------------------------------------------------


def closing(receipt: ReceiptRecord) -> list[str]:
    """Return the sentences below the tables: memory, autocast's cache, notes."""
    return [x for x in (memory_words(receipt.memory), cache_words(receipt), *receipt.notes) if x]


def memory_words(memory: MemoryUse) -> str:
    """Return the bytes of a step in one sentence."""
    parts = [
        f"{size(getattr(memory, name))} {name}"
        for name in ("weights", "gradients", "optimizer", "activations")
        if getattr(memory, name)
    ]
    if not memory.peak:
        return ""
    return f"Memory: {', '.join(parts)}; at most {size(memory.peak)} at once. {size(memory.moved)} read and written."


def cache_words(receipt: ReceiptRecord) -> str:
    """Return what autocast's cache did; empty where autocast cast no weight."""
    if not receipt.cache_misses:
        return ""
    return (
        f"autocast cast weights {counted(receipt.cache_misses, 'time')} and used kept casts "
        f"{counted(receipt.cache_hits, 'time')}."
    )
