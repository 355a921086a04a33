"""Heat maps: a number of each layer (down) at each step (across) as colour.

`heatmap` draws any statistic; `zero_heatmap` draws which values are zero, and which zeros a format has made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.finding import collection_words
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP32, Format, get
from plimsoll.report.drawing.aggregation import MOST_CELLS, How, Rows, few
from plimsoll.report.drawing.heatmap_statistics import STATISTICS, Matrix, Scale, Statistic
from plimsoll.report.drawing.plotly_parts import (
    Figure,
    Layout,
    Trace,
    build_figure,
    empty_figure,
    joined,
    labels,
    of,
    power,
    powers,
    series_checked,
    since_mark,
    step_axis,
)
from plimsoll.report.figure_declaration import Case, figure
from plimsoll.runs.records import FLIPS
from plimsoll.tensor_collections import IN_DISPLAY_ORDER
from plimsoll.text import capital, counted, percent

_LONGEST_NAME = 300  # characters of a series' name that `meta` carries for whoever follows a click
_FOCUS_ABOVE = 60  # layers above which only those in focus are drawn
_SHARE_TICKS = (0.0, 0.01, 0.05, 0.25, 0.5, 1.0)
_COUNT_TICKS = (0, 1, 10, 100, 1000, 10_000, 1_000_000)


# In the order of the page's list, whose first entry is shown at first.
_LABELS = {
    "underflow": "Underflow of {}",
    "error": "Error of {}",
    "ratio": "Update / weight",
    "norm": "Norm of {}",
    "std": "Standard deviation of {}",
    "zero": "Zeros of {}",
    "unmoved": "Weights that did not move",
}


def _cases(view: View) -> list[Case]:
    """Return a case for each collection's statistic whose heat map may show something."""
    return [
        Case(
            label=label.format(collection_words(collection.name)),
            arguments={"statistic": statistic, "collection": collection.name},
        )
        for statistic, label in _LABELS.items()
        for collection in IN_DISPLAY_ORDER
        if statistic in collection.heatmaps
        and collection.name in view.run.tensors
        and not (statistic == "underflow" and _flushes_nothing(view_formats(view, collection.name)))
        and not (statistic == "error" and not _shadowed(view, collection.name))
    ]


def height_of_rows(rows: int) -> int:
    """Return the height of a heat map, in pixels."""
    return min(max(170 + 22 * rows, 260), 680)


def _height(view: View, arguments: Mapping[str, Any]) -> int:
    names = view.run.tensors.get(str(arguments.get("collection") or "gradients"), ())
    if arguments.get("statistic", "underflow") == "underflow" and arguments.get("collection") in (None, "gradients"):
        names = {name.rpartition(".")[0] for name in names}  # of parameter gradients a row is a module
    return height_of_rows(len(names))


def _of_finding(view: View, finding: Finding, *, statistic: str, **arguments: Any) -> Figure:
    collection = finding.collection or "gradients"
    return heatmap(view, statistic, collection, focus=finding.where, since_step=finding.since_step, **arguments)


@figure(offered="layers", cases=_cases, of_finding=_of_finding, height=_height)
def heatmap(
    run: Source,
    statistic: str = "underflow",
    collection: str = "gradients",
    *,
    focus: Sequence[str] = (),
    since_step: int | None = None,
    until: int | None = None,
) -> Figure:
    """Layers by steps: one number of each layer at each step as a colour.

    - `statistic`: "underflow" (of parameters' gradients by module, as the rules judge it), "zero", "nonfinite",
      "headroom" (binades left to the top of the format that held the values), "norm", "rms", "std", "absmean",
      "absmax", "kurtosis", of updates "ratio" and "unmoved", of shadow steps "error" (relative) and "bias" (its part
      along the values, or the same in all), of weights in blocks "last_bin".
    - `focus`: names whose rows are set in bold, or drawn alone where there are more than 60; `since_step` is marked.

    Layers stand in the order in which they were first measured. Of many, those with one prefix share a row, and many
    steps share a column; the figure says what is shown of them. Raises `ArgumentError` for another statistic and
    `NotRecordedError` for a collection that the run does not have.
    """
    view = view_of(run, until, "heatmap")
    if not isinstance(statistic, str) or statistic not in STATISTICS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"heatmap: expected a statistic among {', '.join(STATISTICS)}; got {statistic!r}. Choose one."
        )
    kind = STATISTICS[statistic]
    title = f"{capital(of(collection))}: {kind.title}"
    meta = {"figure": "heatmap", "collection": collection, "statistic": statistic}
    if not view.run.tensors:
        return empty_figure("heatmap", title, "Nothing was recorded in this run.", meta)
    if statistic in ("ratio", "unmoved") and collection != "updates":
        raise ArgumentError(
            f"heatmap: expected collection='updates' with {statistic!r}; got {collection!r}. Give that collection."
        )
    series_checked(view, "heatmap", collection)
    matrix = kind.of(view, collection)
    if matrix is not None:  # a size over a weight that is all zeros is infinite, and no colour
        matrix = replace(matrix, values=np.where(np.isfinite(matrix.values), matrix.values, np.nan))
    if matrix is None or np.isnan(matrix.values).all():
        return empty_figure("heatmap", title, f"No {of(collection)} with such a number up to this step.", meta)
    formats = view_formats(view, collection)
    wide = statistic == "underflow" and _flushes_nothing(formats)
    note = f"recorded in {', '.join(formats)}, which flushes nothing" if wide else ""
    return painted("heatmap", title, note, kind, matrix, meta, focus=focus, since_step=since_step)


def _underflow_of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    return underflow_heatmap(
        view, finding.collection or "gradients", focus=finding.where, since_step=finding.since_step, **arguments
    )


@figure(name="underflow_heatmap", of_finding=_underflow_of_finding, height=_height)
def underflow_heatmap(run: Source, collection: str = "gradients", **more: Any) -> Figure:
    """Heat map of underflow: `heatmap` with this statistic."""
    return heatmap(run, "underflow", collection, **more)


def _flips_of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    return flips_heatmap(view, focus=finding.where, since_step=finding.since_step, **arguments)


@figure(of_finding=_flips_of_finding)
def flips_heatmap(
    run: Source, *, focus: Sequence[str] = (), since_step: int | None = None, until: int | None = None
) -> Figure:
    """Modules that decide by shadow steps: the share of their decisions that rounding has changed.

    - `focus`: names whose rows are set in bold; `since_step` is marked.
    """
    view = view_of(run, until, "flips_heatmap")
    flips = {name: view.scalar(name) for name in view.run.scalar_names if name.startswith(FLIPS)}
    title, meta = "Decisions that rounding has changed", {"figure": "flips_heatmap"}
    steps = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(at for at, _ in flips.values())]))
    if not len(steps):
        return empty_figure("flips_heatmap", title, "No shadow step has seen a decision up to this step.", meta)
    values = np.full((len(flips), len(steps)), np.nan)
    for row, (at, shares) in enumerate(flips.values()):
        values[row, np.searchsorted(steps, at)] = shares
    names = tuple(name.removeprefix(FLIPS) for name in flips)
    kind = Statistic(title=title, words="flipped", how="max", scale="share", of=lambda _, __: None)
    matrix = Matrix(names=names, series=names, steps=steps, values=values)
    return painted("flips_heatmap", title, "", kind, matrix, meta, focus=focus, since_step=since_step)


def _shadowed(view: View, collection: str) -> bool:
    cells = view.cells(collection)
    return cells is not None and not np.isnan(cells.column("compared")).all()


def view_formats(view: Any, collection: str) -> list[str]:
    """The formats that a collection was recorded in."""
    cells = view.cells(collection)
    return [] if cells is None else list(cells.formats)


def painted(
    operation: str,
    title: str,
    note: str,
    kind: Statistic,
    matrix: Matrix,
    meta: Layout,
    *,
    focus: Sequence[str] = (),
    since_step: int | None = None,
) -> Figure:
    """A matrix as a heat map."""
    drawn = panel(matrix, kind.how, kind.scale, kind.words, focus=focus)
    shapes, notes = since_mark(since_step)
    layout: Layout = {
        "xaxis": drawn.steps,
        "yaxis": drawn.axis,
        "coloraxis": drawn.colours,
        "height": height_of_rows(drawn.count),
        "shapes": shapes,
        "annotations": notes,
    }
    subtitle = joined([drawn.only, note, *drawn.merged])
    return build_figure(operation, title, subtitle, [drawn.trace], layout, {**meta, "rows": drawn.rows})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """One picture of layers by steps, as parts of a figure.

    `count`: how many rows are drawn. `rows`: the tensor behind each, for `meta`. `only` and `merged`: what is left out
    and what is merged, in words.
    """

    trace: Trace
    axis: Layout
    steps: Layout
    colours: Layout
    count: int
    rows: list[str | None]
    only: str
    merged: tuple[str, str]


def panel(
    matrix: Matrix,
    how: How,
    scale: Scale,
    words: str,
    *,
    focus: Sequence[str] = (),
    most_cells: int = MOST_CELLS,
    top: float | None = None,
) -> Panel:
    """Return the picture of a matrix, merged into at most `most_cells` cells."""
    matrix, only = focused(matrix, focus)
    rows, columns = few(matrix.names, matrix.steps, most_cells)
    colour = coloured(rows.merged(columns.merged(matrix.values, how), how), scale, words, top)
    ticks = row_labels(rows, matrix, focus)
    trace: Trace = {
        "type": "heatmap", "x": columns.at, "y": ticks, "z": colour.z, "coloraxis": "coloraxis",
        "ygap": 1 if len(ticks) <= 40 else 0, "hoverongaps": False,
        "hovertemplate": f"%{{y}}<br>{columns.when} %{{x}}<br>{colour.hover}<extra></extra>",
    }  # fmt: skip
    if colour.shown is not None:
        trace["customdata"] = colour.shown
    return Panel(
        trace=trace,
        axis={"type": "category", "autorange": "reversed", "showgrid": False, "ticks": ""},
        steps=step_axis(columns.at),
        colours=colour.axis,
        count=len(ticks),
        rows=series_of(rows, matrix),
        only=only,
        merged=(columns.said(how), rows.said(how)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Colour:
    """Numbers as colours: `z`, the colour axis, and hover texts with `shown`."""

    z: Floats
    axis: Layout
    hover: str
    shown: Floats | None = None


def coloured(values: Floats, scale: Scale, words: str, top: float | None = None) -> Colour:
    """Return a matrix's colours; shares up to `top`, or the next tick above them."""
    if scale == "share":
        top = top or next((t for t in _SHARE_TICKS[2:] if not np.nanmax(values) > t), 1.0)
        ticks = [t for t in _SHARE_TICKS if t <= top]
        axis = _axis(0.0, np.sqrt(top), [float(np.sqrt(t)) for t in ticks], [percent(t) for t in ticks], words)
        z = np.sqrt(np.clip(values, 0.0, 1.0))
        hover = f"{words}: %{{customdata:.3~r}} %"
        return Colour(z=_small(z), axis=axis, hover=hover, shown=_small(100 * values))
    if scale == "count":
        z = np.log2(values + 1)
        most = max(float(np.nanmax(z)), 1.0)
        ticks = [n for n in _COUNT_TICKS if np.log2(n + 1) <= most]
        axis = _axis(0.0, most, [float(np.log2(n + 1)) for n in ticks], [f"{n:,}" for n in ticks], words)
        hover = f"{words}: %{{customdata:,d}}"
        return Colour(z=_small(z), axis=axis, hover=hover, shown=_small(values))
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    places, texts = powers(low, high, 7)
    if scale == "binades":
        texts = [f"{place:.0f}" for place in places]
        return Colour(z=_small(values), axis=_axis(low, high, places, texts, words), hover=f"{words}: %{{z:.1f}}")
    hover = f"{words}: 2<sup>%{{z:.1f}}</sup>"
    return Colour(z=_small(values), axis=_axis(low, high, places or [low], texts or [power(low)], words), hover=hover)


def _axis(low: float, high: float, places: list[float], texts: list[str], words: str) -> Layout:
    bar = {"tickvals": places, "ticktext": texts, "title": {"text": words}}
    return {"cmin": low, "cmax": float(high), "colorbar": bar}


def _small(values: Floats) -> Any:
    return values.astype(np.float32)


def focused(matrix: Matrix, focus: Sequence[str]) -> tuple[Matrix, str]:
    """Only the rows in focus, where there are too many to see them among the others."""
    wanted = set(focus)
    blank = np.isnan(matrix.values)
    places = [i for i, name in enumerate(matrix.series) if name in wanted and not blank[i].all()]
    if not places or len(matrix.names) <= _FOCUS_ABOVE or len(places) == len(matrix.names):
        return matrix, ""
    chosen = Matrix(
        names=tuple(matrix.names[i] for i in places),
        series=tuple(matrix.series[i] for i in places),
        steps=matrix.steps,
        values=matrix.values[places],
    )
    return chosen, f"the {len(places):,} concerned of {len(matrix.names):,}"


def row_labels(rows: Rows, matrix: Matrix, focus: Sequence[str]) -> list[str]:
    """Names of the rows, bold where a finding names them."""
    wanted = set(focus)
    place = rows.place.tolist()
    bold = {place[i] for i, name in enumerate(matrix.series) if name in wanted}
    texts = labels(rows.names)
    return [f"<b>{t}</b>" if i in bold and len(bold) < len(texts) else t for i, t in enumerate(texts)]


def series_of(rows: Rows, matrix: Matrix) -> list[str | None]:
    """For each row the tensor to look at: its first one."""
    names = [matrix.series[int(i)] for i in rows.order[rows.starts]]
    return [name if len(name) <= _LONGEST_NAME else None for name in names]


def _flushes_nothing(formats: Sequence[str]) -> bool:
    """Return whether all formats reach as far down as FP32."""
    known = [get(name) for name in formats]
    return bool(known) and all(isinstance(fmt, Format) and fmt.exponent_bits >= FP32.exponent_bits for fmt in known)


# -- zeros -------------------------------------------------------------------------------------------------------------


def _zeros_of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    collection = finding.collection or "gradients"
    return zero_heatmap(view, collection, focus=finding.where, since_step=finding.since_step, **arguments)


def _height_of_zeros(rows: int, parts: int) -> int:
    return min(max(150 + (30 + 18 * rows) * parts, 260), 760)


def _height_of_zero_heatmap(view: View, arguments: Mapping[str, Any]) -> int:
    narrow = view.narrow(str(arguments.get("collection") or "activations"))
    return 260 if narrow is None else _height_of_zeros(len(narrow.cells.names), 2 if narrow.censors.any() else 1)


@figure(of_finding=_zeros_of_finding, height=_height_of_zero_heatmap)
def zero_heatmap(
    run: Source,
    collection: str = "activations",
    *,
    focus: Sequence[str] = (),
    since_step: int | None = None,
    until: int | None = None,
) -> Figure:
    """Layers by steps: above, the share of values that are zero in any format; below, of those that underflowed.

    A shadow step counts the two apart; at other steps the second is estimated, as the rules do. Formats that flush
    nothing have the first picture alone.

    - `focus`: names whose rows are set in bold, or drawn alone where there are many; `since_step` is marked.

    Raises `NotRecordedError` for a collection that the run does not have.
    """
    view = view_of(run, until, "zero_heatmap")
    title = f"{capital(of(collection))}: values that are zero"
    meta: Layout = {"figure": "zero_heatmap", "collection": collection}
    if not view.run.tensors:
        return empty_figure("zero_heatmap", title, "Nothing was recorded in this run.", meta)
    series_checked(view, "zero_heatmap", collection)
    narrow = view.narrow(collection)
    if narrow is None or np.isnan(narrow.cells.zero_fraction).all():
        return empty_figure("zero_heatmap", title, f"No {of(collection)} were recorded up to this step.", meta)
    return _zeros_painted(title, _zero_parts(narrow), _zeros_said(narrow), narrow.cells, meta, focus, since_step)


def _zero_parts(narrow: FormatLosses) -> list[tuple[str, Floats]]:
    """Pictures with their share of all values, by cell."""
    cells = narrow.cells
    count = cells.total_of("count")
    with np.errstate(all="ignore"):
        flushed = np.fmin(np.nan_to_num(narrow.lost_of_cell), cells.total_of("zeros")) / count
        rest = cells.zero_fraction - flushed
    parts = [("zero in any format", rest)]
    if narrow.censors.any():
        parts.append(("underflowed", flushed))
    return parts


def _zeros_painted(
    title: str,
    parts: Sequence[tuple[str, Floats]],
    said: str,
    cells: Cells,
    meta: Layout,
    focus: Sequence[str],
    since_step: int | None,
) -> Figure:
    traces: list[Trace] = []
    marks, notes = since_mark(since_step)
    layout: Layout = {"shapes": marks, "annotations": notes}
    top, drawn = 1.0, None
    part_height = (1.0 - 0.1 * (len(parts) - 1)) / len(parts)
    for i, (words, values) in enumerate(parts):
        matrix = Matrix(names=cells.names, series=cells.names, steps=cells.steps, values=values)
        drawn = panel(matrix, "mean", "share", words, focus=focus, most_cells=MOST_CELLS // len(parts), top=1.0)
        axis = "y" if i == 0 else f"y{i + 1}"
        traces.append({**drawn.trace, "yaxis": axis, "name": words})
        layout[f"yaxis{axis[1:]}"] = {**drawn.axis, "domain": [max(top - part_height, 0.0), top]}
        notes.append({"text": f"<b>{words}</b>", "x": 1, "xref": "paper", "xanchor": "right", "y": top, "yref": "paper",
                      "yanchor": "bottom"})  # fmt: skip
        bar = {**drawn.colours["colorbar"], "title": {"text": "of all values"}}
        layout["coloraxis"] = {**drawn.colours, "colorbar": bar}
        layout["xaxis"] = {**drawn.steps, "anchor": axis}
        top -= part_height + 0.1
    assert drawn is not None  # there is always the first part
    meta["rows"] = drawn.rows
    layout["height"] = _height_of_zeros(drawn.count, len(parts))
    subtitle = joined([said, drawn.only, *drawn.merged])
    return build_figure("zero_heatmap", title, subtitle, traces, layout, meta)


def _zeros_said(narrow: FormatLosses) -> str:
    if not narrow.censors.any():
        return f"recorded in {', '.join(narrow.cells.formats)}, which flushes nothing"
    counted_apart = ~np.isnan(narrow.cells.column("underflowed"))
    if not counted_apart.any():
        return "what underflowed is estimated; a shadow step would count it"
    steps = len(np.unique(narrow.cells.at[counted_apart]))
    return f"what underflowed is counted at {counted(steps, 'shadow step')}, and estimated at the others"
