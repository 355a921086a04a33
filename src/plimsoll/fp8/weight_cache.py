"""`cached_weights`: one cast of weights for all micro-batches of a step."""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import StateError


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Generator[None]:
    """Cast the weight of each `fp8.Linear` of the model once inside the block.

    For gradient accumulation: run the micro-batches inside the block and the step of the optimizer after it. Results
    have the same bits. The cache has the codes in both layouts, two bytes per weight (under FSDP2, of the whole
    weight). A compiled model has a cache too, and is compiled once more for it.

    Args:
        model: The model.

    Raises:
        StateError: The block is within another, or a weight is changed in place inside it. Changes through `.data`, or
            in compiled code, are not seen.

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
    """Return the weight's count of in-place changes, or -1 if it has none."""
    # Compiled code and inference mode have no version counter.
    return -1 if torch.compiler.is_compiling() or weight.is_inference() else weight._version  # noqa: SLF001


def check_unchanged(weight: Tensor, version: int) -> None:
    """Raise `StateError` if the weight was changed since this version."""
    now = version_of(weight)
    if now != version and -1 not in (now, version):
        raise StateError(
            "fp8.cached_weights: expected weights that do not change inside the block; got one that was changed in "
            "place since it was cast. End the block before the optimizer's step."
        )
