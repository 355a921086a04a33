"""`cached_weights`: weights are cast once for all micro-batches between two optimizer steps."""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import StateError


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Generator[None]:
    """Inside the block each `fp8.Linear` of the model casts its weight once, and keeps it in FP8 until the end.

    For gradient accumulation: put the micro-batches into the block, the optimizer's step behind it. Results are the
    same bits. Kept are the codes in both layouts, two bytes a weight (under FSDP2, of the whole weight and not of a
    shard). A compiled model keeps them too, and is compiled once more for it.

    Raises `StateError` for a block within a block, and for a weight that is changed in place inside it, as far as torch
    counts changes: not those made through `.data`, nor any that compiled code would have to see.

    >>> from plimsoll.fp8 import Linear
    >>> layer = Linear(32, 16)
    >>> with cached_weights(layer):
    ...     for batch in torch.randn(4, 8, 32):
    ...         layer(batch).square().mean().backward()
    """
    layers = [cast("Any", module) for module in model.modules() if hasattr(module, "fp8_recipe")]
    if any(layer.fp8_caching for layer in layers):
        raise StateError(
            "fp8.cached_weights: expected no block around this one; got layers whose weights are cached already. Leave "
            "the inner one out."
        )
    for layer in layers:
        layer.fp8_caching = True
    try:
        yield
    finally:
        for layer in layers:
            layer.fp8_caching, layer.fp8_cached = False, None


def version_of(weight: Tensor) -> int:
    """Return how often the weight was visibly changed in place. Compilers and inference mode hide changes."""
    return -1 if torch.compiler.is_compiling() or weight.is_inference() else weight._version  # noqa: SLF001


def check_unchanged(weight: Tensor, version: int) -> None:
    """Raise `StateError` for a weight that was changed since it had this version."""
    now = version_of(weight)
    if now != version and -1 not in (now, version):
        raise StateError(
            "fp8.cached_weights: expected weights that stay as they are inside the block; got one that was changed in "
            "place since it was cast. End the block before the optimizer's step."
        )
