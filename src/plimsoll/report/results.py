"""Figures of results: they need no run, or take a result in its place.

`layer_errors` and `blame_bars` draw what the microscope finds, `parity` a verdict on two recipes.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from plimsoll.diagnosis import Parity, View
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.report.drawing.aggregation import Rows
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    STEP_AXIS,
    Figure,
    Layout,
    Trace,
    band,
    build_figure,
    empty_figure,
    joined,
    labels,
    line,
    of,
    plotted,
    safe,
    series_checked,
    share_ticks,
    since_mark,
    wrapped,
)
from plimsoll.report.figure_declaration import Case, figure
from plimsoll.spectrum.error_sums import STALL_DB, directions, split
from plimsoll.tensor_collections import BACKWARD, COLLECTIONS, IN_DISPLAY_ORDER, OF_MODULES
from plimsoll.text import capital, counted, percent

if TYPE_CHECKING:
    from plimsoll.microscope import Blame, BlameRow, ErrorReport


# -- errors by layer ---------------------------------------------------------------------------------------------------

_MOST_ROWS = 60
_LEAST = 1e-9  # smaller errors are drawn at the edge
_SUMS = ("compared", "error", "reference", "referencesq", "error_reference")
_STALL = 10 ** (-STALL_DB / 20)
_BACKWARD = set(BACKWARD) & set(OF_MODULES)
_GRADIENTS = {c.name for c in COLLECTIONS if c.carries_loss_scale}

Errors = tuple[list[str], Floats]  # names, and by name: noise, bias, its low and high end


def _cases(view: View) -> list[Case]:
    """Return the collections that shadow steps have errors of."""
    return [
        Case(label=f"Bias and noise of {of(c.name)}", arguments={"collection": c.name})
        for c in IN_DISPLAY_ORDER
        if c.is_shadowed and c.name in view.run.tensors and _cells(view, c.name) is not None
    ]


def _height_of(rows: int) -> int:
    return 190 + 18 * rows


def _height(view: View, arguments: Mapping[str, Any]) -> int:
    names = view.run.tensors.get(str(arguments.get("collection") or "gradients"), ())
    return _height_of(min(len(names), _MOST_ROWS))


@figure(offered="layers", cases=_cases, height=_height)
def layer_errors(run: "Source | ErrorReport", collection: str = "gradients", *, until: int | None = None) -> Figure:
    """The error of each layer relative to its values, from the first layer to the last, bias and noise apart.

    Bias is what stays from draw to draw: of a run from shadow step to shadow step, along the values and constant in
    all, and of an `ErrorReport` in every direction. Its line is the 95 % interval. Noise is the rest. Of gradients the
    error above which FP4 training stalls is marked. Layers beyond 60 share rows, with the largest number of each.

    Raises `NotRecordedError` for a collection that the run or the report does not have.
    """
    title = f"Bias and noise of {of(collection)}"
    meta: Layout = {"figure": "layer_errors", "collection": collection}
    if _is_report(run):
        (names, errors), draws = _of_report(run, collection), counted(run.draws, "draw")
    else:
        view = view_of(cast("Source", run), until, "layer_errors")
        if not view.run.tensors:
            return empty_figure("layer_errors", title, "Nothing was recorded in this run.", meta)
        series_checked(view, "layer_errors", collection)
        cells = _cells(view, collection)
        if cells is None:
            words = f"No errors of {of(collection)} up to this step.<br>Watch with shadow_every=."
            return empty_figure("layer_errors", title, words, meta)
        names, errors = _of_cells(cells)
        draws = counted(int((~np.isnan(cells.error_sum("errorsq"))).any(axis=0).sum()), "shadow step")
    names, errors, without = _distinct(collection, names, errors)
    if not names:
        return empty_figure("layer_errors", title, f"No tensor differs from FP32, in {draws}.", meta)
    rows = Rows.of(names, _MOST_ROWS)
    errors = rows.merged(errors, "max")
    texts = labels(rows.names, most=32)
    layout: Layout = {
        "xaxis": _axis(errors, _STALL if collection in _GRADIENTS else 1e-3),
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "ticks": "",
            "ticklabelstandoff": 4,
            "categoryarray": texts,
        },
        "shapes": _limit(collection),
        "height": _height_of(len(texts)),
    }
    exact = f"{counted(without, 'tensor')} without error" if without else ""
    first = joined([draws, rows.said("max"), exact])
    subtitle = " \N{MIDDLE DOT}<br>".join(part for part in (first, _above(collection, errors)) if part)
    meta["rows"] = list(rows.names)
    return build_figure("layer_errors", title, subtitle, _traces(texts, errors), layout, meta)


def _is_report(run: "Source | ErrorReport") -> "TypeGuard[ErrorReport]":
    microscope = sys.modules.get("plimsoll.microscope")  # which needs torch. A report exists only where it is loaded.
    return microscope is not None and isinstance(run, microscope.ErrorReport)


def _cells(view: View, collection: str) -> Cells | None:
    """Return the cells of a collection, if they have errors."""
    cells = view.cells(collection)
    return None if cells is None or np.isnan(cells.error_sum("errorsq")).all() else cells


def _of_report(report: "ErrorReport", collection: str) -> Errors:
    found = [row for row in report.rows if row.collection == collection]
    if not found:
        there = ", ".join(dict.fromkeys(row.collection for row in report.rows)) or "none"
        raise NotRecordedError(
            f"layer_errors: expected a collection of the report; got {collection!r}. It has {there}. Choose one."
        )
    numbers = [(row.noise, row.bias.estimate, row.bias.low, row.bias.high) for row in found]
    return [row.name for row in found], np.array(numbers)


def _of_cells(cells: Cells) -> Errors:
    """Return bias and noise over shadow steps of each tensor that has errors."""
    parts = directions(*(cells.error_sum(name) for name in _SUMS))
    with np.errstate(all="ignore"):
        energies = cells.error_sum("errorsq") / cells.error_sum("referencesq")
    names: list[str] = []
    numbers: list[tuple[float, ...]] = []
    for name, coordinates, squares in zip(cells.names, parts, energies, strict=True):
        found = split(coordinates, squares)
        if found.draws:
            bias = found.bias
            noise = found.relative_error if found.draws == 1 else found.noise
            names.append(name)
            numbers.append((noise, bias.estimate, bias.low, min(bias.high, found.relative_error)))
    return names, np.array(numbers).reshape(-1, 4)


def _distinct(collection: str, names: Sequence[str], errors: Floats) -> tuple[list[str], Floats, int]:
    """Return the distinct tensors with an error, in order, and how many have none."""
    found: dict[tuple[float, ...], int] = {}
    for i in range(len(names)):
        if errors[i, :2].any():
            found.setdefault(tuple(errors[i].tolist()), i)
    kept = [*found.values()][:: -1 if collection in _BACKWARD else 1]  # gradients come from the last layer on
    return [names[i] for i in kept], errors[kept], int((~errors[:, :2].any(axis=1)).sum())


def _traces(texts: Sequence[str], errors: Floats) -> list[Trace]:
    drawn = np.maximum(errors, _LEAST)
    shown = [[percent(x) if x >= 1e-4 or x == 0 else f"{x:.1e}" for x in row] for row in errors]
    common: Trace = {"type": "scatter", "y": texts, "customdata": shown}
    return [
        {
            **common, "mode": "markers", "x": plotted(drawn[:, 0]), "name": "noise",
            "marker": {"color": BLUE, "size": 8},
            "hovertemplate": "%{y}<br>noise %{customdata[0]}<extra></extra>",
        },
        {
            **common, "mode": "markers", "x": plotted(drawn[:, 1]), "name": "bias, with its interval",
            "marker": {"color": ORANGE, "size": 9, "symbol": "diamond"},
            "error_x": {
                "type": "data", "symmetric": False, "array": plotted(drawn[:, 3] - drawn[:, 1]),
                "arrayminus": plotted(drawn[:, 1] - drawn[:, 2]), "color": ORANGE, "thickness": 1.5, "width": 3,
            },
            "hovertemplate": "%{y}<br>bias %{customdata[1]} (%{customdata[2]} to %{customdata[3]})<extra></extra>",
        },
    ]  # fmt: skip


def _axis(errors: Floats, least: float) -> Layout:
    """Return the axis of errors in decades, to noise and biases, and to `least`."""
    known = errors[:, :2][np.isfinite(errors[:, :2]) & (errors[:, :2] > 0)]
    high = math.log10(float(known.max(initial=least))) + 0.2
    low = max(math.log10(float(known.min(initial=1e-3))) - 0.3, high - 4)
    places = range(math.ceil(low), math.floor(high) + 1)
    return {
        "type": "log", "range": [low, high], "title": {"text": "error, relative to the values"},
        "tickvals": [10.0**e for e in places], "ticktext": [_tick(e) for e in places], "zeroline": False,
    }  # fmt: skip


def _tick(exponent: int) -> str:
    return f"{100 * 10.0**exponent:g} %" if exponent >= -5 else f"10<sup>{exponent}</sup>"


def _limit(collection: str) -> list[Layout]:
    if collection not in _GRADIENTS:
        return []
    return [{"type": "line", "x0": _STALL, "x1": _STALL, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": RED, "width": 1.5, "dash": "dash"}}]  # fmt: skip


def _above(collection: str, errors: Floats) -> str:
    """Return how many rows of gradients are beyond the dashed line, in words."""
    if collection not in _GRADIENTS:
        return ""
    with np.errstate(all="ignore"):
        beyond = int((np.hypot(errors[:, 0], errors[:, 1]) > _STALL).sum())
    return f"{beyond or 'none'} above {percent(_STALL)} (dashed), where FP4 stalls"


# -- contributions to an error -----------------------------------------------------------------------------------------

_MOST_BARS = 20  # contributions with a bar of their own
_LONGEST_LABEL = 48  # characters that a narrow page has room for
_KINDS = (("noise", BLUE), ("bias", ORANGE), ("not split", GREY))


def blame_bars(found: "Blame") -> Figure:
    """Return bars of the contributions to the gradients' error, with their shares.

    Each has a module, a cast and a direction.

    A bar is split into bias and noise by their squares where the blame has asked for them. It points left where a
    contribution cancels a part of the others. Beyond 20 contributions the smaller ones share the last bar.

    Raises `ArgumentError` for what is no `Blame`.
    """
    from plimsoll.microscope import Blame  # which needs torch

    if not isinstance(found, Blame):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"blame_bars: expected the result of ErrorReport.blame; got {type(found).__name__}. Pass that."
        )
    whose = "the gradients" if found.of == "gradients" else safe(found.of)
    title = f"Blame for the error of {whose}"
    meta: Layout = {"figure": "blame_bars", "of": found.of}
    if not found.rows:
        return empty_figure("blame_bars", title, wrapped(found.sentence), meta)
    shown, rest = found.rows[:_MOST_BARS], found.rows[_MOST_BARS:]
    texts = [_label(row) for row in shown]
    parts = [_parts(row) for row in shown]
    if rest:
        texts.append(f"{len(rest):,} smaller ones")
        parts.append(tuple(sum(part) for part in zip(*map(_parts, rest), strict=True)))
    # Plotly puts the positive parts of a bar to the right of 0, and the negative ones to the left.
    low = min(sum(min(part, 0.0) for part in each) for each in parts)
    high = max(sum(max(part, 0.0) for part in each) for each in parts)
    layout: Layout = {
        "barmode": "relative",
        "bargap": 0.3,
        "xaxis": {"title": {"text": "share of the squared error"}, "zeroline": True, **share_ticks(low, 1.05 * high)},
        "yaxis": {"type": "category", "autorange": "reversed", "ticks": "", "ticklabelstandoff": 6},
        "height": 206 + 36 * len(texts),
        "margin": {"t": 108},
    }
    subtitle = f"{wrapped(found.sentence, _LONGEST_LABEL)}<br>Relative error: {percent(found.relative_error)}"
    return build_figure("blame_bars", title, subtitle, _bars(texts, parts), layout, meta)


def _label(row: "BlameRow") -> str:
    direction = "" if row.direction == "both" else f", {row.direction}"
    return f"{safe(row.module, 28)}<br>{safe(row.cast, 24)}{direction}"


def _parts(row: "BlameRow") -> tuple[float, ...]:
    """Return the share as noise, bias, and what was not split."""
    if row.bias is None or row.noise is None:
        return 0.0, 0.0, row.share
    squares = row.noise**2, row.bias.estimate**2
    whole = sum(squares)
    return (row.share * squares[0] / whole, row.share * squares[1] / whole, 0.0) if whole > 0 else (0.0, 0.0, row.share)


def _bars(texts: Sequence[str], parts: Sequence[tuple[float, ...]]) -> list[Trace]:
    traces: list[Trace] = []
    for i, (kind, colour) in enumerate(_KINDS):
        values = [part[i] for part in parts]
        if any(values):
            shown = [f"-{percent(-x)}" if x < 0 else percent(x) for x in values]
            traces.append({
                "type": "bar", "orientation": "h", "x": values, "y": texts, "name": kind, "marker": {"color": colour},
                "customdata": shown, "showlegend": True,
                "hovertemplate": f"%{{y}}<br>{kind} %{{customdata}}<extra></extra>",
            })  # fmt: skip
    return traces


# -- two recipes -------------------------------------------------------------------------------------------------------

_VERDICT_COLOURS = {"equivalent": GREEN, "better": GREEN, "worse": RED, "undecided": ORANGE}
_ROOM = 3.0  # tolerances above and below zero that are always shown; early intervals are far wider
_HEIGHT = 420


def parity(found: Parity) -> Figure:
    """Return a figure of the paired difference over the steps, and the tolerance.

    Points are means of the candidate's values less the base's over stretches of steps. The line is the weighted mean of
    all steps so far, which the verdict is about, and the band its interval. The verdict is decided where the band lies
    within the tolerance or beyond it.

    Raises `ArgumentError` for what is no `Parity`.
    """
    if not isinstance(found, Parity):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"parity figure: expected the result of plimsoll.parity; got {type(found).__name__}. Pass that."
        )
    meta: Layout = {"figure": "parity", "verdict": found.verdict}
    title = f"{capital(found.verdict)}: paired difference of the {safe(found.scalar)}"
    said = capital(found.sentence.partition(": ")[2])
    if not found.history:
        return empty_figure("parity figure", title, wrapped(said), meta)
    per_cent = found.relative and found.level != 0
    unit = 100 / abs(found.level) if per_cent else 1.0
    steps = np.array([moment.step for moment in found.history], dtype=np.int64)
    middle, low, high = (
        unit * np.array([getattr(moment.difference, end) for moment in found.history])
        for end in ("estimate", "low", "high")
    )
    allowed = unit * found.tolerance
    at, paired = np.array([step for step, _ in found.paired], dtype=np.int64), np.array([d for _, d in found.paired])
    reach = _reach(allowed, unit * paired, low[-1], high[-1])
    sign = " %" if per_cent else ""
    hover = f"step %{{x:,d}}<br>difference %{{y:+.3~g}}{sign}"
    traces = [
        *band(steps, np.clip(low, -reach, reach), np.clip(high, -reach, reach), "interval at that step", BLUE),
        line(at, unit * paired, "paired difference", GREY, hover, mode="markers", marker={"color": GREY, "size": 4}),
        line(steps, middle, "weighted mean so far", _VERDICT_COLOURS[found.verdict], hover, line={"width": 2.5}),
    ]
    decided = found.verdict != "undecided"
    marks, notes = since_mark(found.since_step if decided else None, f"{found.verdict} since step")
    layout: Layout = {
        "xaxis": dict(STEP_AXIS),
        "yaxis": {"title": {"text": f"difference{sign and ', % of the base'}"}, "range": [-reach, reach],
                  "tickformat": "+~g", "zeroline": True, "ticksuffix": sign},
        "shapes": [*(_tolerance_limit(side * allowed) for side in (-1, 1)), *marks],
        "annotations": [*(_word(side * allowed, word) for side, word in ((1, "tolerance"), (-1, "tolerance"))), *notes],
        "height": _HEIGHT,
    }  # fmt: skip
    return build_figure("parity figure", title, joined([wrapped(said), wrapped(found.remaining)]), traces, layout, meta)


def _reach(allowed: float, paired: "np.ndarray[tuple[int], np.dtype[np.float64]]", low: float, high: float) -> float:
    """Return the axis's reach: the tolerance, last interval, and nearly all points."""
    ends = [_ROOM * allowed, float(np.quantile(np.abs(paired), 0.95))]
    ends += [abs(end) for end in (low, high) if np.isfinite(end) and abs(end) < 20 * allowed]
    return 1.1 * max(ends)


def _tolerance_limit(height: float) -> Layout:
    return {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": height, "y1": height,
            "line": {"color": PURPLE, "width": 1.5, "dash": "dash"}}  # fmt: skip


def _word(height: float, word: str) -> Layout:
    return {"text": word, "x": 1, "xref": "paper", "xanchor": "right", "y": height,
            "yanchor": "bottom" if height > 0 else "top", "font": {"color": PURPLE}}  # fmt: skip
