"""The bytes that a twin needs, and the bytes that are free."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from plimsoll.watch.shadow.replay import is_narrow

_MEMINFO = Path("/proc/meminfo")


def twin_bytes(parameters: Iterable[Tensor], wide: torch.dtype = torch.float32) -> dict[torch.device, int]:
    """Return the bytes of a twin's copied weights and its gradients, by device.

    Its activations come on top: those of one step in the wide dtype.
    """
    sizes: dict[torch.device, int] = {}
    for p in parameters:
        sharded = hasattr(p, "placements")
        copied = is_narrow(p.dtype, wide) or sharded
        size = p.numel() * max(wide.itemsize, p.dtype.itemsize)
        sizes[p.device] = sizes.get(p.device, 0) + size * (copied + p.requires_grad)
    return sizes


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device. None where nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    names: dict[str, int] = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_AVPHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def missing(parameters: Iterable[Tensor], wide: torch.dtype = torch.float32) -> str | None:
    """Return why a twin does not fit, with the bytes that it needs; None where it may."""
    for device, needed in twin_bytes(parameters, wide).items():
        free = free_bytes(device)
        if free is not None and needed > free:
            return (
                f"its twin needs {needed:,} bytes on {device} for weights and gradients, and {free:,} are free: watch "
                "a smaller model of the same kind, or free memory"
            )
    return None
