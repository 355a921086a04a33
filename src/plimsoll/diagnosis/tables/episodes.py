"""Episodes of a run: broken steps that belong together, and which of several decides."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.tables.cells import Ints

_DENSER = 2.0  # times the share of broken steps in the episodes before

Span = tuple[Ints, Ints]  # first steps, and for each the last step that it reaches to


def reaching(steps: Ints, broken: NDArray[np.bool_], last_step: int) -> Span:
    """Return the broken steps, each up to the next recorded one if that is broken too.

    The last recorded one reaches to `last_step`: nothing shows that it is over.
    """
    following = np.where(np.append(broken[1:], True), np.append(steps[1:], last_step), steps)
    return steps[broken], following[broken]


def first_of_deciding(spans: Sequence[Span], last_step: int, recovered: float) -> int | None:
    """Return the first step of the episode that decides. None without spans.

    An episode is over once `recovered` steps follow it that are in no span. One that is not over decides if it has more
    steps than all before it together, or `recovered` of them, and is denser than what came before. In all other cases
    the first episode decides: a fault that comes now and then began when it came first.

    >>> early, lasting = np.array([3]), np.arange(40, 60)
    >>> first_of_deciding([(early, early), (lasting, lasting)], last_step=59, recovered=10)
    40
    >>> first_of_deciding([(early, early), (lasting, lasting)], last_step=99, recovered=10)
    3

    Every third batch is broken, but for a few at the start:

    >>> thirds = np.setdiff1d(np.arange(0, 300, 3), np.arange(60, 75))
    >>> first_of_deciding([(thirds, thirds)], last_step=299, recovered=10)
    0
    """
    begins = np.concatenate([begin for begin, _ in spans]).astype(np.int64)
    if not len(begins):
        return None
    first, of = np.unique(begins, return_inverse=True)
    end = first.copy()
    np.maximum.at(end, of, np.concatenate([end for _, end in spans]).astype(np.int64))
    reached = np.maximum.accumulate(end)
    episodes = np.flatnonzero(np.append(True, first[1:] - reached[:-1] > recovered))
    sizes = np.add.reduceat(np.maximum(end - first, 1), episodes)
    lasts = last_step - reached[-1] < recovered and (sizes[-1] >= recovered or sizes[-1] > sizes[:-1].sum())
    last, many = first[episodes[-1]], max(sizes[:-1].sum(), 1)
    denser = sizes[-1] * (last - first[0]) > _DENSER * many * (last_step - last + 1)
    return int(first[episodes[-1 if lasts and denser else 0]])
