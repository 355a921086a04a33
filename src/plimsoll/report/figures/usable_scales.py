"""Loss scales that gradients fit: `scale_curve` and `scale_window`.

The curve has the cost of each loss scale, with all layers and steps added up. The window has the scales that fit all
layers over time, and the one used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.estimates.usable_scales import TOLERANCE, Scales
from plimsoll.diagnosis.finding import layer_name
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.errors import FormatError
from plimsoll.formats import FP16, BlockFormat, Format, get, get_element
from plimsoll.report.drawing.aggregation import Columns, histogram
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    STEP_AXIS,
    Figure,
    Layout,
    Trace,
    build_figure,
    empty_figure,
    joined,
    line,
    of,
    power,
    powers,
    safe,
    scale_range,
    series_checked,
    share_ticks,
    since_mark,
)
from plimsoll.report.figure_declaration import figure, if_scaled
from plimsoll.text import capital, counted, percent

# -- the cost of each scale --------------------------------------------------------------------------------------------

_AROUND = 4  # powers of two that are drawn beyond the window
_COSTS: WeakKeyDictionary[FormatLosses, dict[Format, tuple[Ints, Floats, Floats]]] = WeakKeyDictionary()
_WIDE_BINADES = 100  # formats that reach farther are no one's trouble


@figure(offered="scale", cases=if_scaled("Loss scale"), height=430)
def scale_curve(run: Source, fmt: object = None, collection: str = "gradients", *, until: int | None = None) -> Figure:
    """Shares of all recorded values that a format would lose, or that overflow, at each loss scale.

    The scales that work for all layers at all steps (nothing overflows, less than 1 % of any layer is lost) are shaded;
    those that were used are marked. The curves add all layers and steps up: `scale_window` tells them apart.

    - `fmt`: None for the narrowest format that the collection was recorded in, or FP16 where that is a wide one.

    Raises `NotRecordedError` for a collection that the run does not have, `FormatError` for one of blocks or scales.
    """
    view = view_of(run, until, "scale_curve")
    chosen = None if fmt is None else element(fmt, "scale_curve")
    title, meta = "What each loss scale would cost", {"figure": "scale_curve", "collection": collection}
    if not view.run.tensors:
        return empty_figure("scale_curve", title, "Nothing was recorded in this run.", meta)
    series_checked(view, "scale_curve", collection)
    cells = view.cells(collection)
    if cells is None or not cells.nonzero.any():
        return empty_figure("scale_curve", title, f"No {of(collection)} but zeros were recorded up to this step.", meta)
    chosen = chosen or _narrowest(cells)
    title = f"{capital(of(collection))} in {chosen.name.upper()}: what each loss scale would cost"
    shifts, lost, over = _known_costs(view, cells, chosen)
    narrow = view.narrow(collection)
    window = None if narrow is None else Scales.of_record(narrow, chosen).window
    used = _used(view)
    meta |= {"format": chosen.name, "window": None if window is None else list(window)}
    shapes, notes = _window_mark(window)
    more, words = _used_mark(used, shifts)
    places, texts = powers(float(shifts[0]), float(shifts[-1]), 12)
    top = 1.05 * float(max(lost.max(), over.max()))
    layout: Layout = {
        "xaxis": {"title": {"text": "loss scale"}, "tickvals": places, "ticktext": texts, "zeroline": False},
        "yaxis": {"title": {"text": "share of the values"}, "rangemode": "tozero", **share_ticks(0, top)},
        "shapes": [*shapes, *more],
        "annotations": [*notes, *words],
        "height": 400,
    }
    hover = "%{fullData.name}<br>scale 2<sup>%{x}</sup><br>%{y:.2~%}"
    traces = [
        line(shifts, lost, "lost: rounds to zero", PURPLE, hover),
        line(shifts, over, "overflows", RED, hover),
    ]
    return build_figure("scale_curve", title, _said(window, used, lost, over), traces, layout, meta)


def _known_costs(view: View, cells: Cells, fmt: Format) -> tuple[Ints, Floats, Floats]:
    """The costs, computed once for each record and format."""
    narrow = view.narrow(cells.collection)
    if narrow is None:
        return _costs(view, cells, fmt)
    remembered = _COSTS.setdefault(narrow, {})
    if fmt not in remembered:
        remembered[fmt] = _costs(view, cells, fmt)
    return remembered[fmt]


def _costs(view: View, cells: Cells, fmt: Format) -> tuple[Ints, Floats, Floats]:
    """Shifts, and at each the share of all values that is lost and that overflows."""
    whole = _summed(cells)
    values = Populations(cells=whole)
    flushed = _Flushed.of(view, cells, fmt)
    total = float(whole.nonzero[0]) + flushed.total
    highest = int(values.highest_shift(fmt)[0])
    lowest = int(values.lowest_shift(fmt, TOLERANCE)[0])
    shifts = np.arange(min(lowest, highest) - _AROUND - 2, max(lowest, highest) + _AROUND + 3, dtype=np.int64)
    lost = [float(values.lost(fmt, int(k)).estimate[0]) + flushed.still(int(k)) for k in shifts]
    over = [float(values.overflow(fmt, int(k)).estimate[0]) for k in shifts]
    return shifts, np.array(lost) / total, np.array(over) / total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flushed:
    """Rows' flushed values and spread; `held`: the shift at which the format asked about flushes the same."""

    lost: Floats
    held: Floats
    spread: Floats

    @classmethod
    def of(cls, view: View, cells: Cells, fmt: Format) -> "_Flushed":
        narrow = view.narrow(cells.collection)
        nothing_lost = np.empty(0)
        if narrow is None or not narrow.censors.any():
            return cls(lost=nothing_lost, held=nothing_lost, spread=nothing_lost)
        floors = np.round(narrow.floor_shift(fmt)).astype(np.int64)
        lost = np.nan_to_num(narrow.lost)
        with np.errstate(all="ignore"):
            spread = -np.log2(narrow.hidden(fmt, floors + 1) / lost)  # what one power of two more brings back
        some = lost > 0
        return cls(lost=lost[some], held=floors[some].astype(np.float64), spread=spread[some])

    @property
    def total(self) -> float:
        return float(self.lost.sum())

    def still(self, shift: int) -> float:
        """About how many of them would be lost at another scale too."""
        return float((self.lost * 2.0 ** (-self.spread * np.maximum(shift - self.held, 0.0))).sum())


def _summed(cells: Cells) -> Cells:
    """All rows as one, scales undone."""
    lift = np.round(np.log2(cells.scale)).astype(np.int64)
    low, counts = histogram(cells, cells.lowest - lift)
    one, zero = np.ones(1), np.zeros(1, dtype=np.int64)
    smallest, largest = (
        choose(cells.column(name) / cells.scale) * one
        for choose, name in ((np.nanmin, "absmin"), (np.nanmax, "absmax"))
    )
    columns = {"absmin": smallest, "absmax": largest, "min": smallest, "max": largest}
    return Cells(
        collection=cells.collection,
        names=("all",),
        steps=zero,
        formats=("fp32",),
        layer=zero,
        at=zero,
        format=zero,
        scale=one,
        columns=columns,
        lowest=zero + low,
        start=np.array([0, len(counts)]),
        flat=counts.astype(np.int64),
    )


def _said(window: tuple[int, int] | None, used: tuple[int, int] | None, lost: Floats, over: Floats) -> str:
    if window is not None:
        usable = f"{scale_range(*window)} work at all steps: nothing overflows, less than 1 % of any layer is lost"
    else:
        best = int(np.argmax(over > 0)) - 1
        usable = f"no scale works for all layers: below overflow, {percent(float(lost[max(best, 0)]))} is lost at best"
    if used is None:
        return joined([usable, "no loss scale was recorded"])
    return joined([usable, f"used: {scale_range(*used)}"])


def _window_mark(window: tuple[int, int] | None) -> tuple[list[Layout], list[Layout]]:
    if window is None:
        return [], []
    low, high = window
    box = {"type": "rect", "x0": low - 0.5, "x1": high + 0.5, "y0": 0, "y1": 1, "yref": "paper", "layer": "below",
           "fillcolor": "rgba(31,157,120,0.18)", "line": {"width": 0}}  # fmt: skip
    note = {"text": "these work", "x": (low + high) / 2, "y": 0.97, "yref": "paper", "yanchor": "top",
            "font": {"color": GREEN}}  # fmt: skip
    return [box], [note]


def _used(view: View) -> tuple[int, int] | None:
    """The lowest and the highest loss scale that was used, as powers of two."""
    values = view.scalar("scale")[1]
    known = np.round(np.log2(values[np.isfinite(values) & (values > 0)])).astype(np.int64)
    return (int(known.min()), int(known.max())) if len(known) else None


def _used_mark(used: tuple[int, int] | None, shifts: Ints) -> tuple[list[Layout], list[Layout]]:
    """Lines at the scales used, as far as they lie in the picture."""
    if used is None:
        return [], []
    words = {used[0]: "lowest used", used[1]: "highest used"} if used[0] != used[1] else {used[0]: "used"}
    inside = {at: said for at, said in words.items() if shifts[0] <= at <= shifts[-1]}
    shapes = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": BLUE, "width": 2, "dash": "dot"}} for at in inside
    ]  # fmt: skip
    notes = [
        {"text": said, "x": at, "y": 1, "yref": "paper", "yanchor": "bottom", "font": {"color": BLUE}}
        for at, said in inside.items()
    ]
    return shapes, notes


def _narrowest(cells: Cells) -> Format:
    known = [get_element(name, "scale_curve") for name in cells.formats]
    own = min(known, key=lambda fmt: (fmt.bits, fmt.name))
    return own if own.binades < _WIDE_BINADES else FP16


def element(fmt: object, operation: str) -> Format:
    """Return the element format; raise `FormatError` for block and scale formats."""
    known = get(fmt)
    if isinstance(known, BlockFormat) or not known.signed:
        raise FormatError(
            f"{operation}: expected a format for values; got {known.name}. Ask for an element format, as fp16 or e4m3."
        )
    return known


# -- usable scales over time -------------------------------------------------------------------------------------------


def _window_of_finding(view: View, finding: Finding, **arguments: Any) -> Figure:
    return scale_window(view, since_step=finding.since_step, **arguments)


@figure(offered="scale", cases=if_scaled("Scales that work"), of_finding=_window_of_finding, height=450)
def scale_window(
    run: Source,
    fmt: object = None,
    *,
    focus: Sequence[str] = (),
    since_step: int | None = None,
    until: int | None = None,
) -> Figure:
    """Which loss scales work at each step: the lowest at which no layer loses 1 %, the highest without overflow.

    Where the first lies above the second no single scale works; those stretches are shaded. The scale that was used
    is drawn over it. Judged by parameters' gradients, by module.

    - `fmt`: the format to hold them, FP16 by default.
    - `focus`: layers whose own bounds are drawn; `since_step` is marked.

    Raises `NotRecordedError` for a run without gradients, unless nothing at all was recorded.
    """
    view = view_of(run, until, "scale_window")
    chosen = FP16 if fmt is None else element(fmt, "scale_window")
    title = f"Loss scales that work for all layers in {chosen.name.upper()}"
    meta: Layout = {"figure": "scale_window", "format": chosen.name}
    if not view.run.tensors:
        return empty_figure("scale_window", title, "Nothing was recorded in this run.", meta)
    series_checked(view, "scale_window", "gradients")
    scales = Scales.of(view, chosen)
    if scales is None or np.isnan(scales.need).all():
        return empty_figure("scale_window", title, "No gradients but zeros were recorded up to this step.", meta)
    columns = Columns.of(scales.cells.steps)
    need, room = columns.merged(scales.need, "max"), columns.merged(scales.room, "min")
    used = _used_over_time(view, columns)
    traces = [*_bounds(columns, need, room), *_own(scales, columns, focus), *_used_line(columns, used)]
    known = np.concatenate([np.asarray(t["y"], dtype=np.float64) for t in traces])
    known = known[np.isfinite(known)]
    low, high = float(known.min()) - 2, float(known.max()) + 2
    places, texts = powers(low, high, 10)
    shapes, notes = since_mark(since_step)
    layout: Layout = {
        "xaxis": dict(STEP_AXIS),
        "yaxis": {"title": {"text": "loss scale"}, "tickvals": places, "ticktext": texts, "range": [low, high],
                  "zeroline": False},
        "shapes": [*_none_serves(columns, need, room), *shapes],
        "annotations": notes,
        "height": 420,
    }  # fmt: skip
    said = _window_said(scales.window, need, room, used, "sample" if columns.each == 1 else "column")
    bounds = joined([_extremes(scales), columns.said("min").replace("the lowest", "the worst")])
    # Two lines: one of both would be cut at the figure's edge. A page writes them as one.
    return build_figure("scale_window", title, f"{said} ·<br>{bounds}", traces, layout, meta)


def _bounds(columns: Columns, need: Floats, room: Floats) -> list[Trace]:
    """The two bounds, and the window between them where there is one."""
    there = need <= room
    shade: Trace = {"type": "scatter", "mode": "lines", "x": columns.at, "line": {"width": 0}, "hoverinfo": "skip"}
    top = np.where(there, room, np.fmin(need, room))
    bottom = np.where(there, need, np.fmin(need, room))
    when = f"{columns.when} %{{x}}"
    return [
        {**shade, "y": bottom.astype(np.float32), "showlegend": False, "connectgaps": True},
        {**shade, "y": top.astype(np.float32), "fill": "tonexty", "fillcolor": "rgba(31,157,120,0.20)",
         "name": "these work", "connectgaps": True},
        line(columns.at, room, "overflow above", RED, when + "<br>overflow above 2<sup>%{y:.0f}</sup>",
             connectgaps=True),
        line(columns.at, need, "a layer loses over 1 % below", PURPLE,
             when + "<br>over 1 % of a layer is lost below 2<sup>%{y:.0f}</sup>", connectgaps=True),
    ]  # fmt: skip


def _own(scales: Scales, columns: Columns, focus: Sequence[str]) -> list[Trace]:
    """Lowest scale that each of the layers in focus needs."""
    colours = (ORANGE, GREEN)
    places = {name: i for i, name in enumerate(scales.names)}
    chosen = [places[name] for name in focus if name in places][: len(colours)]
    traces: list[Trace] = []
    for i, colour in zip(chosen, colours, strict=False):
        hover = "%{fullData.name}<br>step %{x}<br>2<sup>%{y:.0f}</sup>"
        for bound, says, dash in ((scales.low, "needs", "dot"), (scales.high, "overflows above", "dash")):
            at = columns.merged(bound[i], "max" if says == "needs" else "min")
            name, style = f"{safe(layer_name(scales.names[i]), 30)} {says}", {"width": 1.3, "dash": dash}
            traces.append(line(columns.at, at, name, colour, hover, line=style, connectgaps=True))
    return traces


def _extremes(scales: Scales) -> str:
    """Return the layers that set the bounds."""
    (needs, low), (first, high) = scales.bounding
    return (
        f"{safe(layer_name(needs), 32)} needs {power(low)}, {safe(layer_name(first), 32)} overflows above {power(high)}"
    )


def _used_over_time(view: View, columns: Columns) -> Floats | None:
    if not len(view.scalar("scale")[0]):
        return None
    return columns.merged(np.log2(view.scale_at(columns.steps)), "min")


def _used_line(columns: Columns, used: Floats | None) -> list[Trace]:
    if used is None:
        return []
    hover = "step %{x}<br>scale used: 2<sup>%{y:.0f}</sup>"
    return [line(columns.at, used, "scale used", BLUE, hover, line={"width": 3, "shape": "hv"})]


def _none_serves(columns: Columns, need: Floats, room: Floats) -> list[Layout]:
    """Shades over the stretches at which no scale works."""
    missing = np.nan_to_num(need - room, nan=-1.0) > 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], missing, [False]]).astype(np.int8)))
    at, last = columns.at, len(columns.at) - 1
    return [
        {"type": "rect", "x0": int(at[a]), "x1": int(at[min(b, last)]), "y0": 0, "y1": 1, "yref": "paper",
         "layer": "below", "fillcolor": "rgba(220,83,64,0.12)", "line": {"width": 0}}
        for a, b in list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))[:50]
    ]  # fmt: skip


def _window_said(window: tuple[int, int] | None, need: Floats, room: Floats, used: Floats | None, noun: str) -> str:
    known = ~np.isnan(need)
    none, columns = int((need > room)[known].sum()), counted(int(known.sum()), noun)
    if window is not None:
        parts = [f"{scale_range(*window)} work at all steps"]
    elif none:
        parts = [f"none works at {none:,} of {columns}, shaded red"]
    else:
        parts = ["one works at each step, but no single one at all steps"]
    if used is None:
        return joined([*parts, "no loss scale was recorded"])
    below = int(((used < need) & known).sum())
    above = int(((used > room) & known).sum())
    parts += [f"the one used was too low at {below:,} of {columns}"] if below else []
    parts += [f"too high at {above:,} of {columns}"] if above else []
    return joined(parts)
