"""The reference backend: plain torch operations, on any device."""

from plimsoll.kernels.torch_backend.casting import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    pack as pack,
)
from plimsoll.kernels.torch_backend.fp8_casting import fp8_cast as fp8_cast
from plimsoll.kernels.torch_backend.measuring import measure as measure, measure_one as measure_one
from plimsoll.kernels.torch_backend.rows import merge_rows as merge_rows
from plimsoll.kernels.torch_backend.unscaling import unscale as unscale
from plimsoll.kernels.torch_backend.updates import count_nonfinite as count_nonfinite, update as update


def describe() -> str:
    """One line for `plimsoll doctor`."""
    import torch

    return f"torch {torch.__version__}, the reference, any device"
