"""Drawing a parameter anew: unit variance for weights, zeros, ones."""

import zlib

import torch
from torch import Tensor

from plimsoll.unit.changes import ParameterChange


@torch.no_grad()
def draw(parameter: Tensor, change: ParameterChange, *, seed: int | None, name: str) -> None:
    """Fills the parameter; on the meta device, and where it is kept as it was, it does nothing.

    With a seed each parameter has its own stream, of the seed and its name, drawn on the CPU: the values depend on
    neither the device, nor the order, nor what else the model has. Without one, torch's own generator draws. A
    distributed tensor is always drawn by torch, which keeps its shards in step.
    """
    if parameter.is_meta or change.draw == "keep":
        return
    if change.draw != "normal":
        parameter.fill_(0.0 if change.draw == "zeros" else 1.0)
    elif seed is None or type(parameter.data) is not Tensor:
        parameter.normal_(std=change.std)
    else:
        stream = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()) << 16)
        parameter.copy_(torch.empty(parameter.shape).normal_(std=change.std, generator=stream))
