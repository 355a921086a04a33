"""`histogram`: one spectrum's values by power of two, against formats' limits."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from plimsoll import row_layout
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP16, Format
from plimsoll.report.drawing.plotly_parts import (
    BLUE,
    Layout,
    Trace,
    build_figure,
    empty_figure,
    joined,
    log_share_ticks,
    power,
    powers,
)
from plimsoll.report.figures.spectrogram import LoadLine, in_reach, load_lines
from plimsoll.report.figures.usable_scales import element
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_HEIGHT = 380


def histogram(spectrum: Spectrum, formats: Sequence[object] | None = None, *, shift: int = 0) -> "Figure":
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
    if isinstance(shift, bool) or not isinstance(shift, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"histogram: expected shift to be an integer; got shift={shift!r}. Use 0.")
    chosen = _own(spectrum) if formats is None else [element(fmt, "histogram") for fmt in formats]
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
        "height": _HEIGHT,
        "bargap": 0,
        "shapes": shapes,
        "annotations": notes,
    }  # fmt: skip
