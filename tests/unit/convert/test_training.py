"""Converted models train: of every make, by both optimizers, in FP32 and in emulated FP16 without a loss scale."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import plimsoll as pl
from plimsoll.unit import functional as U  # noqa: N812
from tests.support.cases import each
from tests.support.unit.models import CONVERTED, MODELS, converted

pytestmark = CONVERTED
STEPS = 15


def loss_of(found: Any, target: Tensor | None) -> Tensor:
    """The model's own loss, else the distance of its output from a fixed one."""
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if target is None:
        return next(leaf for leaf in leaves if leaf.dim() == 0)
    return U.mse_loss(leaves[0], target)


def losses(model: nn.Module, case: Any, optimizer: torch.optim.Optimizer, precision: str | None) -> list[float]:
    arguments, keywords = case.call
    torch.manual_seed(1)
    first = pytree.tree_leaves(model(*arguments, **keywords))
    scalar = any(isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point() for leaf in first)
    target = None if scalar else torch.randn(first[0].shape)
    found: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with contextlib.nullcontext() if precision is None else pl.emulate(precision):
            loss = loss_of(model(*arguments, **keywords), target)
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("precision", [None, "fp16"])
@each("name", MODELS)
def test_the_loss_falls(name: str, precision: str | None) -> None:
    case, model = converted(name)
    found = losses(model, case, pl.unit.optim.AdamW(model, lr=0.05), precision)
    assert all(map(torch.isfinite, map(torch.tensor, found)))
    assert found[-1] < 0.9 * found[0]


def test_torchs_own_optimizer_serves_too() -> None:
    case, model = converted("gpt2")
    found = losses(model, case, torch.optim.AdamW(model.parameters(), lr=0.01), None)
    assert found[-1] < 0.9 * found[0]
