"""That ranks take one decision: what one of them found, all of them know."""

import sys
from typing import Any

import torch
from torch import Tensor


def agree(
    per_device: dict[torch.device, Tensor], found: Tensor, meshes: dict[int, Any], process_group: Any
) -> dict[torch.device, Tensor]:
    """The same dictionary, after the largest of all ranks' findings was written to each of its tensors.

    Ranks are those of `process_group` and of the meshes over which gradients are spread. A rank without gradients takes
    part with `found`, zero on the scale's device. Without groups nothing is communicated.
    """
    groups = [group for group in (process_group, *meshes.values()) if group is not None]
    if not groups:
        return per_device
    common = combined(per_device.values(), found.device) if per_device else found
    for group in groups:
        _reduce(common, group)
    if not per_device:
        per_device[common.device] = common
    for one in per_device.values():
        one.copy_(common, non_blocking=one.device.type != "cpu")
    return per_device


def combined(founds: Any, device: torch.device) -> Tensor:
    """One tensor of no dimension: 1 if any of those given is above 0, else 0; none of them is written to."""
    first, *others = [found.to(device, non_blocking=device.type != "cpu").reshape(()) for found in founds]
    if not others:
        return first.clone()
    return torch.stack([first, *others]).amax()


def _reduce(found: Tensor, group: Any) -> None:
    distributed = sys.modules["torch.distributed"]  # there is no group without it
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
