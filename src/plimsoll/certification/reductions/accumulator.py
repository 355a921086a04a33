"""Width and rounding of an accumulator, measured at several partial sums of a known order.

After Fasi et al., Numerical behavior of NVIDIA tensor cores (PeerJ Computer Science 7, 2021): 1 and a smaller term are
added, and then -1. The result is what the accumulator kept of the smaller term.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from plimsoll.certification.probing.arrays import Values
from plimsoll.certification.reductions.order import Tree, leaves
from plimsoll.certification.reductions.reducer import Reducer

_NAMES = {8: "bf16", 11: "fp16", 24: "fp32", 53: "fp64"}
_ROUNDINGS: dict[
    tuple[int, ...], str
] = {  # what 1/4, 1/2 and 3/4 of the last place become, in positive and in negative sums
    (0, 0, 1, 0, 0, 1): "nearest_even",
    (0, 1, 1, 0, 1, 1): "nearest_away",
    (0, 0, 0, 0, 0, 0): "toward_zero",
    (1, 1, 1, 0, 0, 0): "up",
    (0, 0, 0, 1, 1, 1): "down",
    (1, 1, 1, 1, 1, 1): "away_from_zero",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Accumulator of one partial sum."""

    terms: int  # number of terms of the partial sum
    bits: int  # bits of its significand; at least so many if `open`
    open: bool  # whether the terms of the format reach no further
    rounding: str  # how it rounds, or "unknown", or "not visible"
    places: tuple[int, int, int]  # where the larger term, the smaller one and the one that cancels the larger are
    largest: float  # the larger term

    @property
    def last_place(self) -> float:
        """Last place of a partial sum that holds the larger term."""
        return self.largest * 2.0 ** (1 - self.bits)


def widths(reducer: Reducer, tree: "Tree | None", length: int) -> list[Width]:
    """Return the accumulators of the smallest, a middle and the largest partial sum that another one follows.

    Without a tree it is that of the first two terms, with the last one after them, as in most orders.
    """
    path = [((0, 1, length - 1), 2)] if tree is None else _path(tree)
    chosen = sorted({0, len(path) // 2, len(path) - 1})
    return [_width(reducer, length, *path[index]) for index in chosen]


def _path(tree: Tree) -> list[tuple[tuple[int, int, int], int]]:
    """Return the partial sums with the first term that another one follows, small ones first.

    Each has the places of the first term, of one that is added to it there, and of one that is added later, and the
    number of its terms. Terms that are added at once are one partial sum, and the last of them cancels the first.
    """
    first = leaves(tree)[0]
    sums: list[tuple[int, int, int]] = []  # places of two others, and the number of terms
    while isinstance(tree, tuple):
        home = next(child for child in tree if first in leaves(child))
        others = [leaves(child)[0] for child in tree if child is not home]
        sums.append((others[0], others[-1], len(leaves(tree))))
        tree = home
    sums.reverse()
    found = [((first, second, later), terms) for (second, _, terms), (later, _, _) in pairwise(sums)]
    at_once = [((first, second, last), terms) for second, last, terms in sums[-1:] if second != last]
    return [*found, *at_once]


def _width(reducer: Reducer, length: int, places: tuple[int, int, int], terms: int) -> Width:
    top, reach = _reach(reducer)
    largest = 2.0**top
    small = [2.0 ** (top - p) for p in range(1, reach + 1)]
    kept = three(reducer, length, places, [(largest, value, -largest) for value in small]) == np.array(small)
    if kept.all():
        return Width(terms=terms, bits=reach + 1, open=True, rounding="not visible", places=places, largest=largest)
    bits = int(np.argmin(kept)) + 1  # of 1 + 2**-p the first p that is lost is the number of bits
    last = 2.0 ** (top - bits + 1)
    signed = [(sign, part * last) for sign in (1.0, -1.0) for part in (0.25, 0.5, 0.75)]
    found = three(reducer, length, places, [(sign * largest, sign * part, -sign * largest) for sign, part in signed])
    pattern = tuple(int(value) if value.is_integer() else -1 for value in np.abs(found / last).tolist())
    return Width(
        terms=terms, bits=bits, open=False, rounding=_ROUNDINGS.get(pattern, "unknown"), places=places, largest=largest
    )


def three(
    reducer: Reducer, length: int, places: tuple[int, int, int], terms: list[tuple[float, float, float]]
) -> Values:
    """Return sums of three terms each at these places, with zeros elsewhere."""
    rows = np.zeros((len(terms), length))
    rows[:, places] = terms
    return reducer.sums(rows)


def _reach(reducer: Reducer) -> tuple[int, int]:
    """Return the exponent of the larger term, and how far below it the results and the terms reach."""
    top = min(reducer.highest, 14, reducer.result_format.max_exponent - 1)
    lowest = max(reducer.lowest + 2, reducer.result_format.min_exponent)
    return top, min(top - lowest, 60)


def overflows_at_fp16(reducer: Reducer, places: tuple[int, int, int], length: int) -> bool | None:
    """Return whether a partial sum of 2**16 overflows; None where the format or the result has no 2**15."""
    if min(reducer.highest, reducer.result_format.max_exponent) < 15:
        return None
    half = 2.0**15
    return not bool(three(reducer, length, places, [(half, half, -half)])[0] == half)


def compensated(reducer: Reducer, length: int, bits: int) -> bool:
    """Return whether many terms of a quarter of the last place count although each is lost by itself.

    Only of a sum that adds one term after another: in others small terms meet each other first.
    """
    top, _ = _reach(reducer)
    quarter = 2.0 ** (top - bits - 1)
    row = np.full((1, length), quarter)
    row[0, 0], row[0, -1] = 2.0**top, -(2.0**top)
    exact = quarter * (length - 2)
    return bool(reducer.sums(row)[0] >= exact / 2)


def named(width: Width, overflows: bool | None) -> str:
    """Return the name of an accumulator: that of a format with as many bits, if its range fits too."""
    if width.open:
        return f"at least {width.bits} bits"
    name = _NAMES.get(width.bits, f"{width.bits} bits")
    if width.bits == 11 and overflows is False:
        return "11 bits"
    return name
