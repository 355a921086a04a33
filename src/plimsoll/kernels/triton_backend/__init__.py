"""The Triton backend: one launch and one pass over memory.

It is for NVIDIA GPUs; in Triton's interpreter also on a CPU.
"""

import torch

from plimsoll.errors import BackendError, MissingExtraError

try:
    import triton
except ImportError as e:
    raise MissingExtraError(
        "triton backend: expected the package triton; got none. It comes with a GPU build of torch. "
        "Else install it: pip install triton"
    ) from e

from plimsoll.kernels.torch_backend import compare as compare
from plimsoll.kernels.triton_backend.casting.fp8 import fp8_cast as fp8_cast
from plimsoll.kernels.triton_backend.casting.launch import (
    block_cast as block_cast,
    block_pack as block_pack,
    cast as cast,
    pack as pack,
)
from plimsoll.kernels.triton_backend.measuring import interpreted, measure as measure, measure_one as measure_one
from plimsoll.kernels.triton_backend.nonfinite import count_nonfinite as count_nonfinite
from plimsoll.kernels.triton_backend.unscaling import unscale as unscale
from plimsoll.kernels.triton_backend.updates import update as update

QUEUES = True  # a launch costs more of the host's time than all else


def describe() -> str:
    """Return Triton's version and device; raise `BackendError` if it cannot run."""
    if interpreted():
        return f"Triton {triton.__version__}, interpreter"
    if not torch.cuda.is_available():
        raise BackendError(
            "triton backend: expected a GPU that torch can use, or TRITON_INTERPRET=1 set before Triton is imported; "
            "got neither."
        )
    return f"Triton {triton.__version__}, {torch.cuda.get_device_name()}"
