"""Casting a matrix to 8-bit codes with plain torch operations: the reference."""

import torch
from torch import Tensor

from plimsoll.kernels.operators.fp8_cast import NAN_CODE, Cast, spec
from plimsoll.kernels.torch_backend.casting import to_codes
from plimsoll.kernels.torch_backend.measuring import measure


def fp8_cast(x: Tensor, cast: Cast) -> None:
    """Writes the codes of `x` and of its transpose, and counts x into its row."""
    if cast.bank is not None:
        measure([x], cast.bank, [cast.row], False, 0)
    scale = cast.scale if cast.scale_tensor is None else cast.scale_tensor.reshape(())
    values = x.to(torch.float32) * scale  # a number is rounded to float32 by torch
    codes = to_codes(values.to(torch.float64), spec(cast.dtype), None)
    codes = torch.where(values.isnan(), NAN_CODE, codes).to(torch.uint8)
    rows, columns = codes.shape
    if cast.codes is not None:
        cast.codes.zero_()[:rows, :columns] = codes
    if cast.columns is not None:
        cast.columns.zero_()[:columns, :rows] = codes.t()
