"""`layer_errors`: bias and noise of each layer's error against FP32, in order."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from plimsoll.diagnosis import View
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.errors import NotRecordedError
from plimsoll.report.drawing.aggregation import Rows
from plimsoll.report.drawing.plotly_parts import (
    Layout,
    Source,
    Trace,
    build_figure,
    empty_figure,
    plotted,
    series_checked,
    view_of,
)
from plimsoll.report.drawing.theme import BLUE, ORANGE, RED
from plimsoll.report.figure_declaration import Case, figure
from plimsoll.report.labels import joined, labels, of
from plimsoll.spectrum.error_sums import STALL_DB, directions, split
from plimsoll.tensor_collections import BACKWARD, COLLECTIONS, IN_DISPLAY_ORDER, OF_MODULES
from plimsoll.text import counted, percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    from plimsoll.microscope import ErrorReport

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
def layer_errors(run: "Source | ErrorReport", collection: str = "gradients", *, until: int | None = None) -> "Figure":
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
