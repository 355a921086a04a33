"""Steps that some rank did not get to, whose sums are of the other ranks alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plimsoll.runs.reading.ending import gone_writers, is_here

if TYPE_CHECKING:
    from plimsoll.runs.reading.catalog import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A rank whose records end before those of others."""

    rank: int
    last_step: int  # -1 for none
    of: int
    lost: bool  # it was killed, rather than having ended

    def __str__(self) -> str:
        ended = "was lost" if self.lost else "ended"
        after = "before its first record" if self.last_step < 0 else f"after step {self.last_step}"
        return (
            f"rank {self.rank}: {ended} {after}, and other ranks went on to step {self.of}; "
            "from there on sums are of the others alone"
        )


def short_ranks(catalog: "Catalog") -> list[Short]:
    """Return the ranks that others have outrun, but for those that may be writing still."""
    if catalog.world_size == 1:
        return []
    spectra, scalars = ({rank: _end(catalog, kind, rank) for rank in catalog.ranks} for kind in ("spectra", "scalars"))
    last = max(spectra.values(), default=-1)
    found: list[Short] = []
    for rank, manifest in sorted(catalog.manifests.items()):
        if rank >= catalog.world_size:  # a restart has left it behind
            continue
        # Rank 0 writes spectra at each sampled step. Others may have none of their own, but they have numbers.
        end = spectra[rank] if rank == 0 else max(spectra[rank], scalars[rank])
        lost: int | None = manifest.get("lost_after")  # as rank 0 has noted
        if lost is not None:
            end = min(end, lost)
        settings: dict[str, Any] = manifest.get("settings") or {}
        numbers = settings.get("recorder", ("loss",))
        if end >= last or (end < 0 and rank and not numbers):
            continue
        is_lost = lost is not None or not manifest.get("closed")
        if manifest.get("closed") or (is_lost and _has_ended(catalog, rank)):
            found.append(Short(rank=rank, last_step=end, of=last, lost=is_lost))
    return found


def _end(catalog: "Catalog", kind: Any, rank: int) -> int:
    return max((catalog.visible_end(part) for part in catalog.of(kind) if part.rank == rank), default=-1)


def _has_ended(catalog: "Catalog", rank: int) -> bool:
    """Whether a rank that has not closed writes no more: its process is gone, or cannot be asked and others closed."""
    manifest = catalog.manifests[rank]
    if gone_writers([manifest]):
        return True
    others = (other.get("closed") for number, other in catalog.manifests.items() if number != rank)
    return not is_here(manifest) and any(others)
