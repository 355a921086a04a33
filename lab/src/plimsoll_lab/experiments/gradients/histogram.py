"""The log2 histogram of a detector's activation gradients: what FP16 keeps of them at the scales 1, 8 and 32K.

FP16's smallest value is 2^-24; what is below 2^-25 rounds to zero. A loss scale of 2^k moves values up by k binades.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.formats import FP16
from plimsoll.report.drawing.plotly_parts import Layout, Trace, made
from plimsoll.report.drawing.theme import BLUE, GREEN, GREY, ORANGE, PURPLE
from plimsoll.report.labels import powers
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

Ints, Floats = NDArray[np.int64], NDArray[np.float64]

SHIFTS = (0, 3, 15)  # scales 1, 8 and 32K
_FLUSHED = FP16.quantum_exponent - 1  # binades below this one round to zero
_MAGNITUDE = "magnitude: each bar is a binade, from its power of two up"
_LEAST = (-46, 18)  # binades that are always shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a spectrum holds, as fractions.

    - `zero`: of all values. All else is of the nonzero ones, but `wide`.
    - `lost`: rounded to zero by FP16 at the scales of `SHIFTS`. `band`: in [2^-27, 2^-24).
    - `wide`: in [2^-32, 2^-20), of all values.
    """

    zero: float
    lost: tuple[float, ...]
    band: float
    wide: float

    def to_dict(self) -> dict[str, float]:
        """As numbers by name."""
        by_scale = {f"lost_at_{2**shift}": lost for shift, lost in zip(SHIFTS, self.lost, strict=True)}
        return {"zero": self.zero, "band": self.band, "wide": self.wide, **by_scale}


def shares(spectrum: Spectrum) -> Shares:
    """The shares of a spectrum that FP32 has recorded, by `Spectrum.fit`."""
    return Shares(
        zero=spectrum.zero_fraction,
        lost=tuple(spectrum.fit("fp16", shift=shift).lost.estimate for shift in SHIFTS),
        band=between(spectrum, -27, -24) / spectrum.nonzero,
        wide=between(spectrum, -32, -20) / spectrum.count,
    )


def between(spectrum: Spectrum, low: int, high: int) -> int:
    """How many values have magnitudes in [2^low, 2^high)."""
    return int(spectrum.binades[low - row_layout.LOWEST_BINADE : high - row_layout.LOWEST_BINADE].sum())


def below(spectrum: Spectrum, limit: float) -> float:
    """How many values have magnitudes below a limit; of the binade that it lies in, as if values were spread evenly."""
    mantissa, exponent = math.frexp(limit)
    binade = exponent - 1 - row_layout.LOWEST_BINADE
    return float(spectrum.binades[:binade].sum()) + float(spectrum.binades[binade]) * (2 * mantissa - 1)


def scale_for(spectrum: Spectrum, share: float) -> int | None:
    """The least power of two by which gradients would have to be larger for no more than `share` in [2^-32, 2^-20)."""
    fits = (up for up in range(64) if between(spectrum, -32 - up, -20 - up) <= share * spectrum.count)
    return next(fits, None)


def histogram(spectrum: Spectrum, title: str) -> "Figure":
    """The share of each binade, coloured by the loss scale that FP16 needs to keep it, with FP16's limits."""
    exponents = np.arange(len(spectrum.binades)) + row_layout.LOWEST_BINADE
    some = exponents[spectrum.binades > 0]
    low, high = min([_LEAST[0], *some.tolist()]), max([_LEAST[1], *some.tolist()])
    share = spectrum.binades / spectrum.count
    shapes, notes = _limits()
    places, texts = powers(float(low), float(high), 14)
    layout_: Layout = {
        "xaxis": {
            "title": {"text": _MAGNITUDE}, "tickvals": places, "ticktext": texts, "range": [low - 0.5, high + 0.5],
        },
        "yaxis": {"title": {"text": "share of all gradients"}, "tickformat": "~%", "rangemode": "tozero"},
        "barmode": "stack", "bargap": 0.08, "height": 420, "shapes": shapes, "annotations": notes,
    }  # fmt: skip
    meta = {"figure": "gradients", "zero": spectrum.zero_fraction}
    traces = [_bars(exponents, share, *part) for part in _parts(high)]
    return made("gradients", title, _said(spectrum), [t for t in traces if t["y"].any()], layout_, meta)


def _parts(high: int) -> list[tuple[int, int, str, str]]:
    """Binades [low, high) of each colour, and what it means."""
    ends = [_FLUSHED - shift for shift in reversed(SHIFTS)]
    return [
        (row_layout.LOWEST_BINADE, ends[0], "lost even at 32K", GREY),
        (ends[0], ends[1], "32K brings them back", PURPLE),
        (ends[1], ends[2], "8 brings them back", ORANGE),
        (ends[2], FP16.min_exponent, "held, not in full precision", BLUE),
        (FP16.min_exponent, high + 1, "held", GREEN),
    ]


def _bars(exponents: Ints, share: Floats, low: int, high: int, name: str, colour: str) -> Trace:
    chosen = (exponents >= low) & (exponents < high) & (share > 0)
    return {
        "type": "bar", "x": exponents[chosen], "y": share[chosen], "name": name, "marker": {"color": colour},
        "showlegend": True, "hovertemplate": "2<sup>%{x}</sup>: %{y:.2%}<extra></extra>",
    }  # fmt: skip


def _limits() -> tuple[list[Layout], list[Layout]]:
    """FP16's ends, and where they would be below with a loss scale; a binade's bar is around its exponent."""
    marks = [
        (FP16.quantum_exponent - shift, words, "solid" if shift == 0 else "dot")
        for shift, words in zip(SHIFTS, ("FP16's least", "at 8", "at 32K"), strict=True)
    ]
    marks += [(FP16.min_exponent, "least normal", "dash"), (FP16.max_exponent + 1, "overflow", "solid")]
    shapes: list[Layout] = []
    notes: list[Layout] = []
    for row, (at, words, dash) in enumerate(marks):
        edge = at - 0.5
        shapes.append(
            {"type": "line", "x0": edge, "x1": edge, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": GREY, "width": 1.5, "dash": dash}}
        )  # fmt: skip
        notes.append(
            {"text": words, "x": edge, "y": 1 - 0.06 * (row % 2), "yref": "paper", "yanchor": "bottom",
             "showarrow": False, "font": {"size": 11}}
        )  # fmt: skip
    return shapes, notes


def _said(spectrum: Spectrum) -> str:
    found = shares(spectrum)
    lost = [percent(each) for each in found.lost]
    return (
        f"{percent(found.zero)} of all are zero in FP32; of the others FP16 loses {lost[0]} with no loss scale, "
        f"{lost[1]} at 8 and {lost[2]} at 32K"
    )
