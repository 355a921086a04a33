"""Tensors into FP8 codes, by rows and by columns: the layouts that the products of a linear layer read.

A scaled product takes its first operand row by row and its second column by column (Hopper's units know no other order
for FP8), so of each tensor two copies are made from one read: its codes as they lie, and those of its transpose. Sizes
are made up to multiples of 16 with zeros, which those units ask for; zeros add nothing to a sum.

Two ways give the same bits (but for the sign of NaN): the operator `plimsoll::fp8_cast`, which may also count what it
reads, and plain operations, which a compiler on a GPU fuses with whatever made the tensor.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import ArgumentError
from plimsoll.fp8.scales import ROLES, Role
from plimsoll.kernels.operators.fp8_cast import FORMATS, Layout, padded

LIMITS = {dtype: fmt.max for dtype, fmt in FORMATS.items()}


class Held(NamedTuple):
    """A tensor in FP8: its codes by rows, those of its transpose by rows, and the scale they were made with."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    scale: Tensor | None = None  # None: 1


def hold(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout, bank: Tensor | None = None, row: int = 0
) -> Held:
    """Return the codes of the matrix `x` times `scale`, a 0-d float32. See `kernels.fp8_cast` for the contract."""
    if bank is None and x.is_cuda and torch.compiler.is_compiling():
        return Held(*by_formula(x, dtype, scale, layout), scale)
    return Held(*kernels.fp8_cast(x, dtype, 1.0 if scale is None else scale, layout, bank, row), scale)


def by_formula(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """Return what `kernels.fp8_cast` returns, by operations that a compiler can fuse with earlier ones."""
    rows, columns = x.shape
    height, width = padded(rows), padded(columns)
    if (height, width) != (rows, columns):
        x = torch.nn.functional.pad(x, (0, width - columns, 0, height - rows))
    values = x.to(torch.float32)
    if scale is not None:
        values = values * scale
    codes = values.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)
    return codes if layout != "columns" else None, codes.t().contiguous() if layout != "rows" else None


class Counting(NamedTuple):
    """Banks and rows in which casts count: one bank for activations and weights, one for gradients."""

    forward: Tensor | None
    backward: Tensor | None
    rows: Mapping[Role, int]

    def row(self, role: Role) -> tuple[Tensor | None, int]:
        """Return the bank and the row of a role; None where it is not counted."""
        if role not in self.rows:
            return None, 0
        return self.backward if role == "gradients" else self.forward, self.rows[role]


def check_counting(
    forward: Tensor | None, backward: Tensor | None, rows: Mapping[Role, int], device: torch.device
) -> Counting | None:
    """Return the counting, or None without rows. Raise `ArgumentError` for missing rows, or one bank for both sides."""
    unknown = [role for role in rows if role not in ROLES]
    if unknown:
        raise ArgumentError(
            f"count_into: expected rows of {', '.join(ROLES)}; got {unknown[0]!r}. These are what a linear layer casts."
        )
    if rows and forward is not None and forward is backward:
        raise ArgumentError("count_into: expected two banks; got one for both directions. Make another with new_bank.")
    counting = Counting(forward, backward, dict(rows))
    for role in rows:
        bank, row = counting.row(role)
        if bank is None or bank.dim() != 2 or not 0 <= row < bank.shape[0] or bank.device != device:
            came = "None" if bank is None else f"one of shape {tuple(bank.shape)} on {bank.device}"
            raise ArgumentError(
                f"count_into: expected a bank on {device} with a row {row} for {role}; got {came}. Make it with "
                "new_bank."
            )
    return counting if rows else None
