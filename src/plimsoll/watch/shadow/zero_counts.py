"""The counts of a shadow step: of each series, how many zeros underflow made, and how many are structural.

They stay on the tensors' devices until the step's end, and go to the host together.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from plimsoll.watch.sample import Sample
from plimsoll.watch.sampling.device_numbers import Later


class Counts:
    """Pairs of counts, by device and series."""

    def __init__(self) -> None:
        self._found: dict[torch.device, dict[int, Tensor]] = {}

    def add(self, series: Iterable[int], zeros: Tensor, repeated: Tensor) -> bool:
        """Compares real zeros with the values of the repetition; whether they can be compared."""
        if zeros.shape != repeated.shape or zeros.device != repeated.device:
            return False
        self._add(series, _pair(zeros, repeated))
        return True

    def add_gradient(self, series: int, values: Tensor, repeated: Tensor, *, absent: int) -> None:
        """Compares a parameter's gradient; of a sparse one what is stored, while `absent` others are zero in both."""
        if repeated.is_sparse:
            repeated = repeated.coalesce().values()
        if values.shape == repeated.shape and values.device == repeated.device:
            pair = _pair(values == 0, repeated)
            pair[1] += absent
            self._add([series], pair)

    def _add(self, series: Iterable[int], pair: Tensor) -> None:
        found = self._found.setdefault(pair.device, {})
        for number in series:
            found[number] = found[number] + pair if number in found else pair

    def enter(self, sample: Sample, left_out: Collection[int]) -> None:
        """Puts the counts beside the sample's entries, one of each series (its entries are added up when written)."""
        for device, found in self._found.items():
            rows = sample.rows(device)
            entries = {number: entry for entry, number in enumerate(rows.series)}
            told = [number for number in found if number in entries and number not in left_out]
            if not told:
                continue
            counts = Later(torch.stack([found[number] for number in told]))
            for row, number in enumerate(told):
                rows.extras.append(("underflowed", entries[number], _Cell(counts, row, 0)))
                rows.extras.append(("structural", entries[number], _Cell(counts, row, 1)))


class _Cell(Later):
    """One number of a table that is there later."""

    __slots__ = ("_place", "_table")

    def __init__(self, table: Later, row: int, column: int) -> None:
        self._table, self._place = table, (row, column)

    def ready(self) -> bool:
        return self._table.ready()

    def value(self) -> float:
        return float(self._table.tensor()[self._place])


def _pair(zeros: Tensor, repeated: Tensor) -> Tensor:
    """int64[2]: zeros that are nonzero in the repetition, and those that are zero there too. NaN is neither."""
    return torch.stack([(zeros & (repeated.abs() > 0)).sum(), (zeros & (repeated == 0)).sum()])
