"""Errors against a reference by torch's operations: the reference, and GPUs'."""

from typing import cast

import torch
from torch import Tensor

from plimsoll import row_layout

_PIECE = 1 << 20  # values that are compared at a time: as float64 they take 8 MB a side


# A shadow step alone compares, whose second forward and backward take far longer than this.
def compare(values: Tensor, reference: Tensor, row: Tensor) -> None:
    """Add to a row of errors how values differ from a reference of the same shape."""
    pieces = [cast("tuple[Tensor, ...]", x.reshape(-1).split(_PIECE)) for x in (values, reference)]
    for low, wide in zip(*pieces, strict=True):
        y, x = low.to(torch.float64), wide.to(torch.float64)
        zero, here, there = y == 0, y.isfinite(), x.isfinite()
        both = here & there
        error = torch.where(both, y - x, 0.0)
        finite = torch.where(both, x, 0.0)
        parts = (
            both, error, error.square(), finite, finite.square(), error * finite, error.new_zeros(1), there & ~here,
            ~there,
            zero & (x.abs() > 0), zero & (x == 0),
        )  # fmt: skip
        row += torch.stack([part.sum(dtype=torch.float64) for part in parts])
        row[row_layout.LARGEST_ERROR] = torch.maximum(row[row_layout.LARGEST_ERROR], error.abs().amax())
