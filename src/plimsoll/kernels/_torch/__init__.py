"""The reference backend: plain torch operations, on any device."""

from plimsoll.kernels._torch._cast import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    pack as pack,
)
from plimsoll.kernels._torch._measure import measure as measure


def describe() -> str:
    """One line for `plimsoll doctor`."""
    import torch

    return f"torch {torch.__version__}, the reference, any device"
