"""Casts of tensors to FP8 codes, by rows and by columns.

A scaled product reads its first operand by rows and its second by columns, the only order for FP8 on Hopper. So one
read of a tensor makes two copies: its codes, and the codes of its transpose. Sizes are padded with zeros to multiples
of 16, as FP8 units require. Zeros add nothing to a sum.
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


class Codes(NamedTuple):
    """Codes of a tensor in FP8 by rows, those of its transpose, and their scale."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    scale: Tensor | None = None  # None: 1


def to_codes(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout, bank: Tensor | None = None, row: int = 0
) -> Codes:
    """Return the codes of the matrix `x` times `scale`, a 0-d float32.

    `kernels.fp8_cast` has the contract.
    """
    if bank is None and x.is_cuda and torch.compiler.is_compiling():
        return Codes(*by_formula(x, dtype, scale, layout), scale)
    return Codes(*kernels.fp8_cast(x, dtype, 1.0 if scale is None else scale, layout, bank, row), scale)


# Two implementations give the same bits, except the sign of NaN: the operator `plimsoll::fp8_cast`, which can also
# count the values that it reads, and plain operations, which a compiler on a GPU fuses with the operation before.
def by_formula(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """Return the result of `kernels.fp8_cast`, by operations that a compiler can fuse."""
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
    """Banks and rows of counts: one bank for the forward, one for the backward."""

    forward: Tensor | None
    backward: Tensor | None
    rows: Mapping[Role, int]

    def row(self, role: Role) -> tuple[Tensor | None, int]:
        """Return the bank and the row of a role, or None if it is not counted."""
        if role not in self.rows:
            return None, 0
        return self.backward if role == "gradients" else self.forward, self.rows[role]


def check_counting(
    forward: Tensor | None, backward: Tensor | None, rows: Mapping[Role, int], device: torch.device
) -> Counting | None:
    """Return the counting, or None without rows.

    Raises:
        ArgumentError: A role is unknown, a bank lacks its row, or both directions have the same bank.
    """
    unknown = [role for role in rows if role not in ROLES]
    if unknown:
        raise ArgumentError(
            f"count_into: expected rows of {', '.join(ROLES)}; got {unknown[0]!r}. A linear layer casts nothing else."
        )
    if rows and forward is not None and forward is backward:
        raise ArgumentError("count_into: expected two banks; got one for both directions. Make another with new_bank.")
    counting = Counting(forward, backward, dict(rows))
    for role in rows:
        bank, row = counting.row(role)
        if bank is None or bank.dim() != 2 or not 0 <= row < bank.shape[0] or bank.device != device:
            passed = "None" if bank is None else f"one of shape {tuple(bank.shape)} on {bank.device}"
            raise ArgumentError(
                f"count_into: expected a bank on {device} with a row {row} for {role}; got {passed}. Make it with "
                "new_bank."
            )
    return counting if rows else None
