"""`scale_window`: the loss scales that fit all layers over time, and the one used."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.estimates.usable_scales import Scales
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.wording import layer_name
from plimsoll.formats import FP16
from plimsoll.report.drawing.aggregation import Columns
from plimsoll.report.drawing.plotly_parts import (
    STEP_AXIS,
    Layout,
    Source,
    Trace,
    build_figure,
    empty_figure,
    line,
    series_checked,
    since_mark,
    view_of,
)
from plimsoll.report.drawing.theme import BLUE, GREEN, ORANGE, PURPLE, RED
from plimsoll.report.figure_declaration import figure, if_scaled
from plimsoll.report.figures.scale_curve import element
from plimsoll.report.labels import joined, power, powers, safe, scale_range
from plimsoll.text import counted

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]


def _of_finding(view: View, finding: Finding, **arguments: Any) -> "Figure":
    return scale_window(view, since_step=finding.since_step, **arguments)


@figure(offered="scale", cases=if_scaled("Scales that work"), of_finding=_of_finding, height=450)
def scale_window(
    run: Source,
    fmt: object = None,
    *,
    focus: Sequence[str] = (),
    since_step: int | None = None,
    until: int | None = None,
) -> "Figure":
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
    used = _used(view, columns)
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
    subtitle = joined(
        [
            _said(scales.window, need, room, used, "sample" if columns.each == 1 else "column"),
            _extremes(scales),
            columns.said("min").replace("the lowest", "the worst"),
        ]
    )
    return build_figure("scale_window", title, subtitle, traces, layout, meta)


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


def _used(view: View, columns: Columns) -> Floats | None:
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


def _said(window: tuple[int, int] | None, need: Floats, room: Floats, used: Floats | None, noun: str) -> str:
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
