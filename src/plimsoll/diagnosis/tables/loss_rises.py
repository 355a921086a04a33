"""Rises of a loss: where it leaves its usual level, for how long, and how high."""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.tables.trend import trend

_PIECE = 1 << 14  # losses whose windows are sorted at a time
_FIRST = 5  # losses that say where a run began
_TAIL = 3.0  # noise reaches so many times as far above the median as its upper tenth begins
_SURE = 0.99  # Mann-Kendall test, two-sided


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A range of losses above the level before it.

    Attributes:
        first: Place of its first loss.
        last: Place of its last loss.
        peak: Place of its highest loss.
        usual: The median before it.
        level: Upper end of the noise before it.
        height: Median of the rise. If it is `open`, median of its last losses.
        open: Whether the record ends in it.
        lasts: Whether it is longer than single batches explain.
    """

    first: int
    last: int
    peak: int
    usual: float
    level: float
    height: float
    lasts: bool
    open: bool

    @property
    def length(self) -> int:
        """Number of losses from its first to its last."""
        return self.last - self.first + 1


def beginning(loss: Floats) -> float:
    """Return a run's first loss, or the median of its first five if that is lower."""
    return float(min(loss[0], np.median(loss[:_FIRST])))


# The usual level is the median of the losses before. Its noise reaches as far as the largest of three estimates says:
# the median absolute deviation, the distance of the upper tenth, and the same as a ratio, since losses that fall by
# orders of magnitude wobble by factors. So one-sided tails count as noise where they were there before.
def levels(loss: Floats, *, window: int, least: int, deviations: float, rise: float) -> tuple[Floats, Floats]:
    """Return at each loss the median before it, and the upper end of the noise.

    Both are NaN for the first `least` losses.
    """
    usual, level = np.full(len(loss), np.nan), np.full(len(loss), np.nan)
    if len(loss) <= least:
        return usual, level
    padded = np.concatenate([np.full(window - least, np.nan), loss[:-1]])
    windows = sliding_window_view(padded, window)
    for start in range(0, len(windows), _PIECE):
        piece = windows[start : start + _PIECE]
        here = slice(least + start, least + start + len(piece))
        median = np.nanmedian(piece, axis=1)
        deviation = np.nanmedian(np.abs(piece - median[:, None]), axis=1)
        ordered = np.sort(piece, axis=1)  # NaN at the end
        known = np.count_nonzero(~np.isnan(piece), axis=1)
        upper = ordered[np.arange(len(piece)), (0.9 * (known - 1)).astype(np.int64)]
        reach = np.maximum.reduce([deviations * deviation, _TAIL * (upper - median), rise * np.abs(median)])
        with np.errstate(all="ignore"):
            factor = np.where(median > 0, median * (upper / median) ** _TAIL, -np.inf)
        usual[here], level[here] = median, np.maximum(median + reach, factor)
    return usual, level


def rises(loss: Floats, usual: Floats, level: Floats, *, lasting: int, share: float) -> list[Rise]:
    """Return the rises of a loss above `level`, each against the level where it began."""
    result: list[Rise] = []
    done = -1
    for first in np.flatnonzero(loss > level).tolist():
        if first > done:
            rise = _rise_at(loss, first, float(usual[first]), float(level[first]), lasting, share)
            result.append(rise)
            done = rise.last
    return result


def gradual_rise(loss: Floats, *, beyond: float, window: int, lasting: int, share: float) -> Rise | None:
    """Return a rise above `beyond` that noise hid while it went on.

    None if most of the last losses are below.
    """
    if len(loss) < window + lasting or np.count_nonzero(loss[-lasting:] > beyond) < share * lasting:
        return None
    smooth = np.median(sliding_window_view(loss, lasting), axis=1)
    below = np.flatnonzero(smooth <= beyond)
    if not len(below):
        return None
    first = int(below[-1]) + lasting
    first = min(first, len(loss) - lasting)
    return Rise(
        first=first, last=len(loss) - 1, peak=first + int(np.argmax(loss[first:])), usual=float(smooth.min()),
        level=beyond, height=float(np.median(loss[-lasting:])), lasts=True, open=True,
    )  # fmt: skip


def falls(loss: Floats) -> bool:
    """Return whether losses fall for certain."""
    line = trend(np.arange(len(loss)), loss)
    return line is not None and line.confidence >= _SURE and line.high < 0


def comes_back(loss: Floats, rise: Rise) -> bool:
    """Return whether an open rise falls for certain and half of it is gone."""
    after = loss[rise.peak :] - rise.usual
    quarter = after[: max(len(after) // 4, 1)]
    return falls(after) and rise.height - rise.usual <= 0.5 * float(np.median(quarter))


def _rise_at(loss: Floats, first: int, usual: float, level: float, lasting: int, share: float) -> Rise:
    near = loss[first : first + lasting] > level
    lasts = bool(len(near) == lasting and np.count_nonzero(near) >= share * lasting)
    if lasts:
        above = loss[first:] > level
        running = np.concatenate([[0], np.cumsum(above)])
        fewer = np.flatnonzero(running[lasting:] - running[:-lasting] < share * lasting)
        ends = len(above) if not len(fewer) else int(fewer[0]) + lasting
        open_ = not len(fewer)
        last = first + int(np.flatnonzero(above[:ends])[-1])
    else:
        open_ = bool(len(near) < lasting and np.count_nonzero(near) >= share * len(near))
        last = first + (int(np.flatnonzero(near)[-1]) if open_ else int(np.argmin(np.append(near, False))) - 1)
    losses = loss[max(first, len(loss) - lasting) :] if open_ else loss[first : last + 1]
    return Rise(
        first=first, last=last, peak=first + int(np.argmax(loss[first : last + 1])), usual=usual, level=level,
        height=float(np.median(losses)), lasts=lasts, open=open_,
    )  # fmt: skip
