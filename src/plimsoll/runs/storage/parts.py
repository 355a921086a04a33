"""A run's parts: their names, which of them count, and which merge next.

A part's name says all that a reader must know before it opens one: the rank, the numbers of the first and the last
flush that it holds, how often it was rewritten, and its lowest and highest step. A part counts unless another one
*covers* it: holds all its flushes, or the same ones rewritten once more. So a compacted part replaces its inputs at the
moment when it is renamed, and a crash before they are deleted neither loses nor doubles a row.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from plimsoll.errors import RunError
from plimsoll.runs.columns.schema import KINDS, Kind
from plimsoll.runs.storage.limits import RANGES
from plimsoll.runs.storage.location import StorageLocation

_NAME = re.compile(r"r(\d+)-(\d+)-(\d+)-g(\d+)-s(-?\d+)_(-?\d+)\.parquet")
FAN_IN = 16  # parts that one compaction takes, and the factor between tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One Parquet file of a run, in the folder of its kind."""

    kind: Kind
    rank: int
    first: int
    last: int
    generation: int
    min_step: int
    max_step: int
    rows: int | None = field(default=None, compare=False)  # as the manifest has them; None where it does not

    @property
    def name(self) -> str:
        """The path within the run's folder."""
        flushes = f"{self.first:010d}-{self.last:010d}"
        steps = f"s{self.min_step}_{self.max_step}"
        return f"{self.kind}/r{self.rank:05d}-{flushes}-g{self.generation}-{steps}.parquet"

    @property
    def flushes(self) -> int:
        """How many flushes it holds."""
        return self.last - self.first + 1

    def covers(self, other: "Part") -> bool:
        """Whether the other's rows are in this one too (both of one kind and rank)."""
        if (self.first, self.last) == (other.first, other.last):
            return self.generation > other.generation
        return self.first <= other.first and other.last <= self.last


def parse(kind: Kind, name: str) -> Part | None:
    """The part of that file name; None if it is not one."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    numbers = [int(group) for group in found.groups()]
    kinds = ("rank", "flush", "flush", "generation", "step", "step")
    if any(not RANGES[kind][0] <= number <= RANGES[kind][1] for kind, number in zip(kinds, numbers, strict=True)):
        return None
    rank, first, last, generation, low, high = numbers
    if first > last or low > high:
        return None
    return Part(kind=kind, rank=rank, first=first, last=last, generation=generation, min_step=low, max_step=high)


def of_name(name: str) -> Part | None:
    """The part of that path within a run's folder; None if it is not one."""
    kind, _, file = name.partition("/")
    return next((parse(known, file) for known in KINDS if known == kind), None)


def listed(place: StorageLocation, rank: int | None = None) -> tuple[list[Part], list[str], dict[Kind, str]]:
    """The parts of a run (of one rank), covered ones too, and the names of files beside them that are none.

    Last, the folders of parts that are there and cannot be listed, with the reason.
    """
    parts: list[Part] = []
    foreign: list[str] = []
    unlisted: dict[Kind, str] = {}
    for kind in KINDS:
        try:
            names = place.names(kind)
        except RunError:
            raise
        except OSError as error:
            unlisted[kind] = error.strerror or f"{error}"
            continue
        for name in names:
            part = parse(kind, name)
            if part is not None and (rank is None or part.rank == rank):
                parts.append(part)
            elif part is None and not name.startswith("."):
                foreign.append(f"{kind}/{name}")
    return parts, foreign, unlisted


def split(parts: Iterable[Part]) -> tuple[list[Part], list[Part]]:
    """The parts that count, oldest flush first within kind and rank; and those that others cover."""
    counting: list[Part] = []
    covered: list[Part] = []
    # Sorted so, a part comes after all that could cover it, and the last one kept reaches farthest.
    for part in sorted(parts, key=lambda p: (p.kind, p.rank, p.first, -p.last, -p.generation)):
        last = counting[-1] if counting else None
        is_covered = last is not None and (last.kind, last.rank) == (part.kind, part.rank) and last.covers(part)
        (covered if is_covered else counting).append(part)
    return counting, covered


def due(parts: Sequence[Part], above: int) -> Sequence[Part]:
    """Which neighbours among one kind's counting parts to merge next; none while there are no more than `above`.

    Tier t holds parts of FAN_IN**t flushes and more. The lowest tier with enough neighbours is merged, the oldest of it
    first, so a row is rewritten once a tier: n flushes cost O(n log n), and leave `above` parts or FAN_IN a tier.
    """
    if len(parts) <= above:
        return ()
    fan_in = max(2, min(FAN_IN, above // 4))
    for tier in range(max(_tier(p, fan_in) for p in parts) + 1):
        same = [_tier(p, fan_in) <= tier for p in parts]
        for start in range(len(parts) - fan_in + 1):
            if all(same[start : start + fan_in]):
                return parts[start : start + fan_in]
    return ()


def _tier(part: Part, fan_in: int) -> int:
    """The largest t with fan_in**t <= flushes."""
    tier, reach = 0, fan_in
    while reach <= part.flushes:
        tier, reach = tier + 1, reach * fan_in
    return tier
