"""Measurements of one step: rows of banks, and the series of each row.

Rows are taken one after the other from banks of `BANK_ROWS` rows, one list of banks a device. Each measurement gets a
row of its own, so that two taps which see one tensor share the row, and a module called twice has two: what belongs to
one series is added up when the sample is written. Where modules are called hundreds of times a step (a recurrent cell,
an optimizer's closure) it is added up before, whenever a bank is full: rows of the same series become one, and the
others are taken again. Banks go back to a pool and are used again.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from plimsoll import kernels, row_layout
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.runs import Batch
from plimsoll.runs.records import ERRORS
from plimsoll.spectrum.error_sums import POWERS
from plimsoll.watch.tap_queue import Tap, TapQueue, Trials, is_capturing

BANK_ROWS = 1024
ERROR_COLUMNS = (*ERRORS, "underflowed", "structural")  # of a row of errors
ERROR_POWERS = np.array([POWERS.get(name, 0) for name in ERROR_COLUMNS], np.float64)
_MOVES = 3  # pushed, unmoved, sum of squares of the old weights: what `kernels.update_into` counts beside a row


class Pool:
    """Banks that no sample uses now. With a block length their rows are wider."""

    def __init__(self, block: int = 0) -> None:
        self.block, self.row_bytes = block, 8 * row_layout.width(block)
        self.trials = Trials()
        self._free: dict[torch.device, list[Tensor]] = defaultdict(list)

    def take(self, device: torch.device) -> Tensor:
        """Return a bank on the device. Its contents are undefined: measuring clears rows."""
        try:
            return self._free[device].pop()
        except IndexError:
            return kernels.new_bank(BANK_ROWS, self.block, device)

    def give_back(self, banks: Sequence[Tensor]) -> None:
        """Takes banks back; a few are kept."""
        for bank in banks:
            if len(self._free[bank.device]) < 8:
                self._free[bank.device].append(bank)


class EntryErrors(NamedTuple):
    """Errors of an entry's values: a row in a table that is copied to the host."""

    entry: int
    table: DeviceValue
    row: int
    carries_scale: bool  # the loss scale, whether or not the values do still


class Rows:
    """Rows of one device, and the entries that assign them to series."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        self.device, self._pool = device, pool
        self.banks: list[Tensor] = [pool.take(device)]
        self.measure_one = kernels.measurer(self.banks[0])
        self.queue = TapQueue(device, pool.trials) if kernels.queues(self.banks[0]) else None
        self.next = 0  # row of the last bank to be taken next
        self.index: list[int] = []
        self.series: list[int] = []
        self.scaled: list[int] = []  # entries whose values carry the loss scale
        self.unless_empty: list[int] = []  # entries that are none if nothing was counted
        self.factors: dict[int, float] = {}  # entries whose values carry another factor
        self.moves: dict[int, Tensor] = {}  # by bank, of updates
        self.updates: list[int] = []  # entries that are updates
        self.errors: list[EntryErrors] = []
        self.last_bins: dict[int, tuple[DeviceValue, int]] = {}  # of an entry: its count, by place in a tensor
        self.folds = 0  # how often rows were added up: numbers of rows from before may be of others since
        self._distinct: set[int] = set()  # series
        self._free: list[int] = []  # rows that were added to others

    @property
    def used(self) -> int:
        """Rows taken so far, with those that `adopt` left free in the banks before."""
        return (len(self.banks) - 1) * BANK_ROWS + self.next

    @property
    def held(self) -> int:
        """Number of rows that contain something."""
        return self.used - len(self._free)

    @property
    def repeats(self) -> int:
        """Number of entries beyond the first of each series."""
        return len(self.index) - len(self._distinct)

    def take(self) -> tuple[Tensor, int, int]:
        """A fresh row: its bank, its number there, and its number among all rows."""
        if self.next == BANK_ROWS and not self._free and self.repeats >= BANK_ROWS // 2:
            self.fold()
        if self._free:
            number = self._free.pop()
            return self.banks[number // BANK_ROWS], number % BANK_ROWS, number
        if self.next == BANK_ROWS:
            self._grow()
        row = self.next
        self.next += 1
        return self.banks[-1], row, self.used - 1

    def row(self, number: int) -> Tensor:
        """A row by its number."""
        return self.banks[number // BANK_ROWS][number % BANK_ROWS]

    def enqueue(self, x: Tensor, number: int, tap: Tap) -> bool:
        """Let a plain tensor wait for its row; return False if it must be measured at once."""
        queue = self.queue
        if queue is None or not queue.takes(x, tap):
            return False
        if not queue.has_room(x):
            self.flush()
            if not queue.takes(x, tap) or not queue.has_room(x):
                return False
        return queue.add(x, number, tap)

    def flush(self) -> None:
        """Measure what waits; entries of what was changed meanwhile are dropped."""
        if not self.queue or is_capturing(self.device):  # a captured launch would run later
            return
        waiting = self.queue.release()
        lost = [each.row for each in waiting if not each.on_trial]
        try:
            lost = self.queue.measure(waiting, self.banks, self._pool.block)
        finally:
            if lost:
                rows = set(lost)
                self._forget({entry for entry, row in enumerate(self.index) if row in rows})
                self._free.extend(rows)
                self.folds += 1  # taps that see such a tensor again measure it again

    def fold(self) -> bool:
        """Adds up the rows whose entries are of the same series; whether there were any."""
        self.flush()
        if self.queue:  # a CUDA graph is captured
            return False
        entries: dict[int, list[int]] = defaultdict(list)
        for entry, row in enumerate(self.index):
            entries[row].append(entry)
        # What stands outside of the row cannot be added up.
        apart = {*self.updates, *self.last_bins, *(errors.entry for errors in self.errors)}
        scaled, empty = set(self.scaled), set(self.unless_empty)
        first: dict[object, int] = {}
        merged: dict[int, int] = {}  # row -> the row that it is added to
        for row, mine in entries.items():
            if apart.isdisjoint(mine):
                # In a tuple, since a row may be entered twice for one series: it then counts twice.
                key = tuple(
                    sorted((self.series[e], e in scaled, e in empty, self.factors.get(e, 1.0)) for e in mine)
                )  # fmt: skip
                target = first.setdefault(key, row)
                if target != row:
                    merged[row] = target
        if not merged:
            return False
        self._add_up(merged)
        self._forget({entry for row in merged for entry in entries[row]})
        self._free.extend(merged)
        self.folds += 1
        return True

    def drop(self, series: set[int]) -> None:
        """Forgets what was measured of these series, each of which has rows of its own."""
        self.flush()
        dropped = {entry for entry, number in enumerate(self.series) if number in series}
        if dropped:
            self._free.extend({self.index[entry] for entry in dropped})
            self._forget(dropped)

    def _add_up(self, merged: dict[int, int]) -> None:
        by_bank: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, target in merged.items():
            by_bank[target // BANK_ROWS].append((row, target % BANK_ROWS))
        for position, pairs in by_bank.items():
            rows = torch.stack([self.row(row) for row, _ in pairs])
            kernels.add_rows(self.banks[position], [target for _, target in pairs], rows)

    def _forget(self, dropped: set[int]) -> None:
        remaining = [entry for entry in range(len(self.index)) if entry not in dropped]
        number = {entry: position for position, entry in enumerate(remaining)}
        self.index, self.series = [self.index[e] for e in remaining], [self.series[e] for e in remaining]
        self.scaled = [number[e] for e in self.scaled if e in number]
        self.unless_empty = [number[e] for e in self.unless_empty if e in number]
        self.factors = {number[e]: factor for e, factor in self.factors.items() if e in number}
        self._distinct = set(self.series)
        self.updates = [number[e] for e in self.updates if e in number]
        self.last_bins = {number[e]: place for e, place in self.last_bins.items() if e in number}
        self.errors = [errors._replace(entry=number[errors.entry]) for errors in self.errors if errors.entry in number]

    def spans(self, count: int) -> Iterator[tuple[int, int, Tensor, range]]:
        """Yield fresh rows in pieces: (first tensor, its row's number, bank, rows in it)."""
        done = 0
        while done < count:
            if self.next == BANK_ROWS:
                self._grow()
            taken = min(count - done, BANK_ROWS - self.next)
            yield done, self.used, self.banks[-1], range(self.next, self.next + taken)
            self.next += taken
            done += taken

    def adopt(self, counted: Tensor) -> int:
        """Copy rows that were counted elsewhere; return the number of the first."""
        position = len(self.banks)
        for start in range(0, len(counted), BANK_ROWS):
            self._grow()
            part = counted[start : start + BANK_ROWS]
            self.banks[-1][: len(part)].copy_(part)
        self.next = BANK_ROWS
        return position * BANK_ROWS

    def enter(
        self, row: int, series: int, *, scaled: bool = False, factor: float = 1.0, unless_empty: bool = False
    ) -> int:
        """Assign a row to a series; return the number of the entry."""
        entry = len(self.index)
        self.index.append(row)
        self.series.append(series)
        self._distinct.add(series)
        if scaled:
            self.scaled.append(entry)
        if unless_empty:
            self.unless_empty.append(entry)
        if factor != 1.0:
            self.factors[entry] = factor
        return entry

    def enter_all(
        self, first: int, series: Sequence[int], *, scaled: bool = False, last_bins: Tensor | None = None
    ) -> None:
        """Assign the rows from `first` on to these series, one each."""
        entry = len(self.index)
        if last_bins is not None:
            counts = DeviceValue(last_bins)
            self.last_bins.update({entry + place: (counts, place) for place in range(len(series))})
        self.index.extend(range(first, first + len(series)))
        self.series.extend(series)
        self._distinct.update(series)
        if scaled:
            self.scaled.extend(range(entry, entry + len(series)))

    def moves_of_bank(self) -> Tensor:
        """Return the counts beside the rows of updates in the last bank, int64[rows, 3]."""
        position = len(self.banks) - 1
        if position not in self.moves:
            self.moves[position] = torch.zeros((BANK_ROWS, _MOVES), dtype=torch.int64, device=self.device)
        return self.moves[position]

    def _grow(self) -> None:
        self.banks.append(self._pool.take(self.device))
        self.next = 0


class Sample:
    """The measurements of one step, on all its devices."""

    def __init__(self, step: int, pool: Pool) -> None:
        self.step = step
        self._pool = pool
        self._rows: dict[torch.device, Rows] = {}

    def rows(self, device: torch.device) -> Rows:
        """The rows on that device."""
        try:
            return self._rows[device]
        except KeyError:
            return self._rows.setdefault(device, Rows(device, self._pool))

    @property
    def entries(self) -> int:
        """Number of entries."""
        return sum([len(rows.index) for rows in self._rows.values()])

    @property
    def size_bytes(self) -> int:
        """About how much memory it holds."""
        return self._pool.row_bytes * sum([rows.held for rows in self._rows.values()])

    def fold(self) -> bool:
        """Add up rows of the same series where there are enough of them; return True if there were."""
        folded = [rows.fold() for rows in self._rows.values() if rows.repeats > len(rows.index) // 64]
        return any(folded)

    def flush(self) -> None:
        """Measure what waits on any device."""
        for rows in list(self._rows.values()):
            rows.flush()

    def drop_series(self, series: set[int]) -> None:
        """Drop all measurements of these series."""
        for rows in self._rows.values():
            rows.drop(series)

    def rescale(self, factor: float) -> None:
        """Multiply the factor of all scaled values so far."""
        for rows in self._rows.values():
            for entry in rows.scaled:
                rows.factors[entry] = rows.factors.get(entry, 1.0) * factor

    def sealed(self) -> "FinishedSample":
        """Return the finished sample, whose copy to the host has started."""
        self.flush()
        return FinishedSample(self.step, [_Part(rows, self._pool) for rows in self._rows.values()])

    def drop(self) -> None:
        """Return the banks to the pool without reading them."""
        self.release()
        for rows in self._rows.values():
            self._pool.give_back(rows.banks)

    def release(self) -> None:
        """Let what waits go unmeasured: nobody reads the sample."""
        for rows in self._rows.values():
            if rows.queue is not None:
                rows.queue.release()


class _Part:
    """One device's rows, complete, and copied or being copied to the host."""

    def __init__(self, rows: Rows, pool: Pool) -> None:
        self.rows, self._pool = rows, pool
        self.readers = 1
        self._host: NDArray[np.int64] | None = None
        self._guard = threading.Lock()
        self._copies: list[DeviceValue] | None = None
        self._moves = {position: DeviceValue(moves) for position, moves in rows.moves.items()}
        if rows.device.type != "cpu":
            self._copies = [DeviceValue(bank) for bank in rows.banks[:-1]] + [DeviceValue(rows.banks[-1][: rows.next])]
            pool.give_back(rows.banks)  # what the device does with them later comes after the copy

    @property
    def size_bytes(self) -> int:
        """About how much memory its rows take."""
        return self.rows.used * self._pool.row_bytes

    def host_rows(self) -> NDArray[np.int64]:
        """Take the rows, as the caller's own. To be called once by each reader: the last call releases the banks."""
        with self._guard:
            self.readers -= 1
            host = self._read() if self._host is None else self._host
            self._host = host if self.readers else None
            return host.copy() if self.readers else host

    def drop(self) -> None:
        """One reader less."""
        with self._guard:
            self.readers -= 1
            if not self.readers and self._host is None and self._copies is None:
                self._pool.give_back(self.rows.banks)

    def _read(self) -> NDArray[np.int64]:
        if self._copies is not None:
            return np.concatenate([copy.tensor().numpy() for copy in self._copies])
        banks, last = self.rows.banks, self.rows.next
        parts = [bank.numpy() for bank in banks[:-1]] + [banks[-1].numpy()[:last]]
        host: NDArray[np.int64] = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
        self._pool.give_back(banks)
        return host

    def blocks(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Of each entry the block length that its row was measured with, 0 for none."""
        if not self._pool.block:
            return None
        measured = rows[np.array(self.rows.index, np.int64), row_layout.BLOCKS] > 0  # a row is emptied whole before
        return np.where(measured, self._pool.block, 0)

    def scales(self, loss_scale: float | None) -> NDArray[np.float64] | None:
        """The factor that each entry's values carry."""
        if not self.rows.scaled and not self.rows.factors:
            return None
        scales = np.ones(len(self.rows.index))
        if loss_scale:
            scales[self.rows.scaled] = loss_scale
        for entry, factor in self.rows.factors.items():
            scales[entry] *= factor
        return scales

    def extras(self, loss_scale: float | None) -> dict[str, NDArray[np.float64]]:
        """Return the values that entries have beside their spectrum, by column."""
        columns: dict[str, NDArray[np.float64]] = {}

        def column(name: str) -> NDArray[np.float64]:
            if name not in columns:
                columns[name] = np.full(len(self.rows.index), np.nan)
            return columns[name]

        host = {position: moves.tensor().numpy() for position, moves in self._moves.items()}
        for entry in self.rows.updates:
            position, row = divmod(self.rows.index[entry], BANK_ROWS)
            words = host[position][row]
            column("pushed")[entry], column("unmoved")[entry] = words[0], words[1]
            column("weight_norm")[entry] = np.sqrt(words[2:3].view(np.float64)[0])
        for entry, (counts, place) in self.rows.last_bins.items():
            column("last_bin")[entry] = float(counts.tensor()[place])
        if self.rows.errors:
            columns |= self._errors(loss_scale)
        return columns

    def _errors(self, loss_scale: float | None) -> dict[str, NDArray[np.float64]]:
        """Return the columns of errors. All of one entry are added up."""
        merged = np.full((len(self.rows.index), row_layout.ERRORS), np.nan)
        scaled = set(self.rows.scaled)
        for entry, table, row, carries_scale in self.rows.errors:
            sums: NDArray[np.float64] = table.tensor()[row].numpy().copy()
            # Errors carry the loss scale where values do. A gradient that was unscaled since does not, and its errors
            # were taken before.
            if carries_scale and loss_scale and entry not in scaled:
                sums *= loss_scale**-ERROR_POWERS
            if np.isnan(merged[entry, 0]):
                merged[entry] = sums
            else:
                largest = max(merged[entry, row_layout.LARGEST_ERROR], sums[row_layout.LARGEST_ERROR])
                merged[entry] += sums
                merged[entry, row_layout.LARGEST_ERROR] = largest
        return {name: merged[:, place] for place, name in enumerate(ERROR_COLUMNS)}


class FinishedSample:
    """A complete sample, or its part for some series; read once, in the background."""

    def __init__(self, step: int, parts: list[_Part], takes: Callable[[int], bool] | None = None) -> None:
        self.step, self._parts, self._takes = step, parts, takes

    @property
    def size_bytes(self) -> int:
        """About how much memory it holds."""
        return sum(part.size_bytes for part in self._parts)

    def split(self, chooses: Callable[[int], bool]) -> "tuple[FinishedSample | None, FinishedSample | None]":
        """Return the entries of other series, and those of chosen series; None for none."""
        chosen = {series for part in self._parts for series in part.rows.series if chooses(series)}
        all_series = {series for part in self._parts for series in part.rows.series}
        if not chosen:
            return self, None
        if chosen == all_series:
            return None, self
        for part in self._parts:
            part.readers += 1
        others = FinishedSample(self.step, self._parts, lambda series: series not in chosen)
        return others, FinishedSample(self.step, self._parts, lambda series: series in chosen)

    def drop(self) -> None:
        """Forgets it unread."""
        for part in self._parts:
            part.drop()

    def batches(self, loss_scale: float | None) -> list[Batch]:
        """The sample as the run log takes it."""
        last = len(self._parts) - 1
        return [self._batch(part, loss_scale, position == last) for position, part in enumerate(self._parts)]

    def _batch(self, part: _Part, loss_scale: float | None, last: bool) -> Batch:
        index, series = np.array(part.rows.index, np.int64), np.array(part.rows.series, np.int64)
        scales, extras, rows = part.scales(loss_scale), part.extras(loss_scale), part.host_rows()
        blocks, taken = part.blocks(rows), np.ones(len(index), bool)
        if self._takes is not None:
            taken[:] = [self._takes(number) for number in part.rows.series]
        if part.rows.unless_empty:
            taken[part.rows.unless_empty] &= rows[index[part.rows.unless_empty], row_layout.COUNT] > 0
        if not taken.all():
            index, series = index[taken], series[taken]
            scales = None if scales is None else scales[taken]
            extras = {name: values[taken] for name, values in extras.items()}
            blocks = None if blocks is None else blocks[taken]
        return Batch(
            step=self.step, rows=rows, index=index, series=series, scales=scales, extras=extras,
            blocks=blocks, last=last,
        )  # fmt: skip


# -- values in the last bin of their block -----------------------------------------------------------------------------

# A block's scale is set by its largest magnitude. Where all values of a block lie close to each other, as the weights
# of a norm do, they may all be rounded to the format's largest number, or clipped to it: the block then holds one
# number.

_MX = 32  # values of a block of MX formats
# E4M3 reaches 1.75 times its largest power of two. What is nearer to that than to 1.625 is rounded to it, and the rest
# above is clipped to it, since the block's scale is the power of two below its maximum.
_E4M3 = 1.6875
_E2M1 = 5 / 6  # of a block's maximum, which becomes 6; the number before is 4


@torch.no_grad()
def in_last_bin(x: Tensor, block: int) -> Tensor:
    """Return the number of values in their block's last bin, as a tensor of float64.

    Args:
        x: Values. Their blocks lie along the last axis, and the last one of a row may be short.
        block: Length of the blocks: 32 for MXFP8 (E4M3), 16 for NVFP4.
    """
    magnitudes = x.detach().abs().float()
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    rows = magnitudes.reshape(-1, x.shape[-1]) if x.dim() else magnitudes.reshape(1, 1)
    padded = functional.pad(rows, (0, -rows.shape[-1] % block))
    blocks = padded.reshape(len(rows), -1, block)
    largest = blocks.amax(-1, keepdim=True)
    bin_ = _E4M3 * torch.exp2(torch.frexp(largest).exponent - 1) if block == _MX else _E2M1 * largest
    inside = (blocks >= bin_) & (largest > 0) & largest.isfinite()
    return inside.sum(dtype=torch.float64)
