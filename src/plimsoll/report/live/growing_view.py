"""`LiveView`: a view that follows a run in progress, reading only additions."""

from collections.abc import Mapping
from functools import cached_property

from plimsoll.diagnosis import View
from plimsoll.diagnosis.estimates.format_losses import FormatLosses
from plimsoll.diagnosis.tables.cells import Cells, from_table
from plimsoll.diagnosis.tables.growing_cells import before, joined, size_bytes
from plimsoll.diagnosis.what_if.answer import predictor_bytes
from plimsoll.diagnosis.what_if.block_formats import size_bytes as block_bytes
from plimsoll.runs import Run
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage.parts import Part

ALL = -(1 << 62)  # from this step on everything may have changed
_COMPUTED = [name for name, member in vars(View).items() if isinstance(member, cached_property)]


class LiveView(View):
    """A view of all of a run, brought up to date by `follow`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._state = _state_of(self._catalog)

    @property
    def _catalog(self) -> RunFolder:
        return self.run._folder  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    @property
    def size_bytes(self) -> int:
        """The memory of what is kept."""
        narrow = list(self._narrow.values())
        beside = sum(getattr(value, "nbytes", 0) for each in narrow for value in vars(each).values())
        beside += sum(predictor_bytes(each) for each in narrow)
        beside += sum(block_bytes(each) for each in self._blocks.values() if each is not None)
        return beside + sum(size_bytes(cells) for cells in self._cells.values() if cells is not None)

    def copied(self) -> "LiveView":
        """Return another view of the run as it is now, with shared data that was read."""
        copy = LiveView(Run(self.run.path, filesystem=self._catalog.place.filesystem, warn=False))
        copy._cells = {name: cells for name, cells in self._cells.items() if cells is not None}
        copy._narrow = dict(self._narrow)
        return copy

    def adopt(self, other: "LiveView") -> None:
        """Takes over what another view of the same state has read."""
        cells, narrow = other._read  # noqa: SLF001  (its own class)
        self._cells |= {name: value for name, value in cells.items() if name not in self._cells}
        self._narrow |= {name: value for name, value in narrow.items() if name not in self._narrow}

    @property
    def _read(self) -> tuple[dict[str, Cells | None], dict[str, FormatLosses]]:
        return self._cells, self._narrow

    def follow(self) -> None:
        """Looks for what was added, and brings what was read before up to date."""
        known = self._state
        self.run.refresh()
        self._state = _state_of(self._catalog)
        if self._state == known:
            return
        self._narrow.clear()
        self._blocks.clear()
        self._scalars.clear()
        for name in _COMPUTED:
            self.__dict__.pop(name, None)
        since = _since(known, self._state, self._catalog)
        for collection in list(self._cells):
            self._extend(collection, since)

    def _extend(self, collection: str, since: int | None) -> None:
        cells = self._cells[collection]
        if cells is None or since == ALL:
            del self._cells[collection]  # read again when it is asked for
        elif since is not None:
            order = self.run.tensors[collection]
            table = self.run.table(collection, steps=slice(since, None), blocks=False)
            earlier = before(cells, since)
            added = self.as_emulated(collection, from_table(collection, table, order) if len(table) else None)
            self._cells[collection] = earlier if added is None else joined(earlier, added, order)


def _state_of(catalog: RunFolder) -> dict[Part, int]:
    """The parts that count, and the last step of each that does."""
    return {part: catalog.visible_end(part) for part in catalog.parts}


# Parts never change, they are added and merged. So what changed since the last look follows from the parts' names: the
# lowest step that a new part holds. Cells below it stay, those from it on are read again. Where that is unknown (a part
# has gone, sessions replaced steps and were merged, rows were thinned, replicas of several ranks), all is read again.
def _since(known: Mapping[Part, int], now: Mapping[Part, int], catalog: RunFolder) -> int | None:
    """Return the lowest step that may have changed; None for none, `ALL` if unknown."""
    gone = [part for part in known if part.kind == "spectra" and part not in now]
    new = [part for part in now if part.kind == "spectra" and part not in known]
    if _may_be_replicas(catalog) and (gone or new):
        return ALL
    if gone and _rewritten_with_loss(catalog):
        return ALL
    merged = {part: [old for old in gone if old.rank == part.rank and part.covers(old)] for part in new}
    if len(gone) != sum(len(parts) for parts in merged.values()):
        return ALL
    starts = [part.min_step for part, of in merged.items() if sum(old.flushes for old in of) != part.flushes]
    starts += [
        min(end, now[part]) + 1
        for part, end in known.items()
        if part.kind == "spectra" and part in now and now[part] != end
    ]
    return min(starts, default=None)


def _may_be_replicas(catalog: RunFolder) -> bool:
    """Return whether ranks hold series that only all steps show as replicas or not."""
    tensors = [m.get("tensors", {}) for m in catalog.manifests.values()] if len(catalog.ranks) > 1 else []
    return any(not entry.get("shared") for each in tensors for names in each.values() for entry in names.values())


def _rewritten_with_loss(catalog: RunFolder) -> bool:
    """Return whether merging may have left out rows, replaced or thinned by age."""
    manifests = catalog.manifests.values()
    return any(m.get("thin") or any(s.get("from_step") is not None for s in m.get("sessions", [])) for m in manifests)
