"""Parts of a run: their names, which of them are valid, and which to merge next.

The name of a part contains all that a reader must know before opening it: the rank, the numbers of the first and the
last flush in it, how often it was rewritten, and its lowest and highest step. A part is valid unless another part
*covers* it: one that has all its flushes, or the same flushes rewritten once more. So a compacted part replaces its
inputs at the moment it is renamed, and a crash before they are deleted neither loses nor doubles a row.
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
        """Number of flushes in it."""
        return self.last - self.first + 1

    def covers(self, other: "Part") -> bool:
        """Return whether this part has the other's rows too. Both have one kind and rank."""
        if (self.first, self.last) == (other.first, other.last):
            return self.generation > other.generation
        return self.first <= other.first and other.last <= self.last


def parse(kind: Kind, name: str) -> Part | None:
    """Return the part of a file name, or None."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    numbers = [int(group) for group in match.groups()]
    kinds = ("rank", "flush", "flush", "generation", "step", "step")
    if any(not RANGES[kind][0] <= number <= RANGES[kind][1] for kind, number in zip(kinds, numbers, strict=True)):
        return None
    rank, first, last, generation, low, high = numbers
    if first > last or low > high:
        return None
    return Part(kind=kind, rank=rank, first=first, last=last, generation=generation, min_step=low, max_step=high)


def of_name(name: str) -> Part | None:
    """Return the part of a path within a run's folder, or None."""
    kind, _, file = name.partition("/")
    return next((parse(known, file) for known in KINDS if known == kind), None)


def listed(place: StorageLocation, rank: int | None = None) -> tuple[list[Part], list[str], dict[Kind, str]]:
    """Return a run's parts, covered ones too, other files' names, unlistable folders.

    Parts are those of the rank, or of all.
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
    """Return the valid parts, oldest first within kind and rank, and the covered ones."""
    counting: list[Part] = []
    covered: list[Part] = []
    # Sorted so, a part comes after all that could cover it, and the last one kept reaches farthest.
    for part in sorted(parts, key=lambda p: (p.kind, p.rank, p.first, -p.last, -p.generation)):
        last = counting[-1] if counting else None
        is_covered = last is not None and (last.kind, last.rank) == (part.kind, part.rank) and last.covers(part)
        (covered if is_covered else counting).append(part)
    return counting, covered


def due(parts: Sequence[Part], above: int) -> Sequence[Part]:
    """Return which adjacent parts of one kind to merge next.

    They are valid ones, oldest first. Nothing is merged of up to `above` parts.
    """
    if len(parts) <= above:
        return ()
    # Tier t has parts of FAN_IN**t flushes and more. The lowest tier with enough neighbours is merged, its oldest parts
    # first, so a row is rewritten once per tier: n flushes cost O(n log n), and leave `above` parts or FAN_IN per tier.
    fan_in = max(2, min(FAN_IN, above // 4))
    for tier in range(max(_tier(p, fan_in) for p in parts) + 1):
        same = [_tier(p, fan_in) <= tier for p in parts]
        for start in range(len(parts) - fan_in + 1):
            if all(same[start : start + fan_in]):
                return parts[start : start + fan_in]
    return ()


def _tier(part: Part, fan_in: int) -> int:
    """Return the largest t with fan_in**t <= flushes."""
    tier, reach = 0, fan_in
    while reach <= part.flushes:
        tier, reach = tier + 1, reach * fan_in
    return tier
