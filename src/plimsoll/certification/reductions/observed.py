"""Findings on a sum or product: order, and the accumulator's width and rounding."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from plimsoll.certification.probing.arrays import CallFailedError, Values
from plimsoll.certification.probing.caller import Caller
from plimsoll.certification.reductions.order import (
    NotVisibleError,
    Tree,
    UnstableOrderError,
    described,
    is_chain,
    leaves,
    reveal,
)
from plimsoll.certification.reductions.reducer import Reducer

# Terms of the sums whose order is looked for. A product has many sums in one call.
LENGTHS = {"matmul": (256, 64, 16), "sum": (64, 16)}
_SHARE = 0.3  # of the time left, for the search
_NAMES = {8: "bf16", 11: "fp16", 24: "fp32", 53: "fp64"}
# By what 1/4, 1/2 and 3/4 of the last place become, in positive and in negative sums.
_ROUNDINGS: dict[tuple[int, ...], str] = {
    (0, 0, 1, 0, 0, 1): "nearest_even",
    (0, 1, 1, 0, 1, 1): "nearest_away",
    (0, 0, 0, 0, 0, 0): "toward_zero",
    (1, 1, 1, 0, 0, 0): "up",
    (0, 0, 0, 1, 1, 1): "down",
    (1, 1, 1, 1, 1, 1): "away_from_zero",
}
Places = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order of the additions of a sum."""

    tree: "Tree | None"  # the tree of additions, or None
    words: str  # the order in words, or why it is not visible
    length: int  # number of terms
    stable: bool = True  # whether it is the same in every call


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Accumulator of one partial sum."""

    terms: int  # number of terms of the partial sum
    bits: int  # bits of its significand; at least so many if `open`
    open: bool  # whether the terms of the format reach no further
    rounding: str  # how it rounds, or "unknown", or "not visible"
    places: Places  # where the larger term, the smaller one and the one that cancels the larger are
    largest: float  # the larger term

    @property
    def last_place(self) -> float:
        """Last place of a partial sum that holds the larger term."""
        return self.largest * 2.0 ** (1 - self.bits)


class Reduction:
    """A sum or a product under test."""

    def __init__(self, reducer: Reducer, caller: Caller) -> None:
        self.reducer = reducer
        self.caller = caller

    @cached_property
    def order(self) -> Order:
        """The order of additions of the longest sum that shows one, as time allows."""
        lengths = [length for length in LENGTHS[self.reducer.kind] if self._affordable(length)]
        best_order = Order(tree=None, words="not tried: a call takes too long", length=LENGTHS[self.reducer.kind][-1])
        for length in lengths:
            try:
                tree = reveal(self.reducer, length)
            except (NotVisibleError, CallFailedError) as error:
                stable = not isinstance(error, UnstableOrderError)
                best_order = Order(tree=None, words=f"not visible: {error}", length=length, stable=stable)
            else:
                return Order(tree=tree, words=f"{length} terms {described(tree)}", length=length)
        return best_order

    def _affordable(self, length: int) -> bool:
        # Each product has many sums. The longest search is that of pairwise sums: about n log n pairs.
        calls = length if self.reducer.kind == "matmul" else length * length // 4
        return calls * self.reducer.seconds_per_call < _SHARE * self.caller.remaining

    def three(self, places: Places, *terms: tuple[float, float, float]) -> Values:
        """Return sums of three terms each at these places, with zeros elsewhere."""
        rows = np.zeros((len(terms), self.order.length))
        rows[:, places] = terms
        return self.reducer.sums(rows)

    @cached_property
    def widths(self) -> list[Width]:
        """Accumulators of a small, a middle and a large partial sum that another follows.

        Without a tree it is that of the first two terms, with the last one after them, as in most orders.
        """
        tree = self.order.tree
        path = [((0, 1, self.order.length - 1), 2)] if tree is None else _path(tree)
        return [self._width(*path[index]) for index in sorted({0, len(path) // 2, len(path) - 1})]

    # The accumulator is measured at several partial sums of the order, after Fasi et al., Numerical behavior of NVIDIA
    # tensor cores (PeerJ Computer Science 7, 2021): 1 and a smaller term are added, and then -1. The result is what the
    # accumulator kept of the smaller term.
    def _width(self, places: Places, terms: int) -> Width:
        result = self.reducer.result_format
        top, reach = self._top, min(self._top - max(self.reducer.lowest + 2, result.min_exponent), 60)
        largest, bits, rounding = 2.0**top, reach + 1, "not visible"
        small = [2.0 ** (top - p) for p in range(1, reach + 1)]
        is_kept = self.three(places, *((largest, value, -largest) for value in small)) == np.array(small)
        if not is_kept.all():
            bits = int(np.argmin(is_kept)) + 1  # of 1 + 2**-p the first p that is lost is the number of bits
            last = 2.0 ** (top - bits + 1)
            signed = [(sign * largest, sign * part * last) for sign in (1.0, -1.0) for part in (0.25, 0.5, 0.75)]
            multiples = np.abs(self.three(places, *((a, b, -a) for a, b in signed)) / last).tolist()
            pattern = tuple(int(value) if value.is_integer() else -1 for value in multiples)
            rounding = _ROUNDINGS.get(pattern, "unknown")
        open_ = bool(is_kept.all())
        return Width(terms=terms, bits=bits, open=open_, rounding=rounding, places=places, largest=largest)

    @property
    def _top(self) -> int:
        """Exponent of the larger term."""
        return min(self.reducer.highest, 14, self.reducer.result_format.max_exponent - 1)

    @cached_property
    def overflows_early(self) -> bool | None:
        """True if a partial sum of 2**16 overflows. None where the format or the result has no 2**15."""
        if min(self.reducer.highest, self.reducer.result_format.max_exponent) < 15:
            return None
        half = 2.0**15
        return not bool(self.three(self.widths[0].places, (half, half, -half))[0] == half)

    @cached_property
    def compensated(self) -> bool:
        """True if many quarters of the last place count, although each alone is lost."""
        tree, width, length = self.order.tree, self.widths[0], self.order.length
        # Only of a sum that adds one term after another: in others small terms meet each other first.
        if tree is None or width.open or not is_chain(tree):
            return False
        quarter = 2.0 ** (self._top - width.bits - 1)
        row = np.full((1, length), quarter)
        row[0, 0], row[0, -1] = 2.0**self._top, -(2.0**self._top)
        return bool(self.reducer.sums(row)[0] >= quarter * (length - 2) / 2)

    @cached_property
    def exact_products(self) -> bool | None:
        """True if products enter the sum unrounded. None where the accumulator holds every product."""
        narrowest = min(self.widths, key=lambda width: width.bits)
        mantissa = self.reducer.fmt.mantissa_bits
        if self.reducer.kind != "matmul" or narrowest.open or narrowest.bits > 2 * mantissa:
            return None
        # (1 + e)**2 = 1 + 2e + e**2: after -(1 + 2e) only e**2 is left, which a rounded product has lost.
        e, length = 2.0**-mantissa, self.order.length
        left, right = np.zeros((1, length)), np.zeros((1, length))
        left[0, :2], right[0, :2] = (-(1 + 2 * e), 1 + e), (1.0, 1 + e)
        return bool(self.reducer.sums_of_products(left, right)[0] == e * e)

    def facts(self) -> dict[str, object]:
        """Return what was inferred, by the names of `Certificate.inferred`."""
        roundings = list(dict.fromkeys(width.rounding for width in self.widths))
        facts_by_name: dict[str, object] = {
            "order": self.order.words,
            "accumulate": self.accumulator_words(),
            "accumulate_rounding": ", ".join(roundings),
        }
        if self.reducer.kind == "matmul":
            facts_by_name["products"] = "exact" if self.exact_products is not False else "rounded before they are added"
        else:
            facts_by_name["compensated"] = self.compensated
        return facts_by_name | {"takes": self.reducer.dtype, "returns": self.reducer.result}

    def accumulator_words(self) -> str:
        """Return the accumulator in words: one format, or one for each size of sums."""
        names = [(self._named(width), width.terms) for width in self.widths]
        if len({name for name, _ in names}) == 1:
            return f"{names[0][0]}, compensated" if self.compensated else names[0][0]
        return ", ".join(f"{name} in sums of {terms}" for name, terms in names)

    def _named(self, width: Width) -> str:
        """Return the name of a format with as many bits, if its range fits too."""
        if width.open:
            return f"at least {width.bits} bits"
        wider_than_fp16 = width.bits == 11 and self.overflows_early is False
        return f"{width.bits} bits" if wider_than_fp16 else _NAMES.get(width.bits, f"{width.bits} bits")


def _innermost(tree: Tree) -> int:
    """Return the term that the most additions follow, of several the first."""
    inside = [tree]
    while any(isinstance(part, tuple) for part in inside):
        inside = [child for part in inside if isinstance(part, tuple) for child in part]
    return min(part for part in inside if isinstance(part, int))


def _path(tree: Tree) -> list[tuple[Places, int]]:
    """Return the partial sums with the innermost term and a term after them, small first.

    Each has the places of that term, of one that is added to it there, and of one that is added later, and the number
    of its terms. Terms that are added at once are one partial sum, and the last of them cancels the innermost.
    """
    first = _innermost(tree)
    sums: list[tuple[int, int, int]] = []  # places of two others, and the number of terms
    while isinstance(tree, tuple):
        home = next(child for child in tree if first in leaves(child))
        others = [leaves(child)[0] for child in tree if child is not home]
        sums.append((others[0], others[-1], len(leaves(tree))))
        tree = home
    sums.reverse()
    path = [((first, second, later), terms) for (second, _, terms), (later, _, _) in pairwise(sums)]
    at_once = [((first, second, last), terms) for second, last, terms in sums[-1:] if second != last]
    return [*path, *at_once]
