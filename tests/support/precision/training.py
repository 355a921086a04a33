"""Small models, data, and loops that several tests of the training step share."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.precision import LEVELS

HERE = [name for name, level in LEVELS.items() if level.fp8 != "unit"]  # which asks for a unit-scaled model
CAST = [name for name in HERE if LEVELS[name].casts]
SCALED = [name for name in HERE if LEVELS[name].scaled]


class Net(nn.Module):
    """A layer of each kind that levels treat differently, and what a checkpoint could forget."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(16, 1)
        self.register_buffer("shift", torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.embed(x) + self.shift))
        return self.head(self.drop(self.batch_norm(self.hidden(x))))


def net(drop: float = 0.0, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(drop)


def adamw(model: nn.Module, level: str = "fp32", lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4 if level == "fp16-pure" else 1e-8)


def batches(count: int, seed: int = 1, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(rows, 8, generator=generator) for _ in range(count)]
    return [(x, x[:, :1] - x[:, 1:2]) for x in xs]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def run(loop: Any, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Trains on the batches; the losses."""
    losses: list[float] = []
    for batch in data:
        with loop.forward():
            loss = loss_of(loop.model, batch)
        loop.step(loss)
        losses.append(loss.item())
    return losses


def run_closures(loop: Any, data: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """The same by closures; the outcomes."""
    return [loop.step(lambda batch=batch: loss_of(loop.model, batch)) for batch in data]


def contents(value: Any) -> Any:
    """A deep copy of a state in which tensors compare by their bits."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        return (str(value.dtype), tuple(value.shape), flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    return copy.deepcopy(value)


def overflowing(model: nn.Module, batch: tuple[Tensor, Tensor], factor: float = 1e3) -> Tensor:
    """A finite loss whose gradients overflow FP16 at a high scale, and not at a lower one."""
    return loss_of(model, batch) * factor


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The function, and a list that grows with each call."""
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return call, calls
