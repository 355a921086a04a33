"""`histogram` and `spectrogram`: values by power of two, against formats' limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from plimsoll import row_layout
from plimsoll.checks import items, number
from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP16, Format, get_element
from plimsoll.report.drawing.aggregation import MOST_CELLS, MOST_COLUMNS, Columns
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Figure,
    Layout,
    Trace,
    build_figure,
    empty_figure,
    joined,
    log_share_ticks,
    of,
    power,
    powers,
    safe,
    series_checked,
    since_mark,
    step_axis,
)
from plimsoll.report.figure_declaration import figure
from plimsoll.report.figures.usable_scales import element
from plimsoll.report.figures.whole_run import loss_and_scale
from plimsoll.spectrum import Spectrum
from plimsoll.spectrum.fit.element_fit import checked_shift
from plimsoll.text import capital, percent

# -- load lines: the range of a format at its scale, drawn over the values ---------------------------------------------

_DASHES = ("solid", "dash", "dot", "dashdot")
_BESIDE = 14.0  # binades beyond the values within which a line is still drawn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadLine:
    """A limit of a format over the columns: true values' exponent, and the meaning."""

    format: str
    says: str  # a line of no format says all
    colour: str
    dash: str
    height: Floats

    @property
    def words(self) -> str:
        """Words beside the line."""
        return f"{self.format}: {self.says}" if self.format else self.says


# The picture shows true values. A format that holds them times S overflows at its limit divided by S, so its lines lie
# lower the higher the scale; where the recorded scale changes over time, the lines are step curves.
def load_lines(formats: Sequence[tuple[Format, Floats]]) -> list[LoadLine]:
    """Return the limits of formats, each moved by a power of two in each column."""
    lines: list[LoadLine] = []
    for i, (fmt, moved) in enumerate(formats):
        limits = [
            (float(np.log2(fmt.overflow_threshold)), "overflow above", RED),
            (float(fmt.min_exponent), "fewer digits below", ORANGE),
            (float(fmt.quantum_exponent - 1 if fmt.has_subnormals else fmt.min_exponent - 1), "zero below", PURPLE),
        ]
        for exponent, says, colour in limits:
            dash = _DASHES[i % len(_DASHES)]
            lines.append(LoadLine(format=fmt.name, says=says, colour=colour, dash=dash, height=exponent - moved))
    return lines


def level(mark: tuple[float, str], columns: Columns) -> LoadLine:
    """A line at one magnitude."""
    height = np.full(len(columns.at), math.log2(mark[0]))
    return LoadLine(format="", says=safe(mark[1]), colour=GREY, dash="dash", height=height)


def in_reach(lines: Sequence[LoadLine], low: float, high: float) -> tuple[list[LoadLine], list[str]]:
    """The lines near the values, and of the others what they are and where."""
    near = [line for line in lines if line.height.max() >= low - _BESIDE and line.height.min() <= high + _BESIDE]
    far = [
        f"{line.format}: {line.says} {power(round(float(np.median(line.height))))}"
        for line in lines
        if line not in near and line.says != "fewer digits below" and np.isfinite(np.median(line.height))
    ]
    return near, far


def drawn(lines: Sequence[LoadLine], at: Ints, spacing: float) -> tuple[list[Trace], list[Layout]]:
    """The lines as traces, and their words at the right end, at least `spacing` apart."""
    traces = [_line_trace(line, at) for line in lines]
    notes: list[Layout] = []
    below = -np.inf
    for line in sorted(lines, key=lambda each: float(each.height[-1])):
        place = max(float(line.height[-1]) - 0.5, below + spacing)
        below = place
        notes.append(
            {"text": line.words, "x": 1, "xref": "paper", "xanchor": "right", "y": place,
             "yanchor": "bottom", "font": {"size": 11, "color": line.colour}, "borderpad": 1}
        )  # fmt: skip
    return traces, notes


def _line_trace(one: LoadLine, at: Ints) -> Trace:
    """Return a line between columns; 2^e lies half a binade below binade e's middle."""
    edges = np.flatnonzero(np.diff(one.height, prepend=np.nan, append=np.nan) != 0)
    corners = np.unique(np.clip(np.concatenate([edges, edges - 1, [0, len(at) - 1]]), 0, len(at) - 1))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": at[corners],
        "y": (one.height[corners] - 0.5).astype(np.float32),
        "line": {"color": one.colour, "width": 2, "dash": one.dash, "shape": "hvh"},
        "name": one.words,
        "showlegend": False,
        "hoverinfo": "skip",
    }


# -- `spectrogram`: one tensor's values by step ------------------------------------------------------------------------

_OR_THE_LOSS_SCALE = "Shift k means that values are multiplied by 2**k; None takes the recorded loss scale."
_RAREST = -6.0  # power of ten of the share below which colours no longer differ
_WIDE = 100  # binades: formats that reach farther are never a tensor's trouble
_HEIGHT = 460


def _of_finding(view: "View", finding: Finding, **arguments: Any) -> Figure:
    """Draw the first layer."""
    if not finding.where or finding.collection is None:
        return loss_and_scale(view, [finding])
    return spectrogram(view, finding.collection, finding.where[0], since_step=finding.since_step, **arguments)


@figure(of_finding=_of_finding, height=_HEIGHT)
def spectrogram(
    run: Source,
    collection: str,
    name: str,
    *,
    formats: Sequence[object] | None = None,
    shift: int | None = None,
    mark: tuple[float, str] | None = None,
    since_step: int | None = None,
    until: int | None = None,
) -> Figure:
    """Spectrogram of one tensor's values over time: steps across, powers of two up, colour is the share of the values.

    Zeros, infinities and NaN have rows of their own. The lines are formats' limits: above the first values overflow,
    below the second they have fewer digits, below the third they become zero.

    - `formats`: whose lines; None for the format that the tensor was recorded in, or FP16's where that is a wide one.
    - `shift`: the lines lie as for values times ``2**shift``. None: as for the loss scale that was in use at each step,
      where gradients were held scaled, and unmoved otherwise.
    - `mark`: a magnitude of its own and what it is called, as ``(1e-16, "epsilon squared")``; `since_step` is marked.

    Many steps share a column, whose spectra are added up. Raises `NotRecordedError` for a tensor that the run does not
    have, `FormatError` for a format that has no limits of its own.
    """
    view = view_of(run, until, "spectrogram")
    series_checked(view, "spectrogram", collection, name)
    shift = None if shift is None else checked_shift("spectrogram", shift, _OR_THE_LOSS_SCALE)
    mark = None if mark is None else _checked_mark(mark)
    chosen = None if formats is None else _elements("spectrogram", formats)
    title = f"{capital(of(collection))} of {safe(name)}: where the values lie"
    meta = {"figure": "spectrogram", "collection": collection}
    mine = view.only(collection, name)
    cells = mine.cells(collection)
    if cells is None:
        return empty_figure("spectrogram", title, "Nothing of this tensor was recorded up to this step.", meta)
    picture = _Picture.of(cells)
    lines, said = _lines(mine, cells, picture, chosen, shift)
    near, far = in_reach(lines, *picture.span)
    far = far if chosen is not None or _narrow(cells) else []  # FP16's lines are then but a help
    near += [] if mark is None else [level(mark, picture.columns)]
    subtitle = joined([said, *far[:2], picture.columns.said("sum").replace("their sum", "added up")])
    return _painted(title, subtitle, picture, near, since_step, meta)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Picture:
    """Counts of binades x columns from `lowest` on, of other values, and of all."""

    columns: Columns
    lowest: int
    counts: Floats
    zeros: Floats
    infinite: Floats
    nans: Floats
    total: Floats

    @classmethod
    def of(cls, cells: Cells) -> "_Picture":
        lift = np.round(np.log2(cells.scale)).astype(np.int64)
        row = np.repeat(np.arange(len(cells)), cells.length)
        binade = (cells.lowest - lift)[row] + np.arange(len(row)) - cells.start[:-1][row]
        there = cells.flat > 0
        row, binade, counts = row[there], binade[there], cells.flat[there]
        low, high = (int(binade.min()), int(binade.max())) if len(binade) else (0, 0)
        tall = high - low + 1
        columns = Columns.of(cells.steps, max(min(MOST_COLUMNS, MOST_CELLS // (tall + 2 * 16)), 1))
        column, wide = columns.place[cells.at], len(columns.starts)
        summed = np.bincount((binade - low) * wide + column[row], weights=counts, minlength=tall * wide)

        def by_column(*names: str) -> Floats:
            weights = sum(cells.column(name).astype(np.float64) for name in names)
            return np.asarray(np.bincount(column, weights=weights, minlength=wide), dtype=np.float64)

        return cls(
            columns=columns,
            lowest=low,
            counts=np.asarray(summed, dtype=np.float64).reshape(tall, wide),
            zeros=by_column("zeros"),
            infinite=by_column("pos_infs", "neg_infs"),
            nans=by_column("nans"),
            total=by_column("count"),
        )

    @property
    def span(self) -> tuple[float, float]:
        """The lowest and the highest binade with values."""
        return float(self.lowest), float(self.lowest + len(self.counts) - 1)


def _lines(
    view: View, cells: Cells, picture: _Picture, chosen: list[Format] | None, shift: int | None
) -> tuple[list[LoadLine], str]:
    """The load lines, and in words whose they are and how they lie."""
    formats = sorted({get_element(n, "spectrogram") for n in cells.formats}, key=lambda fmt: (fmt.binades, fmt.name))
    wanted = chosen if chosen is not None else [formats[0] if _narrow(cells) else FP16]
    if shift is not None:
        moved = [np.full(len(picture.columns.at), float(shift))] * len(wanted)
        how = f"lines as for values times {_times(shift)}"
    else:
        moved = [_moved(view, cells, picture.columns, fmt in formats) for fmt in wanted]
        how = "lines moved by the loss scale" if any(m.any() for m in moved) else ""
    recorded = f"recorded in {', '.join(fmt.name for fmt in formats)}"
    return load_lines(list(zip(wanted, moved, strict=True))), joined([recorded, how])


def _narrow(cells: Cells) -> bool:
    """Return whether the narrowest format of a tensor may have too small a range."""
    return min(get_element(name, "spectrogram").binades for name in cells.formats) < _WIDE


def _moved(view: View, cells: Cells, columns: Columns, held: bool) -> Floats:
    """Return the scale's power of two by column, at which a format held the values."""
    if not cells.collection.endswith("gradients"):
        return np.zeros(len(columns.at))
    narrow = view.narrow(cells.collection)
    if held and narrow is not None and narrow.censors.any():
        by_step = np.ones(len(cells.steps))
        by_step[cells.at] = narrow.held
        return np.log2(by_step[np.searchsorted(cells.steps, columns.at)])
    return np.log2(view.scale_at(columns.at))


def _painted(
    title: str, subtitle: str, picture: _Picture, lines: list[LoadLine], since_step: int | None, meta: Layout
) -> Figure:
    heights = [float(h) for line in lines for h in (line.height.min(), line.height.max())]
    low = math.floor(min([picture.span[0], *(h - 2 for h in heights)]))
    high = math.ceil(max([picture.span[1], *(h + 1 for h in heights)]))
    z, y, specials = _stacked(picture, low, high)
    traces, notes = drawn(lines, picture.columns.at, (high - low + 4) / (_HEIGHT / 17))
    places, texts = powers(low, high + 1, 10)
    marks, words = since_mark(since_step)
    layout: Layout = {
        "xaxis": step_axis(picture.columns.at),
        "yaxis": {
            "title": {"text": "magnitude"},
            "tickvals": [place - 0.5 for place in places] + list(specials.values()),
            "ticktext": texts + list(specials),
            "range": [y[0] - 0.5, y[-1] + 0.5],
            "showgrid": False,
            "zeroline": False,
        },
        "coloraxis": _shades(),
        "height": _HEIGHT,
        "shapes": marks,
        "annotations": [*notes, *words],
    }
    return build_figure("spectrogram", title, subtitle, [_cells_trace(z, y, picture.columns), *traces], layout, meta)


def _stacked(picture: _Picture, low: int, high: int) -> tuple[Floats, Ints, dict[str, float]]:
    """Return shares by row and column, the rows' heights, and the extra rows' names."""
    wide = len(picture.columns.at)
    binades = np.zeros((high - low + 1, wide))
    start = picture.lowest - low
    binades[start : start + len(picture.counts)] = picture.counts
    above = [(n, v) for n, v in (("infinite", picture.infinite), ("NaN", picture.nans)) if v.any()]
    empty = np.zeros((1, wide))
    parts = [picture.zeros[None], empty, binades, *([empty] if above else []), *(v[None] for _, v in above)]
    counts = np.concatenate(parts)
    with np.errstate(all="ignore"):
        shares = np.where(counts > 0, counts / picture.total, np.nan)
    y = np.arange(low - 2, low - 2 + len(counts))
    return shares, y, {"zero": float(low - 2), **{n: float(high + 2 + i) for i, (n, _) in enumerate(above)}}


def _cells_trace(shares: Floats, y: Ints, columns: Columns) -> Trace:
    with np.errstate(all="ignore"):
        z = np.maximum(np.log10(shares), _RAREST)
    return {
        "type": "heatmap", "x": columns.at, "y": y, "z": z.astype(np.float32), "coloraxis": "coloraxis",
        "customdata": (100 * shares).astype(np.float32), "hoverongaps": False, "name": "values",
        "hovertemplate": f"{columns.when} %{{x}}<br>row %{{y}}: %{{customdata:.3~r}} % of the values<extra></extra>",
    }  # fmt: skip


def _shades() -> Layout:
    """From one in a million to all, by powers of ten."""
    bar = {
        "title": {"text": "share of the values"},
        "tickvals": [0, -1, -2, -3, -4, -5, -6],
        "ticktext": ["all", "10 %", "1 %", "0.1 %", "0.01 %", "0.001 %", "less"],
    }
    return {"cmin": _RAREST, "cmax": 0.0, "colorbar": bar}


def _times(shift: int) -> str:
    return "1" if shift == 0 else power(shift)


def _checked_mark(mark: object) -> tuple[float, str]:
    """Return a magnitude that can be marked, and what it is called."""
    given: Sequence[Any] = cast("Sequence[Any]", mark) if isinstance(mark, tuple | list) else ()
    value, says = given if len(given) == 2 else (None, None)
    remedy = 'Give (1e-16, "epsilon squared"), for example.'
    return number("spectrogram", "mark[0]", value, above=0, remedy=remedy), str(says)


def _elements(operation: str, formats: Sequence[object]) -> list[Format]:
    return [element(fmt, operation) for fmt in items(operation, "formats", formats)]


# -- `histogram`: one spectrum's values --------------------------------------------------------------------------------

_HISTOGRAM_HEIGHT = 380


def histogram(spectrum: Spectrum, formats: Sequence[object] | None = None, *, shift: int = 0) -> Figure:
    """Return bars of a spectrum's values by power of two, with formats' limits.

    Counts are exact. The axis of shares is logarithmic, since a few small values among millions can matter.

    Args:
        spectrum: The spectrum, as of `plimsoll.measure` or `Run.spectrum`.
        formats: Formats whose limits are drawn. Default: the one that the values passed through, or FP16's.
        shift: The lines lie as for values times ``2**shift``. Default: 0.

    Raises:
        ArgumentError: It is no spectrum, or the shift is no integer.
        FormatError: A format has no limits of its own.
    """
    if not isinstance(spectrum, Spectrum):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"histogram: expected a Spectrum; got {type(spectrum).__name__}. Call plimsoll.measure, or Run.spectrum."
        )
    shift = checked_shift("histogram", shift)
    chosen = _own(spectrum) if formats is None else _elements("histogram", formats)
    title, meta = "Values by power of two", {"figure": "histogram", "count": spectrum.count}
    if not spectrum.nonzero:
        return empty_figure("histogram", title, f"No finite value but zero among {spectrum.count:,} values.", meta)
    exponents = np.flatnonzero(spectrum.binades) + row_layout.LOWEST_BINADE
    shares = spectrum.binades[exponents - row_layout.LOWEST_BINADE] / spectrum.count
    lines = load_lines([(fmt, np.full(1, float(shift))) for fmt in chosen])
    near, far = in_reach(lines, float(exponents[0]), float(exponents[-1]))
    words = [f"{spectrum.count:,} values", *_apart(spectrum), f"times {power(shift)}" if shift else "", *far[:2]]
    bars: Trace = {
        "type": "bar", "x": exponents, "y": shares, "width": 0.9, "name": "values", "marker": {"color": BLUE},
        "customdata": spectrum.binades[exponents - row_layout.LOWEST_BINADE], "showlegend": False,
        "hovertemplate": "2<sup>%{x}</sup>: %{customdata:,} values, %{y:.3~%}<extra></extra>",
    }  # fmt: skip
    return build_figure("histogram", title, joined(words), [bars], _layout(exponents, shares, near), meta)


def _own(spectrum: Spectrum) -> list[Format]:
    """Return the format that the values had, or FP16 if unknown or wide enough."""
    narrow = None if spectrum.source is None else element(spectrum.source.format, "histogram")
    return [FP16 if narrow is None or narrow.exponent_bits >= 8 else narrow]


def _apart(spectrum: Spectrum) -> list[str]:
    """Return the shares of values that have no power of two."""
    counts = {"zero": spectrum.zeros, "NaN": spectrum.nans, "infinite": spectrum.pos_infs + spectrum.neg_infs}
    return [f"{percent(count / spectrum.count)} {name}" for name, count in counts.items() if count]


def _layout(exponents: Ints, shares: Floats, lines: Sequence[LoadLine]) -> Layout:
    limits = [float(line.height[0]) for line in lines]
    low = math.floor(min([float(exponents[0]), *limits])) - 1
    high = math.ceil(max([float(exponents[-1]), *limits])) + 1
    places, texts = powers(low, high, 10)
    bottom = math.floor(math.log10(float(shares.min()))) - 0.3
    # Bar e is drawn from e - 1/2 to e + 1/2, so the value 2^e lies half a power lower.
    at = [limit - 0.5 for limit in limits]
    shapes = [
        {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1,
         "line": {"color": line.colour, "width": 2, "dash": line.dash}}
        for x, line in zip(at, lines, strict=True)
    ]  # fmt: skip
    notes = [
        {"text": line.words, "x": x, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "left", "textangle": 90,
         "font": {"size": 11, "color": line.colour}, "showarrow": False}
        for x, line in zip(at, lines, strict=True)
    ]  # fmt: skip
    return {
        "xaxis": {"title": {"text": "magnitude"}, "tickvals": places, "ticktext": texts, "range": [low - 0.5, high]},
        "yaxis": {"title": {"text": "share of all values"}, "type": "log", "range": [bottom, 0.05],
                  **log_share_ticks(bottom)},
        "height": _HISTOGRAM_HEIGHT,
        "bargap": 0,
        "shapes": shapes,
        "annotations": notes,
    }  # fmt: skip
