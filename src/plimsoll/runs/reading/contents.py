"""What a run has: its steps and names, and which plain series are replicas. Remembered by part."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from plimsoll.runs.columns.arrow import pc, values_of
from plimsoll.runs.columns.schema import Kind
from plimsoll.runs.reading.catalog import Catalog
from plimsoll.runs.storage import manifest as _manifest, parquet
from plimsoll.runs.storage.limits import MOST_NAMES
from plimsoll.runs.storage.location import StorageLocation
from plimsoll.runs.storage.parts import Part

Names = frozenset[tuple[str, ...]]
_OWN = ("loss", "nonfinite", "scale")  # scalars that a watch records: they come first


class RunContents:
    """The contents of a catalog's parts."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._steps: dict[Part, NDArray[np.int64]] = {}
        self._words: dict[Part, Names] = {}
        self._lengths: dict[Part, frozenset[int]] = {}
        self._tensors: Mapping[str, tuple[str, ...]] | None = None
        self.is_whole = True  # whether `tensors` has all series
        self.replicas: dict[tuple[str, str], bool] = {}

    def refresh(self) -> None:
        """Forgets what may have changed: parts never do, what is made of several of them may."""
        counting = set(self._catalog.parts)
        self._steps = {part: found for part, found in self._steps.items() if part in counting}
        self._words = {part: found for part, found in self._words.items() if part in counting}
        self._lengths = {part: found for part, found in self._lengths.items() if part in counting}
        self._tensors = None
        self.replicas = {}

    def steps(self, kind: Kind = "spectra") -> NDArray[np.int64]:
        """All steps with records of a kind, ascending."""
        found = self._catalog.read(lambda: self._catalog.of(kind), self._steps_in)
        visible = [steps[steps <= self._catalog.visible_end(part)] for part, steps in found]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *visible]))

    def _steps_in(self, place: StorageLocation, part: Part) -> NDArray[np.int64]:
        if part not in self._steps:
            column = parquet.read(parquet.opened(place, part), part, ["step"])["step"]
            self._steps[part] = values_of(pc.unique(column))
        return self._steps[part]

    def tensors(self) -> Mapping[str, tuple[str, ...]]:
        """The names by collection, in the order in which they were registered; by the parts where a manifest lacks."""
        if self._tensors is None:
            found: dict[str, dict[str, None]] = {}
            for _, manifest in sorted(self._catalog.manifests.items()):
                for series in _manifest.series_of(manifest):
                    found.setdefault(series.collection, {})[series.name] = None
            for collection, name in self._unlisted():
                found.setdefault(collection, {})[name] = None
            self._tensors = {c: self._first(f"series of {c}", tuple(names)) for c, names in found.items()}
            self.is_whole = all(len(names) == len(self._tensors[c]) for c, names in found.items())
        return self._tensors

    def _unlisted(self) -> list[tuple[str, ...]]:
        """The names in parts of ranks whose manifest cannot be read."""

        def parts() -> list[Part]:
            return [p for p in self._catalog.of("spectra") if p.rank not in self._catalog.manifests]

        return sorted({key for _, keys in self._catalog.read(parts, self._words_in) for key in keys})

    def scalar_names(self) -> tuple[str, ...]:
        """The names of scalars, sorted."""
        found = self._catalog.read(lambda: self._catalog.of("scalars"), self._words_in)
        names = {key[0] for _, keys in found for key in keys}
        return tuple(sorted(self._first("scalars", tuple(sorted(names, key=lambda n: (n not in _OWN, n))))))

    def _first(self, what: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """As many of the names as are read."""
        if len(names) > MOST_NAMES:
            self._catalog.leave_out(what, len(names), MOST_NAMES)
            names = names[:MOST_NAMES]
        return names

    def block_lengths(self) -> tuple[int, ...]:
        """The lengths of the blocks that records are of, ascending."""
        found = self._catalog.read(lambda: self._catalog.of("spectra"), self._lengths_in)
        return tuple(sorted({length for _, lengths in found for length in lengths}))

    def _lengths_in(self, place: StorageLocation, part: Part) -> frozenset[int]:
        if part not in self._lengths:
            file, found = parquet.opened(place, part), list[int | None]()
            if "block" in file.schema_arrow.names:
                found = pc.unique(parquet.read(file, part, ["block"])["block"]).to_pylist()
            self._lengths[part] = frozenset(length for length in found if length is not None)
        return self._lengths[part]

    def _words_in(self, place: StorageLocation, part: Part) -> Names:
        if part not in self._words:
            columns = ["collection", "name"] if part.kind == "spectra" else ["name"]
            file = parquet.opened(place, part, parquet.WORDS[part.kind])
            table = parquet.read(file, part, columns)
            distinct = table.group_by(columns).aggregate([])
            self._words[part] = frozenset(zip(*(distinct[c].to_pylist() for c in columns), strict=True))
        return self._words[part]
