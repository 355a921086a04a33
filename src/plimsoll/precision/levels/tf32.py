"""TF32 on and off, by ``fp32_precision`` alone: torch raises when it is mixed with the older flags.

The setting is the process's. It holds inside the context and is what it was before after it, so that a loop sets it for
its forward and step, and nothing outside these runs in TF32.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from plimsoll.errors import ArgumentError

_AMPERE = (8, 0)


def has_tf32(device: torch.device) -> bool:
    """Whether the device multiplies in TF32 itself."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _AMPERE


@contextlib.contextmanager
def tf32() -> Generator[None]:
    """Inside, CUDA's FP32 matrix products and convolutions run in TF32."""
    places = _places()
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _places() -> list[Any]:
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    if not all(hasattr(place, "fp32_precision") for place in places):
        raise ArgumentError(
            f"prepare: expected a torch with fp32_precision for the level tf32; got torch {torch.__version__}. "
            "Use torch 2.9 or later."
        )
    return places
