"""`zero_heatmap`: which values are zero, and which zeros a format has made."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.tables.cells import Cells, Floats
from plimsoll.report.drawing.aggregation import MOST_CELLS
from plimsoll.report.drawing.heatmap_statistics import Matrix
from plimsoll.report.drawing.plotly_parts import (
    Layout,
    Source,
    Trace,
    build_figure,
    empty_figure,
    series_checked,
    since_mark,
    view_of,
)
from plimsoll.report.figure_declaration import figure
from plimsoll.report.figures.heatmap import panel
from plimsoll.report.labels import capital, joined, of
from plimsoll.text import counted

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]


def _of_finding(view: View, finding: Finding, **arguments: Any) -> "Figure":
    collection = finding.collection or "gradients"
    return zero_heatmap(view, collection, focus=finding.where, since_step=finding.since_step, **arguments)


def _height_of(rows: int, parts: int) -> int:
    return min(max(150 + (30 + 18 * rows) * parts, 260), 760)


def _height(view: View, arguments: Mapping[str, Any]) -> int:
    narrow = view.narrow(str(arguments.get("collection") or "activations"))
    return 260 if narrow is None else _height_of(len(narrow.cells.names), 2 if narrow.censors.any() else 1)


@figure(of_finding=_of_finding, height=_height)
def zero_heatmap(
    run: Source,
    collection: str = "activations",
    *,
    focus: Sequence[str] = (),
    since_step: int | None = None,
    until: int | None = None,
) -> "Figure":
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
    return _painted(title, _parts(narrow), _said(narrow), narrow.cells, meta, focus, since_step)


def _parts(narrow: FormatLosses) -> list[tuple[str, Floats]]:
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


def _painted(
    title: str,
    parts: Sequence[tuple[str, Floats]],
    said: str,
    cells: Cells,
    meta: Layout,
    focus: Sequence[str],
    since_step: int | None,
) -> "Figure":
    traces: list[Trace] = []
    marks, notes = since_mark(since_step)
    layout: Layout = {"shapes": marks, "annotations": notes}
    top, drawn = 1.0, None
    part_height = (1.0 - 0.1 * (len(parts) - 1)) / len(parts)
    for i, (words, values) in enumerate(parts):
        matrix = Matrix(names=cells.names, series=cells.names, steps=cells.steps, values=values)
        drawn = panel(matrix, "mean", "share", words, focus=focus, most_cells=MOST_CELLS // len(parts), top=1.0)
        axis = "y" if i == 0 else f"y{i + 1}"
        traces.append({**drawn.trace, "yaxis": axis})
        layout[f"yaxis{axis[1:]}"] = {**drawn.axis, "domain": [max(top - part_height, 0.0), top]}
        notes.append({"text": f"<b>{words}</b>", "x": 1, "xref": "paper", "xanchor": "right", "y": top, "yref": "paper",
                      "yanchor": "bottom"})  # fmt: skip
        bar = {**drawn.colours["colorbar"], "title": {"text": "of all values"}}
        layout["coloraxis"] = {**drawn.colours, "colorbar": bar}
        layout["xaxis"] = {**drawn.steps, "anchor": axis}
        top -= part_height + 0.1
    assert drawn is not None  # there is always the first part
    meta["rows"] = drawn.rows
    layout["height"] = _height_of(drawn.count, len(parts))
    subtitle = joined([said, drawn.only, *drawn.merged])
    return build_figure("zero_heatmap", title, subtitle, traces, layout, meta)


def _said(narrow: FormatLosses) -> str:
    if not narrow.censors.any():
        return f"recorded in {', '.join(narrow.cells.formats)}, which flushes nothing"
    counted_apart = ~np.isnan(narrow.cells.column("underflowed"))
    if not counted_apart.any():
        return "what underflowed is estimated; a shadow step would count it"
    steps = len(np.unique(narrow.cells.at[counted_apart]))
    return f"what underflowed is counted at {counted(steps, 'shadow step')}, and estimated at the others"
