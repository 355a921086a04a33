"""The reference backend: plain torch operations, on any device."""

from plimsoll.kernels._torch._cast import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    pack as pack,
)
from plimsoll.kernels._torch._fp8 import fp8_cast as fp8_cast
from plimsoll.kernels._torch._measure import measure as measure, measure_one as measure_one
from plimsoll.kernels._torch._rows import merge_rows as merge_rows
from plimsoll.kernels._torch._unscale import unscale as unscale
from plimsoll.kernels._torch._update import count_nonfinite as count_nonfinite, update as update


def describe() -> str:
    """One line for `plimsoll doctor`."""
    import torch

    return f"torch {torch.__version__}, the reference, any device"
