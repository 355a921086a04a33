"""The CPU backend: Numba kernels over integer bits, on as many threads as torch uses."""

import numba

from plimsoll.kernels._numba._cast import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    pack as pack,
)
from plimsoll.kernels._numba._fp8 import fp8_cast as fp8_cast
from plimsoll.kernels._numba._jit import cache_folder as cache_folder
from plimsoll.kernels._numba._measure import measure as measure, measure_one as measure_one
from plimsoll.kernels._numba._nonfinite import count_nonfinite as count_nonfinite
from plimsoll.kernels._numba._rows import merge_rows as merge_rows
from plimsoll.kernels._numba._unscale import unscale as unscale
from plimsoll.kernels._numba._update import update as update


def describe() -> str:
    """One line for `plimsoll doctor`."""
    return f"numba {numba.__version__}, compiled code in {cache_folder() or 'memory only'}"
