"""Gradients of micro-batches that are added up in 16 bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, diagnose


def summed(path: Path, dtype: torch.dtype, gradient: Callable[[Tensor], Tensor], micro: int) -> list[Finding]:
    """What is said of two steps of so many micro-batches, whose gradients are made of standard normal numbers."""
    torch.manual_seed(0)
    model = nn.Linear(32, 8, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with pl.watch(model, optimizer, run=path, every=2, collect=("weights",)):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(micro):
                (model.weight.float() * gradient(torch.randn(8, 32))).sum().backward()
            optimizer.step()
    return diagnose(path, rules=["gradients-mishandled"])


SUMS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor], int, bool]] = {
    "of one sign": (torch.bfloat16, lambda x: 1 + 0.1 * x, 1024, True),
    "of random signs": (torch.bfloat16, lambda x: x, 1024, False),
    "of one sign in FP32": (torch.float32, lambda x: 1 + 0.1 * x, 1024, False),
    "of one sign in FP16": (torch.float16, lambda x: 1 + 0.1 * x, 512, False),
    "of few micro-batches": (torch.bfloat16, lambda x: 1 + 0.1 * x, 64, False),
    "of gradients that are mostly zero": (torch.bfloat16, lambda x: x * (x.abs() > 1.5), 256, False),
    "of gradients that are all zero": (torch.bfloat16, lambda x: x * 0, 128, False),
}


@pytest.mark.parametrize("name", SUMS)
def test_micro_batches_that_a_16_bit_sum_rounds_away_are_named(name: str, tmp_path: Path) -> None:
    dtype, gradient, micro, wrong = SUMS[name]
    found = summed(tmp_path / "run", dtype, gradient, micro)
    assert [(f.severity, f.evidence["cause"]) for f in found] == [
        ("warning", "rounded away as they are added up")
    ] * wrong
    assert all("1024 micro-batches are accumulated in BF16" in f.meaning for f in found)


def carried(path: Path, order: list[type[torch.optim.Optimizer]], cleared: type[torch.optim.Optimizer]) -> list[str]:
    """Whose gradients are said to be kept, of two optimizers of which one clears without a trace."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = [kind(part.parameters(), lr=1e-3) for kind, part in zip(order, model, strict=True)]
    with pl.watch(model, run=path, every=5, collect=("weights",), quiet=True):
        for _ in range(12):
            model(torch.randn(16, 8)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                for p in optimizer.param_groups[0]["params"] if isinstance(optimizer, cleared) else ():
                    p.grad.data.zero_()
    events = [e.details for e in pl.Run(path).events() if e.details.get("fact") == "carried over"]
    return [str(details["optimizer"]) for details in events]


@pytest.mark.parametrize("cleared", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_that_one_optimizer_clears_do_not_hide_those_that_another_keeps(
    cleared: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    other = "Adam" if cleared is torch.optim.SGD else "SGD"
    for number, order in enumerate(([torch.optim.SGD, torch.optim.Adam], [torch.optim.Adam, torch.optim.SGD])):
        assert carried(tmp_path / str(number), order, cleared) == [other]
