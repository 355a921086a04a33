"""What the tests of the watch share: small models, a loop, and an independent record of what a run should hold."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def batches(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    data: Iterable[Tensor],
    scaler: torch.amp.GradScaler | None = None,
) -> list[float]:
    """The plainest of loops; returns the losses."""
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


def same(found: Spectrum, expected: Spectrum | Tensor) -> bool:
    """Whether two spectra have the same counts and extremes, and the same sums but for their rounding."""
    if isinstance(expected, Tensor):
        expected = pl.measure(expected.detach())
    counts = ("count", "zeros", "nans", "pos_infs", "neg_infs", "min", "max", "absmin", "absmax")
    return (
        all(repr(getattr(found, name)) == repr(getattr(expected, name)) for name in counts)
        and (found.binades == expected.binades).all()
        and all(
            abs(getattr(found, name) - getattr(expected, name)) <= 1e-9 * max(expected.abssum, 1e-300)
            for name in ("sum", "abssum")
        )
    )


def only_run(path: Path) -> Run:
    run = Run(path)
    assert not run.problems, run.problems
    return run
