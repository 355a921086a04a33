"""The operator ``plimsoll::fp8_cast``: a matrix into 8-bit codes, from one read.

The codes are by rows, by columns, or both. Scaled matrix products want one operand row by row and the other column by
column, and sizes divisible by 16. So the operator writes the codes as the matrix lies, and those of its transpose, made
up with zeros to multiples of 16; and where a bank is given it counts what it reads. The reference is
`torch_backend.fp8_cast`.
"""

import functools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.formats import E4M3, E5M2
from plimsoll.kernels import backend
from plimsoll.kernels.dtypes import TRAINING, dtype_of
from plimsoll.kernels.operators.cast_spec import NEAREST_EVEN, CastSpec

Layout = Literal["rows", "columns", "both"]
LAYOUTS: tuple[Layout, ...] = ("rows", "columns", "both")
ROWS, COLUMNS, BOTH = range(3)

MULTIPLE = 16  # what scaled products ask sizes to be divisible by
# The cast saturates: there is no code for a value beyond the format's largest, nor for Inf. NaN stays NaN, as the code
# 0x7F, which is what NVIDIA's conversion gives.
NAN_CODE = 0x7F
INPUTS = tuple(TRAINING.values())
FORMATS = {dtype_of(fmt): fmt for fmt in (E4M3, E5M2)}  # those that scaled products of hardware take

SCHEMA = (
    "(Tensor x, ScalarType dtype, float scale, Tensor? scale_tensor, int layout, Tensor(a!)? bank, int row) "
    "-> (Tensor, Tensor)"
)


class Cast(NamedTuple):
    """A backend's arguments: `codes` and `columns` are uint8 outputs, or None."""

    codes: Tensor | None
    columns: Tensor | None
    dtype: torch.dtype
    scale: float
    scale_tensor: Tensor | None  # in place of the number
    bank: Tensor | None
    row: int


def fp8_cast(
    x: Tensor,
    dtype: torch.dtype,
    scale: float | Tensor = 1.0,
    layout: Layout = "both",
    bank: Tensor | None = None,
    row: int = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the codes of matrix `x`, and of its transpose; None if left out.

    Each is in one piece. `layout` says which are left out. Values become float32, are multiplied by `scale` as float32,
    held to the format's largest value, and rounded once to nearest, ties to even; -0 keeps its sign, NaN stays NaN.
    With a bank, the row is emptied and then holds the spectrum of `x` itself. No synchronisation, no graph break.
    Raises `UnsupportedTensorError` or `ArgumentError`.

    >>> rows, columns = fp8_cast(torch.tensor([[1.0, -500.0]]), torch.float8_e4m3fn)
    >>> rows.shape, rows[0, :3].float(), columns.shape
    (torch.Size([16, 16]), tensor([   1., -448.,    0.]), torch.Size([16, 16]))
    """
    tensor = scale if isinstance(scale, Tensor) else None
    number = 1.0 if isinstance(scale, Tensor) else scale
    codes, columns = torch.ops.plimsoll.fp8_cast(x, dtype, number, tensor, LAYOUTS.index(layout), bank, row)
    return codes if layout != "columns" else None, columns if layout != "rows" else None


def padded(size: int) -> int:
    """The next multiple of 16."""
    return (size + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def keep(x: Tensor) -> Tensor:
    """Return a copy that compiled code saves for its backward and never recomputes."""
    # Compilers may compute small tensors again in the backward. Where they come from a buffer that the forward changes
    # in place (torch 2.13: under `no_grad`), that would be from its later contents. The copy carries no gradient.
    return torch.ops.plimsoll.keep(x)


@functools.cache
def spec(dtype: torch.dtype) -> CastSpec:
    """The rounding of an 8-bit dtype."""
    return CastSpec.of(FORMATS[dtype], NEAREST_EVEN, saturate=True)


def run_cast(
    x: Tensor,
    dtype: torch.dtype,
    scale: float,
    scale_tensor: Tensor | None,
    layout: int,
    bank: Tensor | None,
    row: int,
) -> tuple[Tensor, Tensor]:
    """Run the operator: check its arguments, and call the backend."""
    _check(x, dtype, scale_tensor, bank, row)
    codes, columns = empty_codes(x, dtype, scale, scale_tensor, layout, bank, row)
    written = [part.view(torch.uint8) if part.dim() == 2 else None for part in (codes, columns)]
    backend.choose(x).fp8_cast(x, Cast(written[0], written[1], dtype, scale, scale_tensor, bank, row))
    return codes, columns


def empty_codes(
    x: Tensor,
    dtype: torch.dtype,
    _scale: float,
    _scale_tensor: Tensor | None,
    layout: int,
    _bank: Tensor | None,
    _row: int,
) -> tuple[Tensor, Tensor]:
    """Return room for the codes, and for those of the transpose."""
    height, width = padded(x.shape[0]), padded(x.shape[1])
    codes = x.new_empty((0,) if layout == COLUMNS else (height, width), dtype=dtype)
    columns = x.new_empty((0,) if layout == ROWS else (width, height), dtype=dtype)
    return codes, columns


def _check(x: Tensor, dtype: torch.dtype, scale: Tensor | None, bank: Tensor | None, row: int) -> None:
    if x.dim() != 2 or x.dtype not in INPUTS or x.layout != torch.strided:
        raise UnsupportedTensorError(
            f"fp8_cast: expected a strided matrix of float32, bfloat16 or float16; got {x.dtype}, {x.layout}, shape "
            f"{tuple(x.shape)}. Convert it before."
        )
    if dtype not in FORMATS:
        raise ArgumentError(f"fp8_cast: expected dtype float8_e4m3fn or float8_e5m2; got {dtype}. Take one of them.")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device):
        raise ArgumentError(
            f"fp8_cast: expected the scale to be one float32 number on {x.device}; got {scale.dtype}, shape "
            f"{tuple(scale.shape)}, on {scale.device}. Make it there."
        )
    if bank is not None and not (bank.dim() == 2 and 0 <= row < bank.shape[0] and bank.device == x.device):
        raise ArgumentError(
            f"fp8_cast: expected a row of a bank on {x.device}; got row={row} of one with shape {tuple(bank.shape)} on "
            f"{bank.device}. Make it with new_bank."
        )
