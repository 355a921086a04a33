"""The order of additions, by numerical tests alone (FPRev: arXiv:2411.00442)."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from plimsoll.certification.reductions.reducer import Reducer

Tree: TypeAlias = "int | tuple[Tree, ...]"  # a leaf is the index of a term
Sizes = Callable[[int, Sequence[int]], list[int]]

_IN_TURN = "one after another"


class NotVisibleError(Exception):
    """The terms of the format do not reach far enough to show an order."""


class UnstableOrderError(NotVisibleError):
    """Additions come in another order in each call."""


def reveal(reducer: Reducer, length: int) -> Tree:
    """Return the tree of additions of a sum of so many terms.

    Raises:
        NotVisibleError: No unit is lost, so no order is visible; or the counts contradict each other.
    """
    mask, unit = mask_and_unit(reducer, length)
    others = range(1, length)
    once = _sizes(reducer, length, mask, unit, 0, others)
    if once != _sizes(reducer, length, mask, unit, 0, others):
        raise UnstableOrderError("it changes from call to call")
    if max(once) <= 2:
        raise NotVisibleError("no term of the format is lost against the largest one")
    known = {(0, other): size for other, size in zip(others, once, strict=True)}

    def sizes(first: int, others: Sequence[int]) -> list[int]:
        wanted = [other for other in others if (first, other) not in known]
        sizes_with_first = _sizes(reducer, length, mask, unit, first, wanted)
        known.update({(first, other): size for other, size in zip(wanted, sizes_with_first, strict=True)})
        return [known[first, other] for other in others]

    tree = grown(sizes, list(range(length)))
    if len(leaves(tree)) != length:
        raise NotVisibleError("the losses fit no tree of additions")
    return tree


def mask_and_unit(reducer: Reducer, length: int) -> tuple[float, float]:
    """Return M and the unit, far apart, so that results count units without M.

    Raises:
        NotVisibleError: The result's dtype does not count so far, or units are lost by themselves.
    """
    result = reducer.result_format
    if length > 2 ** (result.mantissa_bits + 1):
        raise NotVisibleError(f"{reducer.result} does not count to {length}")
    # 2**14: twice it is a value of FP16, whose accumulators must not overflow.
    highest = min(reducer.highest, 14)
    lowest = max(reducer.lowest, int(np.log2(result.smallest_subnormal)), highest - 60)
    # Small units may be flushed, as inputs, as products or as results: then larger ones are tried.
    for exponent in sorted({lowest, highest - 38, highest - 28, highest - 20} & {*range(lowest, highest)}):
        unit = 2.0**exponent
        if float(reducer.sums(np.full((1, length), unit))[0]) == length * unit:
            return 2.0**highest, unit
    raise NotVisibleError("small terms are lost by themselves")


# One term is a huge M and another -M; all others are a unit so small that M absorbs it. Units that are added before M
# and -M meet are lost, and the others are counted by the result. The count gives the size of the smallest partial sum
# that has both. Sizes for all pairs give the tree.
def _sizes(reducer: Reducer, length: int, mask: float, unit: float, first: int, others: Sequence[int]) -> list[int]:
    """Return for pairs of terms the size of the smallest partial sum with both."""
    sizes: dict[int, int] = {}
    for sign in (1.0, -1.0):
        wanted = [other for other in others if other not in sizes]
        if not wanted:
            break
        rows = np.full((len(wanted), length), unit)
        rows[:, first] = sign * mask
        rows[range(len(wanted)), wanted] = -sign * mask
        counts = reducer.sums(rows) / unit
        valid = np.isfinite(counts) & (counts == np.round(counts)) & (counts >= 0) & (counts <= length - 2)
        for other, count, good in zip(wanted, counts, valid, strict=True):
            if good:  # truncation toward zero eats into -M: then M and -M change places
                sizes[other] = length - int(count)
    if len(sizes) < len(others):
        raise NotVisibleError("the results count no units")
    return [sizes[other] for other in others]


def grown(sizes: Sizes, members: list[int]) -> Tree:
    """Return the tree of ascending terms that are a partial sum. `sizes`: of the smallest with a term and each."""
    tree: Tree = members[0]
    first, others = members[0], members[1:]
    measured: dict[int, int] = dict(zip(others, sizes(first, others), strict=True)) if others else {}
    for size in sorted(set(measured.values())):
        rest: list[int] = [other for other in others if measured[other] == size]
        children: list[Tree] = [tree]
        while rest:  # several of them if they are added in one step
            head, tail = rest[0], rest[1:]
            inside = {other for other, found in zip(tail, sizes(head, tail), strict=True) if found < size}
            children.append(grown(sizes, [head, *sorted(inside)]))
            rest = [other for other in tail if other not in inside]
        tree = tuple(children)
    return tree


def leaves(tree: Tree) -> list[int]:
    """Return the terms of a tree, in ascending order."""
    found: list[int] = []
    waiting = [tree]
    while waiting:  # without recursion: a chain is as deep as it has terms
        part = waiting.pop()
        if isinstance(part, int):
            found.append(part)
        else:
            waiting.extend(part)
    return sorted(found)


def described(tree: Tree) -> str:
    """Return a tree in words.

    >>> described((((0, 1), 2), 3)), described(((0, 1), (2, 3)))
    ('one after another', 'pairwise')
    >>> described(((0, 2), (1, 3))), described((0, 1, 2, 3))
    ('pairwise, each term with the one half the length away', 'all 4 at once')
    """
    members = leaves(tree)
    count = len(members)
    if count == 1:
        return "alone"
    if isinstance(tree, tuple) and len(tree) == count > 2:
        return f"all {count} at once"
    if count == 2:
        return "pairwise"
    simple = _chain(tree, members) or _pairwise(tree)
    if simple:
        return simple
    sums = _partial_sums(tree)
    for words, groups in _groupings(members):
        if all(frozenset(group) in sums for group in groups):
            inner = described(_renamed(_part(tree, frozenset(groups[0]))))
            outer = described(_merged(tree, [frozenset(group) for group in groups]))
            return f"in {words} ({inner}), then {outer}"
    return f"in an irregular tree of depth {_depth(tree)}"


def is_chain(tree: Tree) -> bool:
    """Return whether one term after another is added, in the order of the terms."""
    return described(tree) == _IN_TURN


def _chain(tree: Tree, members: list[int]) -> str:
    """Return words for a tree that adds a term or group after another; else ""."""
    added: list[list[int]] = []
    while isinstance(tree, tuple):
        inner = [child for child in tree if isinstance(child, tuple)]
        single = [child for child in tree if isinstance(child, int)]
        if len(inner) > 1:
            return ""
        added.append(single)
        tree = inner[0] if inner else single[0]
    added.reverse()
    size = len(added[-1])
    flat = [leaf for group in added for leaf in group]
    if size > 1:
        in_groups = all(len(group) == size for group in added) and flat == members
        return f"{size} at once, one group after another" if in_groups else ""
    if flat == members:
        return _IN_TURN
    backward = [*added[0][::-1], *flat[2:]]  # of the first two terms it is not known which came first
    if backward == members[::-1]:
        return f"{_IN_TURN}, from the last"
    shown = ", ".join(str(members.index(leaf)) for leaf in backward[:6])
    return f"{_IN_TURN}, in the order {shown}{', ...' if len(backward) > 6 else ''}"


def _pairwise(tree: Tree) -> str:
    """Return words for a tree of halves, neighbours or every other term; else ""."""
    if _halved(tree, lambda terms: terms[: len(terms) // 2]):
        return "pairwise"
    return "pairwise, each term with the one half the length away" if _halved(tree, lambda terms: terms[::2]) else ""


def _halved(tree: Tree, half: Callable[[list[int]], list[int]]) -> bool:
    if isinstance(tree, int):
        return True
    if len(tree) != 2 or leaves(tree[0]) != half(leaves(tree)):
        return False
    return len(leaves(tree[0])) == len(leaves(tree[1])) and all(_halved(child, half) for child in tree)


def _groupings(members: list[int]) -> list[tuple[str, list[list[int]]]]:
    """Return ways to group terms into equal parts, the most interleaved sums first."""
    count = len(members)
    parts = [k for k in range(count // 2, 1, -1) if count % k == 0]
    groupings = [(f"{k} interleaved sums", [members[r::k] for r in range(k)]) for k in parts]
    sizes = [size for size in range(count // 2, 1, -1) if count % size == 0]
    blocks = [(f"blocks of {size}", [members[i : i + size] for i in range(0, count, size)]) for size in sizes]
    return [*groupings, *blocks]


def _partial_sums(tree: Tree) -> set[frozenset[int]]:
    if isinstance(tree, int):
        return {frozenset([tree])}
    return {frozenset(leaves(tree))}.union(*(_partial_sums(child) for child in tree))


def _part(tree: Tree, members: frozenset[int]) -> Tree:
    """Return the partial sum of some terms, which is one."""
    if isinstance(tree, tuple) and frozenset(leaves(tree)) != members:
        return _part(next(child for child in tree if members <= frozenset(leaves(child))), members)
    return tree


def _merged(tree: Tree, groups: list[frozenset[int]]) -> Tree:
    """Return the tree with each group as one term."""
    members = frozenset(leaves(tree))
    for index, group in enumerate(groups):
        if members == group:
            return index
    assert isinstance(tree, tuple)
    return tuple(_merged(child, groups) for child in tree)


def _renamed(tree: Tree) -> Tree:
    """Return the tree with its terms counted from 0."""
    place = {leaf: index for index, leaf in enumerate(leaves(tree))}

    def renamed(part: Tree) -> Tree:
        return place[part] if isinstance(part, int) else tuple(renamed(child) for child in part)

    return renamed(tree)


def _depth(tree: Tree) -> int:
    return 0 if isinstance(tree, int) else 1 + max(_depth(child) for child in tree)
