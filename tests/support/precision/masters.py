"""The small network, the loop and the formats that the tests of optimizers over 16-bit weights share."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plimsoll.precision.weights.base import SixteenBitOptimizer

FORMATS = {"fp16": (torch.float16, False), "bf16": (torch.bfloat16, False), "bf16, compact": (torch.bfloat16, True)}
formats = pytest.mark.parametrize(("dtype", "compact"), FORMATS.values(), ids=FORMATS)


def network(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def backward(model: nn.Module, step: int, scaler: Any = None) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss = model(x).float().pow(2).mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_float32(masters: SixteenBitOptimizer) -> list[Tensor]:
    return [masters.master_of(pair.weight) for pair in masters.pairs]
