"""Parts of all figures: colours, words, Plotly figure from plain data, lines, lanes.

A figure is put together as plain data. `build_figure` makes a Plotly object of it at the very end, so Plotly is loaded
only when a figure is asked for. A figure without anything to show says in words what is missing. It is never an error,
since a report must not fail for want of one recorded thing.

Everything that depends on the paper (text, grid, the map from few to many) stands in the template and nowhere else, so
that a page changes the theme of a drawn figure by changing its template. Marks (lines, bars, warnings) keep their
colours: each stands out from both papers by at least 3 to 1 (a test computes it), and they differ without red
and green. The maps are mako's (seaborn): even in lightness, readable for the colour-blind and in print.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View, shown
from plimsoll.diagnosis.finding import collection_words
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import install_line
from plimsoll.runs.reading.row_selection import unknown

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Figure  # pyright: ignore[reportMissingTypeStubs]
else:
    Figure = Any  # Plotly is loaded when a figure is made


# -- colours: a light and a dark template, and marks for both ----------------------------------------------------------

Theme = Literal["light", "dark"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"  # nothing is fetched

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f83cc", "#c9781a", "#1f9d78", "#dc5340", "#a26fd0", "#7d8791"
# Of every figure, wherever it is drawn: plotly.js 7 by itself has a button that uploads the figure's data to a cloud.
MODEBAR_REMOVE = ("sendChartToCloud",)
SEVERITY = {"alarm": RED, "warning": ORANGE, "info": GREY}

# From few to many; on light paper many is dark, on dark paper light.
_LIGHT_MAP = ("#cdebd8", "#8bdab2", "#40b7ad", "#348fa7", "#37659e", "#413d7b", "#2e1e3b")
_DARK_MAP = ("#38325e", "#413d7b", "#37659e", "#348fa7", "#40b7ad", "#8bdab2", "#e4f7ea")
# From less over none to more.
_LIGHT_BOTH = ("#a4510b", "#dd9b4d", "#f4dfc2", "#f2f2f2", "#c3dcf2", "#5fa3da", "#165d9c")
_DARK_BOTH = ("#f2a34a", "#b26f22", "#5c4020", "#2a3036", "#24466a", "#3479b8", "#7cbdf5")


def _template(paper: str, ink: str, soft: str, grid: str, few_to_many: tuple[str, ...], both: tuple[str, ...]) -> Any:
    axis = {
        "gridcolor": grid,
        "linecolor": soft,
        "zerolinecolor": grid,
        "tickcolor": soft,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 12}},
        "tickfont": {"size": 11},
    }
    bar = {"outlinewidth": 0, "thickness": 12, "ticks": "outside", "tickcolor": soft, "tickfont": {"size": 11},
           "title": {"side": "right", "font": {"size": 12}}}  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "font": {"family": FONT, "size": 12, "color": ink},
            "title": {"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"l": 16, "t": 16},
                      "font": {"size": 16}, "subtitle": {"font": {"size": 12, "color": soft}}},
            "colorway": [BLUE, ORANGE, GREEN, PURPLE, RED, GREY],
            "colorscale": {"sequential": _stops(few_to_many), "sequentialminus": _stops(few_to_many[::-1]),
                           "diverging": _stops(both)},
            "coloraxis": {"colorscale": _stops(few_to_many), "colorbar": bar},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": paper, "bordercolor": soft, "font": {"color": ink, "family": FONT, "size": 12},
                           "align": "left", "namelength": 60},
            "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom",
                       "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}},
            "annotationdefaults": {"font": {"size": 11, "color": ink}, "showarrow": False, "bgcolor": _veil(paper)},
            "margin": {"l": 64, "r": 24, "t": 92, "b": 48},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": soft, "activecolor": ink, "remove": [*MODEBAR_REMOVE]},
            "hovermode": "closest",
        }
    }  # fmt: skip


def _veil(paper: str) -> str:
    """Paper that lets a little through: the ground of words that stand on a picture."""
    return f"rgba({int(paper[1:3], 16)},{int(paper[3:5], 16)},{int(paper[5:7], 16)},0.78)"


def _stops(colours: tuple[str, ...]) -> list[list[float | str]]:
    return [[round(i / (len(colours) - 1), 6), colour] for i, colour in enumerate(colours)]


TEMPLATES: Mapping[Theme, Mapping[str, Any]] = MappingProxyType(
    {
        "light": _template("#ffffff", "#1d252c", "#5d6872", "#e4e8ec", _LIGHT_MAP, _LIGHT_BOTH),
        "dark": _template("#14191f", "#e3e8ed", "#9aa5b0", "#2b333c", _DARK_MAP, _DARK_BOTH),
    }
)


def themed(figure: Figure, theme: Theme) -> Figure:
    """A copy of a figure in the light or the dark theme.

    Raises `ArgumentError` for another theme.
    """
    if theme not in TEMPLATES:
        raise ArgumentError(f"themed: expected a theme, 'light' or 'dark'; got {theme!r}. Choose one of the two.")
    return type(figure)(figure).update_layout(template=TEMPLATES[theme])


# -- words: safe names, powers of two ----------------------------------------------------------------------------------

_SIGNS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})
MINUS = "\N{MINUS SIGN}"


# Plotly renders a little HTML in every text (and TeX, where a page has loaded MathJax). Names come from whoever wrote
# the run, so they are shortened, freed of control characters and escaped before they become part of any text. Nothing
# from a run stands in a `hovertemplate`, which has a language of its own: it is given as data.
def safe(text: str, most: int = 60) -> str:
    """Return a run's text for a figure: at most 60 printable characters, no markup.

    >>> safe("<b>w</b>"), safe("model.layers.11.attention.query.weight", most=24)
    ('&lt;b&gt;w&lt;/b&gt;', 'model.lay…n.query.weight')
    """
    clean = shown(text)
    if len(clean) > most:
        head = most * 2 // 5
        clean = f"{clean[:head]}…{clean[head + 1 - most :]}"
    return clean.translate(_SIGNS)


def labels(texts: Iterable[str], most: int = 40) -> list[str]:
    """Return the texts made safe, with a number where two would look alike."""
    seen: dict[str, int] = {}
    result: list[str] = []
    for text in texts:
        label = safe(text, most)
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def of(collection: str) -> str:
    """Return a collection's name within a sentence."""
    return safe(collection_words(collection))


def power(exponent: float) -> str:
    """A power of two.

    >>> power(9.5)
    '2<sup>9.5</sup>'
    """
    digits = f"{exponent:.0f}" if float(exponent).is_integer() else f"{exponent:.1f}"
    return f"2<sup>{digits.replace('-', MINUS)}</sup>"


def scale_range(low: int, high: int) -> str:
    """Return scales between two exponents, as `usable_scales.scales` does."""
    return power(low) if low == high else f"{power(low)} to {power(high)}"


def powers(low: float, high: float, most: int = 9) -> tuple[list[float], list[str]]:
    """Return about `most` ticks at powers of two: their places and texts."""
    steps = (1, 2, 4, 8, 16, 32, 64)
    span = max(high - low, 1.0)
    step = next((s for s in steps if span / s <= most), 128)
    places = [float(e) for e in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]
    return places, [power(e) for e in places]


# Plotly's own format of shares leaves out the space before the sign, which all other text has.
def share_ticks(low: float, high: float, most: int = 7) -> dict[str, Any]:
    """Return the ticks of an axis of shares, at most about `most`, as settings of it.

    >>> share_ticks(-0.02, 0.35, 4)
    {'tickvals': [0.0, 0.1, 0.2, 0.3], 'ticktext': ['0 %', '10 %', '20 %', '30 %']}
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        low, high = 0.0, 1.0
    least = (high - low) / most
    power_of_ten = 10.0 ** math.floor(math.log10(least))
    step = next(multiple for multiple in (1, 2, 5, 10) if multiple * power_of_ten >= least) * power_of_ten
    ticks = range(math.ceil(low / step), math.floor(high / step) + 1)
    return _ticks_in_percent([round(tick * step, 12) for tick in ticks])


def log_share_ticks(lowest_exponent: float) -> dict[str, Any]:
    """Return the same of a logarithmic axis: a tick at each power of ten up to 100 %."""
    return _ticks_in_percent([10.0**exponent for exponent in range(math.ceil(lowest_exponent), 1)])


def _ticks_in_percent(places: list[float]) -> dict[str, Any]:
    texts = [np.format_float_positional(round(100 * place, 10), trim="-").replace("-", MINUS) for place in places]
    return {"tickvals": places, "ticktext": [f"{text} %" for text in texts]}


def joined(parts: Sequence[str]) -> str:
    """Half-sentences as a subtitle."""
    return " · ".join(part for part in parts if part)


def wrapped(text: str, width: int = 72, most: int = 400) -> str:
    """A sentence from a run or a rule, safe, over several lines."""
    clean = "".join(c if c.isprintable() else " " for c in text[:most])
    return "<br>".join(line.translate(_SIGNS) for line in textwrap.wrap(clean, width))


# -- figures from plain data -------------------------------------------------------------------------------------------

Trace = dict[str, Any]
Layout = dict[str, Any]

_LEGEND_LINE, _LEGEND_ENTRIES, _BELOW = 20, 4, 48  # pixels a line, entries in it; pixels for the axis
STEP_AXIS: Mapping[str, Any] = {"title": {"text": "step"}, "showgrid": False, "zeroline": False, "tickformat": ",d"}


def build_figure(
    operation: str, title: str, subtitle: str, traces: Sequence[Trace], layout: Layout, meta: Mapping[str, Any]
) -> Figure:
    """Return the Plotly figure in the light theme, with `meta` as its metadata."""
    try:
        from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise MissingExtraError(
            f"{operation}: expected the package plotly; got none. Install it: {install_line('report')}"
        ) from error
    head = {"text": title, "subtitle": {"text": subtitle}}
    bar = {"remove": [*MODEBAR_REMOVE]}  # in the layout too, as users change templates
    whole = {"template": TEMPLATES["light"], "title": head, "meta": dict(meta), "modebar": bar}
    whole |= _with_legend(traces, layout)
    return Figure({"data": list(traces), "layout": whole})


def _with_legend(traces: Sequence[Trace], layout: Layout) -> Layout:
    """The layout with room for the legend under the step axis."""
    entries = sum(bool(t.get("name")) and t.get("showlegend", t["type"] == "scatter") for t in traces)
    if entries < 2:
        return {**layout, "showlegend": False}
    room = 10 + _LEGEND_LINE * -(-entries // _LEGEND_ENTRIES)
    margin = layout.get("margin", {})
    below = {**margin, "b": margin.get("b", _BELOW) + room}
    return {**layout, "margin": below, "height": layout["height"] + room, "showlegend": True}


def empty_figure(operation: str, title: str, words: str, meta: Mapping[str, Any]) -> Figure:
    """A figure without data that says what is missing."""
    note = {
        "text": words,
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "font": {"size": 14},
        "align": "center",
    }
    hidden = {"visible": False}
    layout = {"annotations": [note], "xaxis": hidden, "yaxis": hidden, "height": 240}
    return build_figure(operation, title, "", [], layout, {**meta, "empty": True})


def series_checked(view: View, operation: str, collection: str, name: str | None = None) -> None:
    """Raise `NotRecordedError` for a collection or name that the run does not have."""
    if not isinstance(collection, str) or collection not in view.run.tensors:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise unknown(operation, "a collection", collection, list(view.run.tensors))
    if name is not None and name not in view.run.tensors[collection]:
        raise unknown(operation, f"a name in {collection!r}", name, view.run.tensors[collection])


def since_mark(step: int | None, words: str = "since step", row: str = "") -> tuple[list[Layout], list[Layout]]:
    """A vertical line at a step with its words at the top: shapes and annotations."""
    if step is None:
        return [], []
    line = {"type": "line", "x0": step, "x1": step, "xref": f"x{row}", "y0": 0, "y1": 1, "yref": "paper",
            "line": {"color": GREY, "width": 1.5, "dash": "dot"}}  # fmt: skip
    note = {"text": f"{words} {step:,}", "x": step, "xref": f"x{row}", "y": 1, "yref": "paper", "yanchor": "bottom",
            "xanchor": "center", "font": {"size": 11}}  # fmt: skip
    return [line], [note]


def level_line(height: float, colour: str, axis: str = "y", across: str = "paper") -> Layout:
    """Return a dashed line at a height, from one side to the other."""
    style = {"color": colour, "width": 1.2, "dash": "dash"}
    return {"type": "line", "x0": 0, "x1": 1, "xref": across, "y0": height, "y1": height, "yref": axis, "line": style}


def level_words(height: float, words: str, colour: str, axis: str = "y", across: str = "paper") -> Layout:
    """Return the words above such a line, at its right end."""
    return {"text": words, "x": 1, "xref": across, "xanchor": "right", "y": height, "yref": axis, "yanchor": "bottom",
            "font": {"color": colour, "size": 11}}  # fmt: skip


def step_axis(at: Ints) -> Layout:
    """Return a picture's axis that ends with the first and the last of these steps.

    By itself Plotly makes room for the words at a step on the axis, which on a narrow screen is a third of it.
    """
    half = float(at[1] - at[0]) / 2 if len(at) > 1 else 0.5
    return {**STEP_AXIS, "range": [float(at[0]) - half, float(at[-1]) + half]}


def plotted(values: Floats) -> NDArray[np.float32]:
    """Return heights in single precision; larger ones become Inf, a gap in the line."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def line(x: Ints | Floats, y: Floats, name: str, colour: str, hover: str, **more: Any) -> Trace:
    """Return a line over steps; `hover` is our own template, without a run's text. Points that it misses are dots."""
    heights = plotted(y)
    alone = _alone(heights)
    return {
        "type": "scatter",
        "mode": "markers" if len(x) <= 1 else "lines+markers" if alone.any() else "lines",
        "x": x,
        "y": heights,
        "name": name,
        "line": {"color": colour, "width": 2, **more.pop("line", {})},
        "marker": {"color": colour, "size": np.where(alone, 7, 0).tolist() if alone.any() and len(x) > 1 else 7},
        "hovertemplate": hover + "<extra></extra>",
        **more,
    }


def _alone(heights: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which points are numbers between gaps, which no line reaches."""
    known = np.pad(np.isfinite(heights), 1)
    return known[1:-1] & ~known[:-2] & ~known[2:]


def band(x: Ints | Floats, low: Floats, high: Floats, name: str, colour: str, **more: Any) -> list[Trace]:
    """An area between two lines, without hover."""
    common: Trace = {"type": "scatter", "mode": "lines", "x": x, "line": {"width": 0}, "hoverinfo": "skip", **more}
    shade = "rgba({},{},{},0.22)".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))
    return [
        {**common, "y": plotted(low), "showlegend": False},
        {**common, "y": plotted(high), "fill": "tonexty", "fillcolor": shade, "name": name},
    ]


# -- lanes under a time axis: each thing that lasts has one of its own, so that none overlaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One lane: its label, colour, the stretches of steps in it, and words for each."""

    label: str
    colour: str
    spans: tuple[tuple[int, int], ...]
    words: tuple[str, ...]


def lanes(strips: Sequence[Lane]) -> tuple[list[Trace], Layout]:
    """The traces of lanes, the first on top, and their axis."""
    texts = labels((lane.label for lane in strips), most=44)
    traces = [_lane(lane, -float(i)) for i, lane in enumerate(strips)]
    axis: Layout = {
        "tickvals": [-i for i in range(len(strips))],
        "ticktext": texts,
        "range": [0.6 - len(strips), 0.6],
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
    }
    return traces, axis


def _lane(lane: Lane, height: float) -> Trace:
    """A bar from step to step, with a mark where it begins."""
    across: list[int | None] = []
    words: list[str] = []
    sizes: list[int] = []
    for (first, last), said in zip(lane.spans, lane.words, strict=True):
        when = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        across += [first, last, None]
        words += [f"{when}<br>{wrapped(said)}"] * 2 + [""]
        sizes += [11, 7, 7]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": across,
        "y": [height] * len(across),
        "text": words,
        "line": {"color": lane.colour, "width": 7},
        "marker": {"color": lane.colour, "size": sizes, "opacity": 1, "line": {"width": 0}},
        "showlegend": False,
        "hovertemplate": "%{text}<extra></extra>",
    }
