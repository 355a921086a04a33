"""Answers on one run or two for the page and the report, as JSON-able data."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from plimsoll.diagnosis import Finding, View, whatif
from plimsoll.diagnosis.what_if.answer import predictor_of
from plimsoll.errors import ArgumentError, NotRecordedError, RunError
from plimsoll.formats import FP32, BlockFormat, get, get_element
from plimsoll.formats.catalogue import BLOCKS, ELEMENTS
from plimsoll.report.figure_registry import expected_height
from plimsoll.report.page.figures import offered
from plimsoll.report.page.scalars import in_order
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary, jsonable
from plimsoll.runs import Event
from plimsoll.tensor_collections import IN_DISPLAY_ORDER, LABELS

_ROWS = 50  # layers of a what-if
_EVENTS = 200
OFFERED = tuple(fmt.name for fmt in ELEMENTS if fmt.signed and fmt.bits < FP32.bits)


def run_answer(view: View, summary: Summary, root: Path | None = None) -> dict[str, object]:
    """Return all that a run's page shows without a figure.

    Args:
        view: The run.
        summary: Its summary.
        root: The served folder. Paths in messages are relative to it. Default: paths stay as they are.
    """
    steps = [step for step in view.run.steps if view.until is None or step <= view.until]
    heights = [expected_height(view, finding) for finding in summary.findings]
    return {
        "summary": summary_answer(summary, root),
        "figure_heights": heights,
        "first_tensor": first_tensor(view, summary.findings),
        "shown": summary_text.run_shown(summary, view.events),
        "collections": _in_display_order(view.run.tensors),
        "collection_labels": LABELS,
        "scalars": in_order(view.run.scalar_names),
        "steps": {"first": steps[0] if steps else -1, "last": steps[-1] if steps else -1, "count": len(steps)},
        "formats": (*OFFERED, *(fmt.name for fmt in BLOCKS if fmt.block in view.run.block_lengths)),
        "settings": view.run.settings,
        "events": [_event(event) for event in view.events[-_EVENTS:]],
        "pictures": offered(view, summary.findings),
    }


def first_tensor(view: View, findings: Sequence[Finding]) -> dict[str, str] | None:
    """Return the first tensor to show: the worst of a finding, or the largest.

    The finding is the most severe one that names a tensor. The largest says more than the first by name, which may be a
    single number (a temperature, a scale).
    """
    tensors = view.run.tensors
    for finding in findings:
        if finding.where and finding.where[0] in tensors.get(finding.collection or "", ()):
            return {"collection": str(finding.collection), "name": finding.where[0]}
    for collection in (c.name for c in IN_DISPLAY_ORDER if tensors.get(c.name)):
        cells = view.cells(collection)
        if cells is not None and len(cells):
            sizes = np.bincount(cells.layer, weights=cells.column("count"), minlength=len(cells.names))
            return {"collection": collection, "name": cells.names[int(np.argmax(sizes))]}
    return None


def summary_answer(summary: Summary, root: Path | None = None) -> dict[str, object]:
    """Return a summary as data, its findings with their words."""
    findings = [{**finding.to_dict(), "shown": summary_text.shown_as(finding)} for finding in summary.findings]
    return {
        **summary.to_dict(),
        "path": within(summary.path, root),
        "problems": [within(problem, root) for problem in summary.problems],
        "scalars": in_order(summary.scalars),
        "findings": findings,
    }


def whatif_answer(view: View, fmt: str, shift: int | None, collection: str) -> dict[str, object]:
    """Return the effect of a format and a scale on a collection of a run."""
    found = whatif(view, fmt, shift, collection)
    narrow, in_blocks = view.narrow(collection), isinstance(get(fmt), BlockFormat)
    best = 0 if in_blocks else found.shift  # which block formats choose for themselves
    if shift is not None and narrow is not None and not in_blocks:
        best = predictor_of(narrow).best_shift(get_element(fmt, "whatif"))
    steps, lost, over = found.over_time()
    return {
        "format": found.format,
        "collection": collection,
        "sentence": found.sentence,
        "shift": found.shift,
        "best_shift": best,
        "chosen": found.chosen,
        "censored": found.censored,
        "block": found.block,
        "overall": found.overall.to_dict(),
        "rows": [row.to_dict() for row in found.rows[:_ROWS]],
        "more": max(len(found.rows) - _ROWS, 0),
        "over_time": {"step": steps.tolist(), "lost": lost.tolist(), "overflow": over.tolist()},
        "stretches": [stretch.to_dict() for stretch in found.stretches],
    }


def difference(first: View, second: View, root: Path) -> tuple[object, str]:
    """Return where two runs diverge, as data and a sentence; no data if impossible."""
    from plimsoll.diagnosis import diff

    try:
        found = diff(first, second)
    except (NotRecordedError, ArgumentError, RunError) as error:
        return None, within(str(error), root)
    return {**found.to_dict(), "a": within(found.a, root), "b": within(found.b, root)}, found.sentence


def encoded(data: Mapping[str, object]) -> bytes:
    """Return JSON in ASCII that browsers read; NaN and infinities as names."""
    try:
        return json.dumps(data, allow_nan=False).encode()
    except ValueError:
        return json.dumps(jsonable(data), allow_nan=False).encode()


def _in_display_order(tensors: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the series of a run by collection, custom collections last."""
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: [*LABELS, name].index(name))}


def _event(event: Event) -> dict[str, object]:
    return {
        "step": event.step,
        "kind": event.kind,
        "message": event.message,
        "details": event.details,
        "time": event.time,
    }


def within(message: str, root: Path | None) -> str:
    """Return a message with paths from the served folder on, which hides its place."""
    return message if root is None else message.replace(f"{root}{os.sep}", "").replace(str(root), ".")
