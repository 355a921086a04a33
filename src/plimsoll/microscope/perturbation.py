"""Small random changes of weights and float inputs, which alter roundings.

A value is multiplied by 1 + u, with u uniform and of a given root mean square. All passes of a draw, the reference's
too, have the same changes. Inputs of 16 bits are left alone: changed, they would have to be rounded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.watch.thread_casts import active_casts

LEAST, MOST = 2.0**-12, 2.0**-4


class Perturbation:
    """Changes of one model, others for each draw, and taken back at the end."""

    def __init__(self, root: nn.Module, size: float) -> None:
        """`size`: root mean square of the relative changes."""
        self.size = min(max(size, LEAST), MOST)
        self._draw = 0
        self._narrow: set[int] = set()  # arguments of 16 bits, which a reference has in more
        self._kept = [(p, p.detach().clone()) for p in root.parameters() if p.is_floating_point()]
        self._handle = root.register_forward_pre_hook(self._change_inputs, with_kwargs=True)

    def draw(self) -> None:
        """Change the weights, from what they were; and the inputs from now on."""
        self._draw += 1
        with torch.no_grad():
            for number, (p, kept) in enumerate(self._kept):
                p.copy_(self._changed(kept, number))

    def undo(self) -> None:
        """Put back what was there."""
        self._handle.remove()
        with torch.no_grad():
            for p, kept in self._kept:
                p.copy_(kept)

    def _changed(self, x: Tensor, number: int) -> Tensor:
        size = max(self.size, torch.finfo(x.dtype).eps)
        generator = torch.Generator().manual_seed(1_000_003 * self._draw + number)
        drawn = torch.rand(x.shape, generator=generator) - 0.5
        return (x * (1 + (12**0.5 * size) * drawn.to(x.device))).to(x.dtype)

    def _change_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        del module
        leaves, spec = pytree.tree_flatten((args, kwargs))
        changed = [self._input(x, -1 - place) for place, x in enumerate(leaves)]
        return pytree.tree_unflatten(changed, spec)

    def _input(self, x: Any, number: int) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point() and self._draw):
            return x
        if active_casts.reference is None and x.dtype.itemsize < 4:
            self._narrow.add(number)
        return x if number in self._narrow else self._changed(x, number)
