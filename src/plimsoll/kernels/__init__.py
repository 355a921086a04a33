"""The fast paths under `rounding`, `spectrum` and `watch`: registered operators and the backends behind them.

Not public. `measure_into` fills a bank (`_layout` says what a row holds); `ops` are the operators of `_ops`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll.kernels import _layout, _ops as _ops
from plimsoll.kernels._backend import (
    BackendStatus as BackendStatus,
    forced as forced,
    report as report,
    use as use,
)

ops = torch.ops.plimsoll


def new_bank(rows: int, block: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """An empty bank of that many rows; `block` makes room for the block record."""
    return torch.zeros((rows, _layout.width(block)), dtype=torch.int64, device=device)


def measure_into(
    tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], *, accumulate: bool = True, block: int = 0
) -> None:
    """Counts each tensor into its row of the bank: no synchronisation, no allocation, no graph break.

    Without `accumulate` the rows are emptied first. All tensors are on the bank's device.
    """
    ops.measure_(list(tensors), bank, list(rows), accumulate, block)
