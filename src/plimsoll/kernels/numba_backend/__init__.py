"""The CPU backend: Numba kernels over integer bits, on as many threads as torch."""

import numba

from plimsoll.kernels.numba_backend.casting.fp8 import fp8_cast as fp8_cast
from plimsoll.kernels.numba_backend.casting.launch import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    pack as pack,
)
from plimsoll.kernels.numba_backend.comparing import compare as compare
from plimsoll.kernels.numba_backend.measuring.launch import (
    cache_folder as cache_folder,
    measure as measure,
    measure_one as measure_one,
)
from plimsoll.kernels.numba_backend.memory import merge_rows as merge_rows
from plimsoll.kernels.numba_backend.nonfinite import (
    count_nonfinite as count_nonfinite,
    count_values as count_values,
)
from plimsoll.kernels.numba_backend.unscaling import unscale as unscale
from plimsoll.kernels.numba_backend.updates import update as update

QUEUES = False  # values are counted while they are in the cache


def describe() -> str:
    """One line for `plimsoll doctor`."""
    return f"numba {numba.__version__}, compiled code in {cache_folder() or 'memory only'}"
