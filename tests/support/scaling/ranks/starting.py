"""Starts gloo ranks, each a process that runs every scenario of one worker script."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plimsoll.scaling import DynamicScaler, SpectralScaler
from tests.support import processes

HERE = Path(__file__).parent


def seen_by_ranks(worker: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw of every scenario."""
    _compile_kernels()
    results = [folder / f"{rank}.json" for rank in range(world)]
    processes.ranks(HERE / worker, [(folder / "store", rank, world, result) for rank, result in enumerate(results)])
    return [json.loads(result.read_text("utf-8")) for result in results]


def _compile_kernels() -> None:
    """Brings the kernels of a step into the cache. Ranks that start side by side would each compile them."""
    for scaler in (DynamicScaler("cpu"), SpectralScaler("cpu")):
        for dtype in (torch.float32, torch.float16):
            parameter = nn.Parameter(torch.ones(3, dtype=dtype))
            optimizer = torch.optim.SGD([parameter], lr=0.0)
            scaler.scale(torch.ones(()))
            parameter.grad = torch.ones(3, dtype=dtype)
            scaler.step(optimizer)
            scaler.update()
