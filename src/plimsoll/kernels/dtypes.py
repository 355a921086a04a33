"""Torch dtypes of the catalogue's formats, for the kernels' tables."""

import torch

from plimsoll.formats import ELEMENTS, Format

# A dtype that this version of torch lacks has no tensors, so it is left out.
FORMATS: dict[torch.dtype, Format] = {
    getattr(torch, fmt.torch_dtype): fmt
    for fmt in ELEMENTS
    if fmt.torch_dtype is not None and hasattr(torch, fmt.torch_dtype)
}
FLOATING = tuple(dtype for dtype, fmt in FORMATS.items() if fmt.bits > 8)  # torch computes in them itself
SIXTEEN_BIT = tuple(dtype for dtype, fmt in FORMATS.items() if fmt.bits == 16)
# By the format's name: FP32 and the 16-bit ones, which training computes in.
TRAINING = {fmt.name: dtype for dtype, fmt in FORMATS.items() if fmt.bits == 32 or dtype in SIXTEEN_BIT}
EIGHT_BIT = tuple(dtype for dtype, fmt in FORMATS.items() if fmt.bits <= 8 and fmt.signed)
SCALES = tuple(dtype for dtype, fmt in FORMATS.items() if not fmt.signed)  # of blocks: no sign and no zero


def dtype_of(fmt: Format) -> torch.dtype:
    """Return the torch dtype whose tensors hold a format's codes, if there is one.

    >>> from plimsoll.formats import E4M3
    >>> dtype_of(E4M3)
    torch.float8_e4m3fn
    """
    return next(dtype for dtype, known in FORMATS.items() if known == fmt)
