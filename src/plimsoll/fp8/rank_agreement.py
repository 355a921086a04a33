"""`agree`: one history of magnitudes for all ranks."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

_NAMES = ("fp8_history", "fp8_absmax", "fp8_gradient_history", "fp8_gradient_absmax")


def agree(model: nn.Module, process_group: object = None) -> None:
    """Give every rank the largest magnitudes of all ranks, in the histories of delayed scaling.

    Ranks see different batches, so their histories differ, and so do their scales; each rank undoes its own, and
    nothing else depends on them. Yet a checkpoint that one rank writes for all holds one history alone: call this
    before, and training resumed equals training not interrupted. One collective for the whole model; none without
    histories, or where there is no process group. All ranks must call it.
    """
    buffers = cast("Iterable[tuple[str, Tensor]]", model.named_buffers())
    found = [buffer for name, buffer in buffers if name.rpartition(".")[2] in _NAMES]
    if not found or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    together = torch.cat([buffer.flatten() for buffer in found])
    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group=process_group)  # pyright: ignore[reportArgumentType]
    parts = cast("tuple[Tensor, ...]", together.split([buffer.numel() for buffer in found]))
    for buffer, part in zip(found, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
