"""What was found of a sum or a product: its order of additions, its accumulator, and its results for exact sums."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plimsoll.certification.probing.arrays import CallFailedError
from plimsoll.certification.probing.caller import Caller
from plimsoll.certification.reductions import accumulator
from plimsoll.certification.reductions.accumulator import Width
from plimsoll.certification.reductions.order import (
    NotVisibleError,
    Tree,
    UnstableOrderError,
    described,
    is_chain,
    reveal,
)
from plimsoll.certification.reductions.reducer import Reducer
from plimsoll.formats import Format

# Terms of the sums whose order is looked for. A product has many sums in one call.
LENGTHS = {"matmul": (256, 64, 16), "sum": (64, 16)}
_SHARE = 0.3  # of the time left, for the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order of the additions of a sum."""

    tree: "Tree | None"  # the tree of additions, or None
    words: str  # the order in words, or why it is not visible
    length: int  # number of terms
    stable: bool = True  # whether it is the same in every call


class Reduction:
    """A sum or a product under test.

    Args:
        reducer: The function.
        caller: Its calls.
    """

    def __init__(self, reducer: Reducer, caller: Caller) -> None:
        self.reducer = reducer
        self.caller = caller

    @property
    def fmt(self) -> Format:
        """Format of the elements."""
        return self.reducer.fmt

    @cached_property
    def order(self) -> Order:
        """The order of additions, of the longest sum that shows one and that there is time for."""
        lengths = [length for length in LENGTHS[self.reducer.kind] if self._affordable(length)]
        found = Order(tree=None, words="not tried: a call takes too long", length=LENGTHS[self.reducer.kind][-1])
        for length in lengths:
            try:
                tree = reveal(self.reducer, length)
            except (NotVisibleError, CallFailedError) as error:
                stable = not isinstance(error, UnstableOrderError)
                found = Order(tree=None, words=f"not visible: {error}", length=length, stable=stable)
            else:
                return Order(tree=tree, words=f"{length} terms {described(tree)}", length=length)
        return found

    def _affordable(self, length: int) -> bool:
        # Each product has many sums. The longest search is that of pairwise sums: about n log n pairs.
        calls = length if self.reducer.kind == "matmul" else length * length // 4
        return calls * self.reducer.seconds_per_call < _SHARE * self.caller.remaining

    @cached_property
    def widths(self) -> list[Width]:
        """Accumulators of partial sums, small ones first; of the first two terms where the order is not visible."""
        return accumulator.widths(self.reducer, self.order.tree, self.order.length)

    @cached_property
    def overflows_early(self) -> bool | None:
        """Whether a partial sum of 2**16 overflows; None where the format has no such terms."""
        return accumulator.overflows_at_fp16(self.reducer, self.widths[0].places, self.order.length)

    @cached_property
    def compensated(self) -> bool:
        """Whether what a sum loses of small terms is added to it later."""
        tree, width = self.order.tree, self.widths[0]
        if tree is None or width.open or not is_chain(tree):
            return False
        return accumulator.compensated(self.reducer, self.order.length, width.bits)

    @cached_property
    def exact_products(self) -> bool | None:
        """Whether products enter the sum unrounded; None where the accumulator holds every product."""
        narrowest = min(self.widths, key=lambda width: width.bits)
        mantissa = self.fmt.mantissa_bits
        if self.reducer.kind != "matmul" or narrowest.open or narrowest.bits > 2 * mantissa:
            return None
        # (1 + e)**2 = 1 + 2e + e**2: after -(1 + 2e) only e**2 is left, which a rounded product has lost.
        e, length = 2.0**-mantissa, self.order.length
        left, right = np.zeros((1, length)), np.zeros((1, length))
        left[0, :2], right[0, :2] = (-(1 + 2 * e), 1 + e), (1.0, 1 + e)
        return bool(self.reducer.sums_of_products(left, right)[0] == e * e)

    def facts(self) -> dict[str, object]:
        """Return what was inferred, by the names of `Certificate.inferred`."""
        found: dict[str, object] = {"order": self.order.words}
        found["accumulate"] = self.accumulator_words()
        roundings = list(dict.fromkeys(width.rounding for width in self.widths))
        found["accumulate_rounding"] = ", ".join(roundings)
        if self.reducer.kind == "matmul":
            exact = self.exact_products
            found["products"] = "exact" if exact is not False else "rounded before they are added"
        else:
            found["compensated"] = self.compensated
        found["takes"], found["returns"] = self.reducer.dtype, self.reducer.result
        return found

    def accumulator_words(self) -> str:
        """Return the accumulator in words: one format, or one for each size of partial sums."""
        names = [(accumulator.named(width, self.overflows_early), width.terms) for width in self.widths]
        if len({name for name, _ in names}) == 1:
            return f"{names[0][0]}, compensated" if self.compensated else names[0][0]
        return ", ".join(f"{name} in sums of {terms}" for name, terms in names)
