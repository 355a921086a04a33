"""Statistics of heat maps: layers by steps, with merging, drawing and words.

Shares are drawn by their square root, so that one per cent is seen beside all; sizes by their power of two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plimsoll.diagnosis import View
from plimsoll.diagnosis.estimates.format_losses import FormatLosses, Modules
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import log2
from plimsoll.formats import get_element
from plimsoll.report.drawing.aggregation import How
from plimsoll.spectrum import error_sums

Scale = Literal["share", "power", "binades", "count"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """Numbers of layers x steps: `names` are drawn, `series` are their tensors."""

    names: tuple[str, ...]
    series: tuple[str, ...]
    steps: Ints
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A statistic: its title, its words, and how it is merged and drawn."""

    title: str
    words: str
    how: How
    scale: Scale
    of: Callable[[View, str], Matrix | None]


def _by_series(compute: Callable[[Cells], Floats]) -> Callable[[View, str], Matrix | None]:
    def found(view: View, collection: str) -> Matrix | None:
        cells = view.cells(collection)
        if cells is None:
            return None
        values = compute(cells)
        return Matrix(names=cells.names, series=cells.names, steps=cells.steps, values=values)

    return found


def underflow(view: View, collection: str) -> Matrix | None:
    """Return the share of values that underflowed, parameter gradients by module."""
    narrow = view.narrow(collection)
    if narrow is None:
        return None
    cells, lost = narrow.cells, narrow.lost_of_cell
    nonzero = cells.total(cells.nonzero)
    if collection != "gradients":
        values = _blank(narrow.fraction, narrow, nonzero, lost)
        return Matrix(names=cells.names, series=cells.names, steps=cells.steps, values=values)
    modules = Modules.of(cells)
    values = _blank(modules.underflow(narrow), narrow, modules.total(nonzero), modules.total(lost))
    series = tuple(modules.main_layers(cells))
    return Matrix(names=modules.names, series=series, steps=cells.steps, values=values)


def _blank(share: Floats, narrow: FormatLosses, nonzero: Floats, lost: Floats) -> Floats:
    """Return the share; NaN where a narrow format's values are all zero, unexplained."""
    return np.where((nonzero == 0) & (lost == 0) & narrow.censors.any(), np.nan, share)


def _std(cells: Cells) -> Floats:
    with np.errstate(all="ignore"):
        return log2(np.sqrt(np.maximum(cells.rms**2 - cells.mean**2, 0.0)))


def _nonfinite(cells: Cells) -> Floats:
    return np.where(cells.nonfinite > 0, cells.nonfinite, np.where(cells.recorded, 0.0, np.nan))


def _headroom(cells: Cells) -> Floats:
    """Return the binades from the largest stored magnitude to its format's top."""
    top = np.array([np.log2(get_element(name, "heatmap").max) for name in cells.formats])[cells.format]
    with np.errstate(all="ignore"):
        room = top - log2(cells.column("absmax"))
    return -cells.highest(-room)


def _last_bin(cells: Cells) -> Floats:
    return cells.share_of("last_bin")


def _error(cells: Cells) -> Floats:
    return log2(error_sums.relative_error(*_error_squares(cells)))


def _bias(cells: Cells) -> Floats:
    names = ("compared", "error", "reference", "referencesq", "error_reference")
    bias = error_sums.directions(*(cells.error_sum(name) for name in names))
    error, reference = _error_squares(cells)
    with np.errstate(all="ignore"):
        return np.square(bias).sum(axis=-1) * reference / error


def _error_squares(cells: Cells) -> tuple[Floats, Floats]:
    return cells.error_sum("errorsq"), cells.error_sum("referencesq")


def _statistic(title: str, words: str, how: How, scale: Scale, compute: Callable[[Cells], Floats]) -> Statistic:
    return Statistic(title=title, words=words, how=how, scale=scale, of=_by_series(compute))


# Norms and the like are merged as powers of two: their mean is the geometric one.
STATISTICS: Mapping[str, Statistic] = {
    "underflow": Statistic(title="what is flushed to zero", words="lost", how="max", scale="share", of=underflow),
    "zero": _statistic("values that are zero", "zero", "mean", "share", lambda cells: cells.zero_fraction),
    "nonfinite": _statistic("NaN and infinite values", "not finite", "sum", "count", _nonfinite),
    "headroom": _statistic("binades left to the top of the format", "binades left", "min", "binades", _headroom),
    "norm": _statistic("their norm", "norm", "mean", "power", lambda cells: log2(cells.norm)),
    "rms": _statistic("their root mean square", "root mean square", "mean", "power", lambda cells: log2(cells.rms)),
    "std": _statistic("their standard deviation", "standard deviation", "mean", "power", _std),
    "absmean": _statistic("their mean magnitude", "mean magnitude", "mean", "power", lambda cells: log2(cells.absmean)),
    "absmax": _statistic(
        "their largest magnitude", "largest magnitude", "max", "power", lambda cells: log2(cells.true_absmax)
    ),
    "ratio": _statistic(
        "size against the weights", "update / weight", "mean", "power", lambda cells: log2(cells.relative_update)
    ),
    "error": _statistic("their error against a shadow step", "relative error", "max", "power", _error),
    "bias": _statistic("the part of their error that is bias", "bias", "mean", "share", _bias),
    "last_bin": _statistic("values in the last bin of their block", "in the last bin", "max", "share", _last_bin),
    "kurtosis": _statistic("their kurtosis", "kurtosis", "max", "power", lambda cells: log2(cells.kurtosis)),
    "unmoved": _statistic(
        "weights that did not move", "unmoved", "max", "share", lambda cells: cells.share_of("unmoved", "pushed")
    ),
}
