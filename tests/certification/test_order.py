"""Orders of additions and accumulators of sums that were made for it: each is found and put into words."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from plimsoll.certification.probing.caller import Caller
from plimsoll.certification.reductions.observed import Reduction
from plimsoll.certification.reductions.order import Tree, described, grown, leaves
from plimsoll.certification.reductions.reducer import Reducer
from plimsoll.formats import get_element
from tests.support.cases import each
from tests.support.certification.reductions import (
    IN_BF16,
    IN_FP16,
    IN_FP32,
    IN_FP64,
    Accumulator,
    Product,
    Summation,
    backward,
    in_blocks,
    in_lanes,
    in_turn,
    pairwise,
)


def reduction(function: Callable[..., object], fmt: str = "fp32") -> Reduction:
    caller = Caller(function, torch.device("cpu"), 1e6)
    return Reduction(Reducer(caller, "sum", get_element(fmt, "test")), caller)


def halving(terms: Sequence[np.ndarray], add: Callable[..., np.ndarray]) -> np.ndarray:
    """As a tree of vectors: each term with the one half the length away."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [add(terms[i], terms[i + half]) for i in range(half)]
    return terms[0]


ORDERS = {
    "64 terms one after another": in_turn,
    "64 terms one after another, from the last": backward,
    "64 terms pairwise": pairwise,
    "64 terms pairwise, each term with the one half the length away": halving,
    "64 terms in 8 interleaved sums (one after another), then one after another": in_lanes(8),
    "64 terms in 4 interleaved sums (one after another), then pairwise": in_lanes(4, pairwise),
    "64 terms in blocks of 16 (one after another), then one after another": in_blocks(16),
    "64 terms in blocks of 8 (pairwise), then one after another": in_blocks(8, pairwise),
}


@each("words", ORDERS)
def test_an_order_is_found(words: str) -> None:
    found = reduction(Summation(order=ORDERS[words]))
    assert found.order.words == words
    assert {width.bits for width in found.widths} == {24}


@each(
    ("add", "name", "rounding"),
    [
        (IN_FP32, "fp32", "nearest_even"),
        (IN_FP16, "fp16", "nearest_even"),
        (IN_BF16, "bf16", "nearest_even"),
        (IN_FP64, "fp64", "nearest_even"),
        (Accumulator(bits=14), "14 bits", "nearest_even"),
        (Accumulator(bits=11), "11 bits", "nearest_even"),  # as narrow as FP16, with a wider range
        (Accumulator(bits=25, cut_off=True), "25 bits", "toward_zero"),
    ],
)
def test_an_accumulator_is_found(add: Accumulator, name: str, rounding: str) -> None:
    found = reduction(Summation(add=add))
    assert found.accumulator_words() == name
    assert {width.rounding for width in found.widths} == {rounding}


def test_places_of_a_product_that_are_computed_otherwise_are_left_out() -> None:
    """As by numpy.dot on some processors, whose order and rounding then looked like neither of the two."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        in_turn, edge = Product(), 2 * b.shape[1] // 3
        return torch.cat([in_turn(a.flip(1), b.flip(0)[:, :edge]), in_turn(a, b[:, edge:])], dim=1)

    caller = Caller(product, torch.device("cpu"), 1e6)
    found = Reduction(Reducer(caller, "matmul", get_element("fp32", "test")), caller)
    assert found.order.words == "256 terms one after another, from the last"
    assert {width.rounding for width in found.widths} == {"nearest_even"}


def test_a_sum_that_loses_nothing_shows_no_order() -> None:
    import math

    def exact(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(math.fsum(x.tolist()))

    found = reduction(exact)
    assert found.order.words == "not visible: no term of the format is lost against the largest one"
    assert found.accumulator_words() == "at least 61 bits"


def random_tree(members: list[int], most: int, rng: random.Random) -> Tree:
    if len(members) == 1:
        return members[0]
    count = rng.randint(2, min(most, len(members)))
    cuts = sorted(rng.sample(range(1, len(members)), count - 1))
    shuffled = rng.sample(members, len(members))
    parts = [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(members)], strict=True)]
    return tuple(random_tree(sorted(part), most, rng) for part in parts)


def sizes_of(tree: Tree) -> Callable[[int, Sequence[int]], list[int]]:
    """The number of terms of the smallest partial sum with both terms, from the tree itself."""

    def size(part: Tree, pair: set[int]) -> int:
        assert not isinstance(part, int)
        inner = [child for child in part if pair <= set(leaves(child))]
        return size(inner[0], pair) if inner else len(leaves(part))

    return lambda first, others: [size(tree, {first, other}) for other in others]


def shape(tree: Tree) -> object:
    """The tree without the order of the children, which no sum shows."""
    return tree if isinstance(tree, int) else frozenset(shape(child) for child in tree)


@each("most", [2, 5])
def test_any_tree_grows_again_from_its_sizes(most: int) -> None:
    rng = random.Random(0)
    for _ in range(60):
        tree = random_tree(list(range(rng.randint(2, 24))), most, rng)
        again = grown(sizes_of(tree), leaves(tree))
        assert shape(again) == shape(tree)
        assert described(again)


@each(
    ("tree", "words"),
    [
        ((0, 1, 2, 3), "all 4 at once"),
        (((0, 1, 2, 3), 4, 5, 6, 7), "4 at once, one group after another"),
        ((((1, 0), 3), 2), "one after another, in the order 1, 0, 3, 2"),
        ((((0, 3), 1), (2, (4, 5))), "in an irregular tree of depth 3"),
    ],
)
def test_trees_in_words(tree: Tree, words: str) -> None:
    found = described(tree)
    assert found == words or (words.startswith("one after another, in the order") and found.startswith(words[:30]))
