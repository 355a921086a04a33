"""A model that is as it was after whatever is done to it."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.watch.shadow.replay import buffers_of
from plimsoll.watch.shadow.rng_state import RandomState


@contextlib.contextmanager
def untouched(root: nn.Module) -> Generator[None]:
    """Context that restores gradients, buffers, attributes and generators exactly."""
    gradients = [(p, p.grad) for p in root.parameters()]
    random, buffers = RandomState({p.device for p in root.parameters()}), buffers_of(root)
    attributes = [(module, dict(vars(module))) for module in root.modules()]
    try:
        yield
    finally:
        random.restore()
        for p, g in gradients:
            p.grad = g
        for (module, before), kept in zip(attributes, buffers, strict=True):
            _restore(module, before, kept)


def _restore(module: nn.Module, before: dict[str, Any], buffers: dict[str, Tensor]) -> None:
    found = vars(module)
    for name in found.keys() - before.keys():
        del found[name]
    found.update(before)
    held: dict[str, Tensor | None] = found["_buffers"]
    with torch.no_grad():
        for name, kept in buffers.items():
            now = held.get(name)
            if now is not None and now.shape == kept.shape:
                now.copy_(kept)
            else:
                held[name] = kept
