"""Comparisons of one shadow step: rows of errors for pairs of tensors, by series."""

from collections.abc import Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.watch.sample import ERROR_POWERS, EntryErrors, Sample

_POWERS = torch.from_numpy(ERROR_POWERS)
# The repetition runs in modes that see every call and every look at a shape. Of 4,170 calls that they saw in a step of
# benchmarks/microscope.py, comparisons made 3,385.
_outside_modes: Any = cast("Any", torch)._C.DisableTorchFunction  # noqa: SLF001  (torch offers it nowhere else)


class Comparisons:
    """Rows of errors, by device."""

    def __init__(self) -> None:
        self._rows: dict[torch.device, list[tuple[Tensor, list[int], bool]]] = {}

    def add(
        self, series: Iterable[int], values: Tensor, reference: Tensor, *, divisor: int = 1, carries_scale: bool = False
    ) -> bool:
        """Compare values with a reference for these series; return if that is possible.

        Args:
            series: Numbers of the series.
            values: The values of the real step.
            reference: Those of the repetition.
            divisor: What the series' spectrum is measured after a division by.
            carries_scale: Whether both are multiplied by the loss scale.
        """
        with _outside_modes():
            if values.shape != reference.shape or values.device != reference.device:
                return False
            row = compared(values, reference)
            if divisor != 1:
                row *= float(divisor) ** -_POWERS.to(row.device)
            self._rows.setdefault(row.device, []).append((row, list(series), carries_scale))
            return True

    def add_row(self, series: int, row: Tensor, *, carries_scale: bool) -> None:
        """Add a row that was compared already."""
        self._rows.setdefault(row.device, []).append((row, [series], carries_scale))

    def enter(self, sample: Sample, left_out: Collection[int]) -> None:
        """Put the rows beside the sample's entries, one of each series.

        A series' entries are added up when they are written.
        """
        for device, rows_of_device in self._rows.items():
            rows = sample.rows(device)
            entries = {number: entry for entry, number in enumerate(rows.series)}
            table = DeviceValue(torch.stack([row for row, _, _ in rows_of_device]))
            for place, (_, series, carries_scale) in enumerate(rows_of_device):
                rows.errors += [
                    EntryErrors(entries[number], table, place, carries_scale)
                    for number in series
                    if number in entries and number not in left_out
                ]


def compared(values: Tensor, reference: Tensor) -> Tensor:
    """Return the row of errors of two plain tensors."""
    row = torch.zeros(row_layout.ERRORS, dtype=torch.float64, device=values.device)
    kernels.compare_into(values, reference.detach(), row)
    return row


def gradient_row(values: Tensor, reference: Tensor, errors: Tensor | None, *, absent: int) -> Tensor | None:
    """Return the row of a parameter's gradient; None where the two cannot be compared.

    Args:
        values: The gradient as the optimizer is given it; what is stored of a sparse one. Its zeros are counted.
        reference: The repetition's.
        errors: The row of the gradient as the backward left it, before unscaling and clipping. None: not known.
        absent: How many values are not stored: zero in both.
    """
    if reference.is_sparse:
        reference = reference.coalesce().values()
    if values.shape != reference.shape or values.device != reference.device:
        return None
    row = compared(values, reference)
    row[: row_layout.UNDERFLOWED] = torch.nan if errors is None else errors[: row_layout.UNDERFLOWED]
    row[[row_layout.COMPARED, row_layout.STRUCTURAL]] += absent
    return row
