"""What a sweep shows: each design at its best learning rate, pairs of ways to compute it, and bounds of their ratios.

Ways are compared as ratios of bits per character, design by design, so that what designs differ in cancels. The bound
of a mean ratio is Student's over designs, one-sided at 95 %, of its logarithm. A pair counts only where the way in FP32
that it is held against has learned: fewer bits than the frequencies of single characters give, without any context.
That is also the most that a training is counted with: one that diverged has learned nothing, however far it went.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from plimsoll_lab.experiments.unit_sweep.grid import FP32, Configuration, Design, Way, reference
from plimsoll_lab.source_text import SYMBOLS, standard_library
from plimsoll_lab.statistics import Ratio, ratio

Found = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A design in two ways: bits per character of the one, and of the other that it is held against."""

    design: Design
    bits: float
    against: float

    @property
    def ratio(self) -> float:
        """Below 1 the first is better."""
        return self.bits / self.against


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Bits per character of held-out text, by design, way and the place of the learning rate; Inf for no number.

    `chance`: the bits of a text whose characters are drawn by their frequency alone.
    """

    bits: Mapping[tuple[Design, Way], Mapping[int, float]]
    chance: float

    def best(self, design: Design, way: Way) -> float:
        """The fewest bits of all learning rates."""
        return min(self.bits[design, way].values())

    def best_rate(self, design: Design, way: Way) -> int:
        """The place of the learning rate with the fewest bits; the lowest of those that are alike."""
        row = self.bits[design, way]
        return min(row, key=lambda place: (row[place], place))

    def pairs(self, way: Way, against: Way) -> tuple[Pair, ...]:
        """Each design in one way and in another, in FP32, each at its own best learning rate."""
        return tuple(
            Pair(design=design, bits=self._counted(self.best(design, way)), against=self.best(other, against))
            for design, other in self._both(way, against)
        )

    def pairs_at_same(self, way: Way, against: Way) -> tuple[Pair, ...]:
        """Likewise, both at the learning rate that is best for the other: what comes of changing nothing else."""
        return tuple(
            Pair(
                design=design, bits=self._counted(self.bits[design, way][self.best_rate(design, against)]),
                against=self.best(design, against),
            )
            for design, other in self._both(way, against)
            if other == design
        )  # fmt: skip

    def learned(self, design: Design, way: Way) -> bool:
        """Whether its best is better than what needs no context."""
        return self.best(design, way) < self.chance

    def _counted(self, bits: float) -> float:
        return min(bits, self.chance)

    def _both(self, way: Way, against: Way) -> list[tuple[Design, Design]]:
        """Designs that were trained in the one way, and their counterparts in the other, which have learned."""
        scaled = way.scaling == "unit" and against.scaling != "unit"
        both = [(design, reference(design) if scaled else design) for design, other in self.bits if other == way]
        return [pair for pair in both if (pair[1], against) in self.bits and self.learned(pair[1], against)]


def scores(configurations: Collection[Configuration], found: Found) -> Scores:
    """The results of a sweep, whose ledger has found so much."""
    bits: dict[tuple[Design, Way], dict[int, float]] = {}
    for each in configurations:
        value = found[each.name]["bits"]
        bits.setdefault((each.design, each.way), {})[each.rate] = value if math.isfinite(value) else math.inf
    return Scores(bits=bits, chance=chance())


def mean(pairs: Collection[Pair]) -> Ratio:
    """The mean ratio over designs and its bounds; NaN for no pairs."""
    if not pairs:
        return Ratio(mean=math.nan, low=math.nan, high=math.nan)
    return ratio(np.array([pair.bits for pair in pairs]), np.array([pair.against for pair in pairs]))


def share(pairs: Collection[Pair], *, at_least: float = 0.0, at_most: float = math.inf) -> float:
    """Of the pairs, the part whose ratio lies within; NaN for no pairs."""
    if not pairs:
        return math.nan
    return sum(at_least <= pair.ratio <= at_most for pair in pairs) / len(pairs)


def unlearned(found: Scores) -> tuple[Design, ...]:
    """The unscaled designs that have learned nothing even in FP32, and so count in no pair."""
    return tuple(design for design, way in found.bits if way == FP32 and not found.learned(design, way))


@cache
def chance() -> float:
    """Bits per character of the held-out text, by the frequencies of characters in what is trained on."""
    text = standard_library()
    counts = torch.bincount(text.trained.long(), minlength=SYMBOLS).double() + 1.0
    return float(-(counts / counts.sum()).log2()[text.held_out.long()].mean())
