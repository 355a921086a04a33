"""Fast paths of `rounding`, `spectrum` and `watch`: operators and their backends.

Not public. `measure_into` fills a bank (`row_layout` says what a row holds); `ops` are those of
`operators.definitions`. The other functions are what `watch` does in every step: `measure_one` for one tensor in a
hook, `measure_each` for many, `count_nonfinite_into`, `update_into`; what a loss scaler does, `unscale_into`; and
`merge_rows` adds rows up.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.kernels import backend
from plimsoll.kernels.backend import (
    BackendStatus as BackendStatus,
    forced as forced,
    report as report,
    use as use,
)
from plimsoll.kernels.operators import definitions
from plimsoll.kernels.operators.fp8_cast import fp8_cast as fp8_cast

ops = torch.ops.plimsoll


def new_bank(rows: int, block: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """An empty bank of that many rows; `block` makes room for the block record."""
    return torch.zeros((rows, row_layout.width(block)), dtype=torch.int64, device=device)


def measure_into(
    tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], *, accumulate: bool = True, block: int = 0
) -> None:
    """Count each tensor into its row of the bank.

    No synchronisation, no allocation, no graph break. Without `accumulate` the rows are emptied first. All tensors are
    on the bank's device.
    """
    ops.measure_(list(tensors), bank, list(rows), accumulate, block)


def measure_one(x: Tensor, bank: Tensor, row: int) -> None:
    """Measure one tensor into a row that is emptied first, faster than `measure_into`.

    Eager calls go past torch's dispatcher, so `x` is a plain tensor: detached, strided, on the bank's device.
    """
    if torch.compiler.is_compiling() or type(bank) is not Tensor:  # a fake tensor, say
        ops.measure_([x], bank, [row], False, 0)
    else:
        backend.choose(bank).measure_one(x, bank, row)


def measure_each(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], *, block: int = 0) -> None:
    """Measure plain tensors into emptied rows, past torch's dispatcher."""
    if torch.compiler.is_compiling() or type(bank) is not Tensor:
        ops.measure_(list(tensors), bank, list(rows), False, block)
    else:
        backend.choose(bank).measure(tensors, bank, rows, False, block)


def measurer(bank: Tensor) -> Callable[[Tensor, Tensor, int], None]:
    """Return `measure_one` for banks like this, with the backend chosen beforehand."""
    return measure_one if type(bank) is not Tensor else backend.choose(bank).measure_one


def queues(bank: Tensor) -> bool:
    """Return True if a call of `measure_each` costs the host far more than the tensors in it."""
    return type(bank) is Tensor and backend.choose(bank).QUEUES


def new_counts(length: int, device: torch.device | str = "cpu") -> Tensor:
    """Counts of zero, for `count_nonfinite_into`."""
    return torch.zeros(length, dtype=torch.int64, device=device)


def count_nonfinite_into(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    """Add the number of NaN and Inf values of all tensors to ``counts[index]``.

    As fast as memory gives the values. Tensors are plain ones, as for `measure_one`, on the device of the int64 counts.
    """
    if torch.compiler.is_compiling() or type(counts) is not Tensor:
        ops.count_nonfinite_(list(tensors), counts, index)
    else:
        backend.choose(counts).count_nonfinite(tensors, counts, index)


def count_nonfinite(tensors: Sequence[Tensor]) -> int:
    """Return the number of NaN and Inf values of plain tensors in the CPU's memory.

    It has as little overhead as can be. For a few small tensors in every training step.
    """
    return backend.choose_for_host().count_values(tensors)


def unscale_into(
    gradients: Sequence[Tensor],
    inverse_scale: Tensor,
    found_inf: Tensor,
    bank: Tensor | None = None,
    rows: Sequence[int] = (),
) -> None:
    """Multiply gradients in place by `inverse_scale`, and measure them before.

    One pass over memory does both. The product is a float32 (float64 of float64 values), rounded once more to the
    gradient's dtype, to nearest even; an inverse scale of exactly 1 leaves every bit as it is. Where a gradient or a
    product is not finite `found_inf` becomes 1; it is never reset here. With a bank, each gradient's row is emptied and
    then holds its spectrum as it was before. Both numbers are float32 tensors of one value, on the gradients' device;
    gradients are strided tensors that share no memory. No synchronisation, no graph break. Raises
    `UnsupportedTensorError` or `ArgumentError`.
    """
    if torch.compiler.is_compiling() or type(found_inf) is not Tensor:
        ops.unscale_(list(gradients), inverse_scale, found_inf, bank, list(rows))
    else:
        definitions.unscale(gradients, inverse_scale, found_inf, bank, rows)


def new_moves(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Empty rows of moves, for `update_into`."""
    return torch.zeros((rows, row_layout.MOVES), dtype=torch.int64, device=device)


def update_into(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Count each change ``new - old`` into its row of the bank and of `moves`.

    Both rows are emptied first. The difference is a float32 (float64 of float64 values). A push is what asks a value to
    move: its gradient, in any dtype; an empty one says that it is not known. A row of moves holds the number of pushes
    that are not zero (a NaN is not), how many of those values are the same after as before (0 and -0 are, and NaN and
    NaN), and the float64 bits of the sum of the old values' squares. No synchronisation, no graph break, and no memory
    of the tensors' size. Eager calls go past torch's dispatcher: tensors are plain ones, as for `measure_one`.
    """
    if torch.compiler.is_compiling() or type(bank) is not Tensor:
        ops.update_(list(old), list(new), list(pushes), bank, list(rows), moves)
    else:
        definitions.update(old, new, pushes, bank, rows, moves)


def compare_into(values: Tensor, reference: Tensor, row: Tensor) -> None:
    """Add to a row of errors how values differ from a reference of the same shape.

    Both are on the same device. Differences and sums are float64, whatever the dtypes. Eager code only; no
    synchronisation.
    """
    if values.shape != reference.shape or values.device != reference.device:
        raise ArgumentError(
            "compare_into: expected a reference of the values' shape and device; got values of "
            f"{tuple(values.shape)} on {values.device} and a reference of {tuple(reference.shape)} on "
            f"{reference.device}. Give two versions of one tensor."
        )
    if values.numel():
        backend.choose(row).compare(values, reference, row)


def merge_rows(target: NDArray[np.int64], groups: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Add each row j to ``target[groups[j]]``: sums add up, keys take the larger.

    Numba's kernel, which holds no global lock, or numpy. All are int64; target and rows have as many columns, and the
    target is in one piece.
    """
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < len(target):
        raise ArgumentError(
            f"merge_rows: expected groups from 0 to {len(target) - 1}; got groups={groups}. Make more rows of target."
        )
    whole = target.flags.c_contiguous and target.dtype == rows.dtype == np.int64
    if not whole or rows.shape != (groups.size, target.shape[1]):
        raise ArgumentError(
            f"merge_rows: expected int64 rows, one for each of {groups.size} groups, as wide as target, and target in "
            f"one piece; got rows of {rows.dtype}, {rows.shape}, and target of {target.dtype}, {target.shape}. Give "
            "them one layout."
        )
    groups, rows = np.ascontiguousarray(groups, np.int64), np.ascontiguousarray(rows)
    backend.choose_for_host().merge_rows(target, groups, rows)


def add_rows(bank: Tensor, targets: Sequence[int], rows: Tensor) -> None:
    """Add each row j to row ``targets[j]`` of the bank on its device, without waiting.

    The rules are those of `merge_rows`. On a GPU the float64 sums of several rows with one target are added in any
    order.
    """
    if bank.device.type == "cpu":
        merge_rows(bank.numpy(), np.array(targets, np.int64), rows.numpy())
        return
    index = torch.tensor(targets, device="cpu")
    if bank.is_cuda:
        index = index.pin_memory()
    add_rows_by_torch(bank, index.to(bank.device, non_blocking=True), rows)


def add_rows_by_torch(bank: Tensor, targets: Tensor, rows: Tensor) -> None:
    """Do what `add_rows` does with torch's own operators, on any device."""
    extremes, sums = row_layout.EXTREMES, row_layout.SUMS
    for part in (slice(0, row_layout.POSITIVE), slice(row_layout.HISTOGRAM, None)):
        bank[:, part].index_add_(0, targets, rows[:, part])
    bank.view(torch.float64)[:, sums].index_add_(0, targets, rows.view(torch.float64)[:, sums])
    keys = rows[:, extremes]
    bank[:, extremes].scatter_reduce_(0, targets[:, None].expand_as(keys), keys, "amax")
