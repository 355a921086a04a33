"""What the manifest of a closed run says about its plain series: counted once, or added up over ranks."""

import time
from pathlib import Path

from plimsoll.runs.reading import spectra
from plimsoll.runs.reading.catalog import Catalog
from plimsoll.runs.reading.contents import RunContents
from plimsoll.runs.storage import manifest as _manifest

_SECONDS = 10.0  # a training that has ended is not kept waiting longer: readers decide for themselves anyway

Choices = dict[str, dict[str, list[str]]]


def decided(path: Path) -> Choices | None:
    """The plain series by how their ranks merge; None where ranks are missing or behind, or it takes too long."""
    catalog = Catalog(path, warn=False)
    content = RunContents(catalog)
    if not _all_there(catalog):
        return None
    plain: dict[str, list[str]] = {}
    for manifest in catalog.manifests.values():
        for series in _manifest.series_of(manifest):
            if not series.shared and series.name not in plain.setdefault(series.collection, []):
                plain[series.collection].append(series.name)
    deadline = time.monotonic() + _SECONDS
    for _ in spectra.choices(catalog, content, list(plain.items())):
        if time.monotonic() > deadline:
            return None
    result: Choices = {"counted_once": {}, "summed": {}}
    for (collection, name), replicas in sorted(content.replicas.items()):
        result["counted_once" if replicas else "summed"].setdefault(collection, []).append(name)
    return result


def _all_there(catalog: Catalog) -> bool:
    """Whether every rank has got as far as rank 0."""
    ends = dict.fromkeys(range(catalog.world_size), -1)
    for part in catalog.of("spectra"):
        if part.rank in ends:
            ends[part.rank] = max(ends[part.rank], catalog.visible_end(part))
    return min(ends.values()) >= ends[0] >= 0
