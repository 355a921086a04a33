"""Which units' gradients broke: the culprit's, and those of all that the backward came to after it."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.scaling.layerwise.scaled_modules import Layers


def broken_units(layers: Layers) -> set[int]:
    """The units with a non-finite gradient; reads all of their parameters', so it is for steps known to be skipped.

    A unit without gradients of its own (frozen, say) is taken to be as the next one nearer to the loss.
    """
    order = layers.from_the_loss()
    counts: dict[torch.device, Tensor] = {}
    seen: set[int] = set()
    for unit in order:
        for values in _gradients(layers.modules[unit].parameters()):
            seen.add(unit)
            if values.device not in counts:
                counts[values.device] = kernels.new_counts(len(layers.names), values.device)
            kernels.count_nonfinite_into([values], counts[values.device], unit)
    totals = [0] * len(layers.names)
    for these in counts.values():
        found = cast("list[int]", these.tolist())
        totals = [a + b for a, b in zip(totals, found, strict=True)]
    broken: set[int] = set()
    beyond = False
    for unit in order:
        beyond = totals[unit] > 0 if unit in seen else beyond
        if beyond:
            broken.add(unit)
    return broken


def _gradients(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    for parameter in parameters:
        g = parameter.grad
        if g is not None:
            plain = g.coalesce().values() if g.is_sparse else g
            plain = torch.view_as_real(plain) if plain.is_complex() else plain
            yield plain.detach()
