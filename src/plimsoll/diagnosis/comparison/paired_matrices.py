"""Matrices of two runs for one collection, and the steps that are not compared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll import row_layout
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.view import View
from plimsoll.tensor_collections import OF_MODULES

# -- common layers and steps, and distances ----------------------------------------------------------------------------

_NOISE = 4.0  # units of rounding, of the largest tensor around: what is smaller may be rounding noise


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """Numbers of one run, layers by steps. NaN where it has none."""

    count: Floats
    rms: Floats
    absmean: Floats
    mean: Floats
    zeros: Floats
    nonfinite: Floats

    @classmethod
    def of(cls, cells: Cells, layers: Ints, places: Ints) -> "Side":
        """Return the numbers of these layers at these steps, scales undone."""
        chosen = np.ix_(layers, places)
        return cls(
            count=cells.total_of("count")[chosen],
            rms=cells.rms[chosen],
            absmean=cells.absmean[chosen],
            mean=cells.mean[chosen],
            zeros=cells.zero_fraction[chosen],
            nonfinite=cells.nonfinite[chosen],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One collection of both runs, in the layers and steps that both have.

    Layers are in the order in which run A computed them.
    """

    collection: str
    names: tuple[str, ...]
    owners: Ints  # the parameter or module of each name, as a number that all pairs share
    steps: Ints
    a: Side
    b: Side
    raw: Floats  # distance of a layer's statistics, relative to its own size
    # The same relative to the largest tensor of its group: its module, or the module around that. Where a layer is only
    # rounding noise, such as the gradient of a key's bias, only this one is meaningful.
    apart: Floats
    # Share of values that are only noise, in either run; Adam makes updates of them that are as large as any.
    chance: Floats

    @classmethod
    def of(cls, collection: str, views: tuple[View, View], owners: dict[str, int], rounding: float) -> "Pair | None":
        """Return the pair. None if the runs have nothing of it in common."""
        cells = [view.cells(collection) for view in views]
        if cells[0] is None or cells[1] is None:
            return None
        first, other = cells[0], cells[1]
        theirs = {name: i for i, name in enumerate(other.names)}
        names = tuple(name for name in first.names if name in theirs)
        steps, at_one, at_other = np.intersect1d(first.steps, other.steps, return_indices=True)
        if not names or not len(steps):
            return None
        mine = {name: i for i, name in enumerate(first.names)}
        mine_of, theirs_of = np.array([mine[name] for name in names]), np.array([theirs[name] for name in names])
        a, b = Side.of(first, mine_of, at_one), Side.of(other, theirs_of, at_other)
        groups = _groups(collection, names)
        raw, apart = _distances(a, b, groups)
        floor = _NOISE * rounding * few(a.count) * _largest(np.fmax(a.rms, b.rms), groups)
        small = (_small(first, mine_of, at_one, floor), _small(other, theirs_of, at_other, floor))
        numbers = np.array([owners.setdefault(_owner(collection, name), len(owners)) for name in names])
        return cls(
            collection=collection, names=names, owners=numbers, steps=steps, a=a, b=b, raw=raw, apart=apart,
            chance=np.fmax(*small),
        )  # fmt: skip


def _distances(a: Side, b: Side, groups: Ints) -> tuple[Floats, Floats]:
    """Return distances relative to own size and the group's. NaN: no finite values."""
    with np.errstate(all="ignore"):
        size = np.fmax(a.rms, b.rms)
        gaps = (np.abs(getattr(a, n) - getattr(b, n)) for n in ("rms", "absmean", "mean"))
        gap = np.maximum.reduce(list(gaps))  # NaN stays NaN
        return _ratio(gap, size), _ratio(gap, _largest(size, groups))


def few(count: Floats) -> Floats:
    """Return how much more rounding weighs in statistics of few values.

    >>> few(np.array([1.0, 16.0, 1e6])).round(2).tolist()
    [9.0, 3.0, 1.01]
    """
    # Errors of few values do not cancel.
    return 1.0 + 8.0 / np.sqrt(np.maximum(count, 1.0))


def _largest(size: Floats, groups: Ints) -> Floats:
    """Return for each layer the size of the largest layer of its group."""
    largest = np.zeros((int(groups.max(initial=0)) + 1, size.shape[1]))
    np.maximum.at(largest, groups, np.nan_to_num(size))
    return largest[groups]


def _small(cells: Cells, layers: Ints, places: Ints, limit: Floats) -> Floats:
    """Return the share of nonzero values below a limit's binade, by cell."""
    whole = np.zeros(cells.shape)
    whole[np.ix_(layers, places)] = limit
    of_row = whole[cells.layer, cells.at] * cells.scale
    with np.errstate(all="ignore"):
        binade = np.where(of_row > 0, np.floor(np.log2(of_row)), row_layout.LOWEST_BINADE).astype(np.int64)
    below = cells.below_binade(binade)
    with np.errstate(all="ignore"):
        return (cells.total(below) / cells.total_of("count"))[np.ix_(layers, places)]


def _ratio(gap: Floats, size: Floats) -> Floats:
    return np.where(gap == 0, 0.0, gap / size)


def _groups(collection: str, names: Sequence[str]) -> Ints:
    """Return the number of each name's group: the module around its module, or at the top the module itself."""
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(_group(collection, name), len(numbers)) for name in names]
    return np.array(places, dtype=np.int64)


def _group(collection: str, name: str) -> str:
    owner = _owner(collection, name)
    module = owner if _of_modules(collection) else owner.rpartition(".")[0] or owner
    return module.rpartition(".")[0] or module


def _owner(collection: str, name: str) -> str:
    """Return the module of an input or output, or the parameter of other series."""
    return name.rpartition(":")[0] if _of_modules(collection) else name.split(":", maxsplit=1)[0]


def _of_modules(collection: str) -> bool:
    return collection in OF_MODULES


# -- search for a loss scale at a training's start: skipped steps are no fault -----------------------------------------

# A scaler starts high on purpose (GradScaler at 2^16) and halves the scale at each overflow until the gradients fit.

_CLEAN = 10  # steps without a skip, after which the search has ended


def searching(view: View, first: int) -> set[int]:
    """Return the steps that the search for a scale skipped, from step `first` on."""
    skips = sorted(event.step for event in view.events if event.kind == "skip")
    skipped = _chain(skips, first)
    # The search ends with ten clean steps. A run that never has so many, or whose scale did not fall, did not search:
    # its scale is too high. It has no such steps.
    if not skipped or view.last_step - skipped[-1] < _CLEAN:
        return set()
    before, after = view.scale_at(np.array([skipped[0], skipped[-1] + _CLEAN])).tolist()
    return set(skipped) if after < before else set()


def sentences(searches: tuple[set[int], set[int]]) -> Iterator[str]:
    """Return a sentence for each run that skipped steps which the other one took.

    >>> print(*sentences(({0}, {0, 1, 2})))
    B skipped 2 steps that A took (1 to 2) while its scaler searched for a loss scale: these are not compared.
    """
    for which, other, alone in (("A", "B", searches[0] - searches[1]), ("B", "A", searches[1] - searches[0])):
        if alone:
            steps = f"{len(alone)} step{'s' * (len(alone) > 1)}"
            span = f"{min(alone):,} to {max(alone):,}" if len(alone) > 1 else f"step {min(alone):,}"
            yield (
                f"{which} skipped {steps} that {other} took ({span}) while its scaler searched for a loss scale: "
                "these are not compared."
            )


def _chain(skips: Iterable[int], first: int) -> list[int]:
    """Return the skips up to the first range of clean steps.

    >>> _chain([0, 1, 4, 30], 0)
    [0, 1, 4]
    >>> _chain([10], 0)
    []
    """
    chain, clean_since = list[int](), first
    for step in skips:
        if step - clean_since >= _CLEAN:
            break
        chain.append(step)
        clean_since = step + 1
    return chain
