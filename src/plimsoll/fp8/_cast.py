"""Tensors into FP8 codes, by rows and by columns: the layouts that the products of a linear layer read.

A scaled product takes its first operand row by row and its second column by column (Hopper's units know no other order
for FP8), so of each tensor two copies are made from one read: its codes as they lie, and those of its transpose. Sizes
are made up to multiples of 16 with zeros, which those units ask for; zeros add nothing to a sum.
"""

from typing import Literal

import torch
from torch import Tensor

from plimsoll.formats import get_element

Layout = Literal["rows", "columns", "both"]
MULTIPLE = 16  # what the units ask sizes to be divisible by


def padded(size: int) -> int:
    """The next multiple of 16."""
    return (size + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def cast_codes(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """The codes of the matrix `x` by rows, and those of its transpose by rows; None for what `layout` leaves out.

    Values become float32, are multiplied by `scale` (a 0-d float32), held to the format's largest value and rounded to
    nearest, ties to even. Inf becomes the largest value too; NaN stays NaN. -0 keeps its sign.
    """
    rows, columns = x.shape
    height, width = padded(rows), padded(columns)
    if (height, width) != (rows, columns):
        x = torch.nn.functional.pad(x, (0, width - columns, 0, height - rows))
    codes = _formula(x, dtype, scale)
    return codes if layout != "columns" else None, codes.t().contiguous() if layout != "rows" else None


def _formula(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """As the operator, in operations that a compiler can fuse with what comes before."""
    limit = get_element(dtype, "fp8").max
    values = x.to(torch.float32)
    if scale is not None:
        values = values * scale
    return values.clamp(-limit, limit).to(dtype)
