"""Answers on one run or two for the page and the report: facts, figures, scalars."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View, whatif
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.what_if.answer import predictor_of
from plimsoll.errors import ArgumentError, NotRecordedError, RunError
from plimsoll.formats import FP32, BlockFormat, get, get_element
from plimsoll.formats.catalogue import BLOCKS, ELEMENTS
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.figure_declaration import DECLARED, PARAMETER_OF, Case, Declared
from plimsoll.report.figure_registry import FIGURES, expected_height, figure_for, figures_of
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary, started_at
from plimsoll.results import as_data
from plimsoll.runs import Event
from plimsoll.runs.reading.row_selection import unknown
from plimsoll.tensor_collections import IN_DISPLAY_ORDER, LABELS

# -- scalars: at most 600 points each, with the values of their axes ---------------------------------------------------

POINTS = 600  # some 40 KB of JSON, and more than a figure has pixels on a small screen
_DIGITS = 6
_EPOCH = "epoch"  # the name under which a training logs its epochs
# Scalars that the watch records for every run come after those that say how the training goes.
_LAST = ("scale", "nonfinite")


def in_order(names: Iterable[str]) -> list[str]:
    """Return names in the page's order: losses, logged numbers, then the watch's own."""

    def place(name: str) -> tuple[int, str]:
        if name == "loss" or name.startswith("loss:"):
            return 0, name
        return (3 if name.startswith("cast:") else 2 if name in _LAST else 1), name

    return sorted(names, key=place)


def scalar_answer(view: View, name: str, most: int = POINTS) -> dict[str, object]:
    """Return a scalar as data.

    Points stand for equally many steps each. `mean`, `low` and `high` are of the finite values of a point and null
    where there is none. `low` and `high` are left out where each point is one step.
    """
    if name not in view.run.scalar_names:
        raise unknown("serve", "a scalar", name, view.run.scalar_names, closed=view.run.closed)
    steps, values = view.scalar(name)
    finite = np.where(np.isfinite(values), values, np.nan)
    columns = Columns.of(steps, most)
    with np.errstate(over="ignore"):  # the sum of two finite losses may be too large
        mean = columns.merged(finite, "mean")
    answer: dict[str, object] = {
        "name": name,
        "step": columns.at.tolist(),
        "each": columns.each,
        "mean": _listed(mean),
        "nonfinite": int(np.count_nonzero(~np.isfinite(values))),
    }
    if columns.each > 1:
        answer |= {"low": _listed(columns.merged(finite, "min")), "high": _listed(columns.merged(finite, "max"))}
    axes = {"epoch": None if name == _EPOCH else _epochs(view, columns.at), "time": _seconds(view, name, columns)}
    return answer | {axis: _listed(values) for axis, values in axes.items() if values is not None}


def _epochs(view: View, steps: Ints) -> Floats | None:
    """Return the epoch at each step, in proportion between logged ones, or None.

    None: no axis can be made of them. Before the first and after the last, epochs are as long as the nearest. A number
    that is logged at every step of its epoch counts where it is new.
    """
    known, values = view.scalar(_EPOCH)
    there = np.isfinite(values)
    there[there] = np.diff(values[there], prepend=np.nan) != 0
    known, values = known[there], values[there]
    if len(known) < 2 or (np.diff(values) < 0).any():
        return None
    rates = np.diff(values) / np.diff(known)
    outside = rates[0] * np.minimum(steps - known[0], 0) + rates[-1] * np.maximum(steps - known[-1], 0)
    return np.interp(steps, known, values) + outside


def _seconds(view: View, name: str, columns: Columns) -> Floats | None:
    """Return each point's seconds from the run's start. None: the run has no times."""
    started = started_at(view.run)
    times = view.run.scalar_times(name)[1][: len(columns.steps)]
    if started is None or not len(times) or np.isnan(times).any():
        return None
    return columns.merged(times - started, "mean")


def _listed(values: Floats) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]


# -- figures: their JSON, their arguments, and the list for a run ------------------------------------------------------


def needs_findings(name: str, query: Mapping[str, str]) -> bool:
    """Return whether a figure takes the findings."""
    return "finding" in query or _known(name).takes_findings


def drawn(view: View, name: str, query: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """Return a figure of one run as JSON; with `finding`, that finding's own.

    Raises `NotRecordedError` for a figure or finding that there is not, and `ArgumentError` for words that mean nothing
    to the figure.
    """
    if "finding" in query:
        return json_of(figure_for(view, _finding(name, query, findings)))
    known = _known(name)
    arguments = _arguments(known, query)
    if known.takes_findings:
        arguments["findings"] = tuple(findings)
    return json_of(known.function(view, **arguments))


def drawn_of_two(first: View, second: View, name: str, query: Mapping[str, str]) -> str:
    """A figure of two runs as JSON."""
    of_two = figures_of(2)
    if name not in of_two:
        raise NotRecordedError(f"serve: expected {' or '.join(of_two)} of two runs; got {name[:60]!r}. Choose one.")
    known = of_two[name]
    arguments = _arguments(known, query)
    if 1 in known.runs:  # the second run is then an option of the figure of one
        return json_of(known.function(first, findings=(), beside=second, **arguments))
    return json_of(known.function(first, second, **arguments))


def listed() -> list[dict[str, object]]:
    """Return all figures and their arguments, for `GET /api/figures`."""
    return [
        {
            "name": each.name,
            "runs": each.runs,
            "offered": each.offered,
            "arguments": [{"name": word, "required": word in each.required} for word in each.arguments],
        }
        for each in (DECLARED[name] for name in FIGURES)
    ]


def offered(view: View, findings: Sequence[Finding] = ()) -> list[dict[str, object]]:
    """Return the drawings that figures declare for a run's page and report, given its findings."""
    return [
        {
            "figure": each.name,
            "section": each.offered,
            "label": case.label,
            "arguments": dict(case.arguments),
            "height": each.expected_height(view, {**case.arguments, "findings": findings}),
        }
        for each in figures_of(1).values()
        if each.offered is not None
        for case in ([Case(label=each.name, arguments={})] if each.cases is None else each.cases(view))
    ]


def json_of(figure: Any) -> str:
    """The figure as ``{"figure": ...}``; numbers that JSON lacks are null."""
    made = figure.to_json()
    json.loads(made, parse_constant=_refuse) if "NaN" in made or "Infinity" in made else None
    return f'{{"figure": {made}}}'


def _refuse(constant: str) -> None:
    raise ValueError(f"a figure's JSON holds {constant}")


def _known(name: str) -> Declared:
    known = figures_of(1)
    if name not in known:
        raise NotRecordedError(f"serve: expected a figure among {', '.join(known)}; got {name[:60]!r}. Choose one.")
    return known[name]


def _finding(name: str, query: Mapping[str, str], findings: Sequence[Finding]) -> Finding:
    unused = sorted(query.keys() - {"finding"})
    if unused:
        raise ArgumentError(f"serve: expected no other argument with finding; got {', '.join(unused)}. Leave it out.")
    index = whole(query["finding"], "finding")
    if not 0 <= index < len(findings):
        raise NotRecordedError(
            f"serve: expected the number of one of {len(findings)} findings, from 0 on; got {index}. They may have "
            "changed since; load the run again."
        )
    if findings[index].figure != name:
        raise NotRecordedError(
            f"serve: expected the figure of that finding, {findings[index].figure}; got {name[:60]!r}. They may have "
            "changed since; load the run again."
        )
    return findings[index]


def _arguments(known: Declared, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the query as the figure's arguments. Empty values count as absent."""
    unknown = sorted(query.keys() - set(known.arguments))
    if unknown:
        raise ArgumentError(
            f"serve: expected for {known.name} only {', '.join(known.arguments) or 'nothing'}; got "
            f"{', '.join(unknown)[:200]}. Leave it out."
        )
    missing = [word for word in known.required if not query.get(word)]
    if missing:
        raise ArgumentError(
            f"serve: expected {' and '.join(missing)} for {known.name}; got none. Add it to the address."
        )
    return {PARAMETER_OF[word]: _value(word, value) for word, value in query.items() if value != ""}


def _value(word: str, value: str) -> object:
    if word == "shift":
        return whole(value, word)
    return tuple(each for each in value.split(",") if each) if word == "formats" else value


def whole(value: str, word: str) -> int:
    """A number of the address; `ArgumentError` for what is none."""
    try:
        return int(value)
    except ValueError as error:
        raise ArgumentError(
            f"serve: expected {word} to be an integer; got {value[:60]!r}. Correct the address."
        ) from error


# -- runs, pairs of runs, and what if ----------------------------------------------------------------------------------

_ROWS = 50  # layers of a what-if
_EVENTS = 200
OFFERED = tuple(fmt.name for fmt in ELEMENTS if fmt.signed and fmt.bits < FP32.bits)


def run_answer(view: View, summary: Summary, root: Path | None = None) -> dict[str, object]:
    """Return all that a run's page shows without a figure; paths in messages relative to `root`."""
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
        return json.dumps(as_data(data), allow_nan=False).encode()


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
