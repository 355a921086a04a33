"""Tiny trainings for the tests of the guard, in emulated FP16 by a hand-written loop, and what they share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Guard

NEVER = 10**6  # steps between looks in the background, where a test looks by itself
Between = Callable[[int], object]


def wait_for_look(guard: Guard) -> None:
    """Wait until a check in the background has ended: on a busy machine a short training is over before it."""
    if guard._checker._thread is not None:
        guard._checker._thread.join()


class Faint(nn.Linear):
    """A linear layer whose gradients are `small` times as large as they should be."""

    small = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.small == 1.0 else self.small * y + (1 - self.small) * y.detach()


class Net(nn.Module):
    """Two hidden layers, and three beside them whose gradients can be made to shrink from each to the one before."""

    def __init__(self, small: float) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.side = nn.Sequential(Faint(8, 8), Faint(8, 8), Faint(8, 2))
        self.shrink(small)

    def shrink(self, small: float) -> None:
        for layer in self.side:
            layer.small = small

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x))))) + self.side(x)


def net(small: float = 1.0) -> Net:
    torch.manual_seed(0)
    return Net(small)


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :2] - x[:, 2:4]


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    x, y = batch(step)
    return (model(x).float() - y).square().mean() * factor


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    steps: range,
    *,
    factor: float = 1.0,
    between: Between = lambda step: None,
) -> list[float]:
    """The plainest of mixed-precision loops; `between` is called after each step. The losses."""
    losses = []
    for step in steps:
        with pl.emulate("fp16"):
            loss = loss_of(model, step, factor)
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
        between(step)
    return losses


def by_loop(loop: Any, steps: range, *, factor: float = 1.0, between: Between = lambda step: None) -> list[float]:
    """The same with a `Loop`."""
    losses = []
    for step in steps:
        with loop.forward():
            loss = loss_of(loop.model, step, factor)
        loop.step(loss)
        losses.append(loss.item())
        between(step)
    return losses


def looking(guard: Guard, every: int = 10) -> Between:
    """Looks after every so many steps, in the foreground."""
    return lambda step: guard.look() if step % every == every - 1 else None


def scaler_at(scale: float) -> pl.scaling.DynamicScaler:
    """A scaler that stays where it is but for overflow."""
    return pl.scaling.DynamicScaler("cpu", init_scale=scale, growth_interval=10**6)


def lost(run: Path, name: str, step: int) -> float:
    """The part of a gradient's values that are zero."""
    found = pl.Run(run).spectrum("gradients", name, step)
    return found.zeros / found.count


def acts(guard: Guard) -> list[tuple[str, str, str]]:
    return [(act.action, act.rule, act.outcome) for act in guard.acts]


def guard_events(run: Path) -> list[dict[str, Any]]:
    return [dict(event.details) for event in pl.Run(run).events() if event.kind == "guard"]


def finite(values: list[float]) -> bool:
    return all(math.isfinite(value) for value in values)
