"""The reference backend: plain torch operations, on any device."""

from plimsoll.kernels.operators.comparison import compare as compare
from plimsoll.kernels.torch_backend.casting import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    fp8_cast as fp8_cast,
    pack as pack,
)
from plimsoll.kernels.torch_backend.measuring import (
    count_nonfinite as count_nonfinite,
    count_values as count_values,
    measure as measure,
    measure_one as measure_one,
    merge_rows as merge_rows,
    unscale as unscale,
    update as update,
)


def describe() -> str:
    """One line for `plimsoll doctor`."""
    import torch

    return f"torch {torch.__version__}, the reference, any device"
