"""The autograd graph behind a loss: the leaves that it reaches, and the loss scale that it carries."""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

_NEAREST = 64  # nodes behind a loss among which its loss scale is looked for

# The number of the backward that runs on this thread, -1 for none. torch has it nowhere in public.
backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001


def leaves_of(roots: "list[Tensor]") -> dict[int, Tensor]:
    """The leaves that a backward from these tensors reaches, by identity; not those inside a checkpoint."""
    variables = (getattr(node, "variable", None) for node in _nodes(roots))
    return {id(found): found for found in variables if found is not None}


def is_scaled_by(root: Tensor, scale: Tensor) -> bool:
    """Whether the tensor was computed from a product with this very scale, not far behind."""
    for count, node in enumerate(_nodes([root])):
        if count == _NEAREST:
            return False
        if type(node).__name__ == "MulBackward0":
            try:
                other: Any = cast("Any", node)._saved_other  # noqa: SLF001  (documented in torch's autograd notes)
            except RuntimeError:  # an earlier backward has freed it
                continue
            if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
                return True
    return False


def _nodes(roots: "list[Tensor]") -> Iterator[object]:
    """The graph's nodes, nearest first."""
    wave: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(wave)
    while wave:
        yield from wave
        following = {node for known in wave for node, _ in known.next_functions if node is not None}
        wave = list(following - seen)
        seen |= following
