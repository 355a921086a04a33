"""Small random changes of weights and of a model's float inputs, so that roundings fall out otherwise.

A value is multiplied by 1 + u, with u uniform and of a given root mean square. Both passes of a draw have the same
values: the reference is that of the changed model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.watch.session import WatchSession
from plimsoll.watch.shadow.replay import active_casts, as_wide

LEAST, MOST = 2.0**-12, 2.0**-4


class Perturbation:
    """Changes of one model, drawn anew for each draw, and taken back."""

    def __init__(self, root: nn.Module, size: float) -> None:
        """`size` is the root mean square of the relative changes; weights of fewer bits change by their own step."""
        self._root, self.size = root, min(max(size, LEAST), MOST)
        self._generator = torch.Generator().manual_seed(0)
        self._kept = [(p, p.detach().clone()) for p in root.parameters() if p.is_floating_point()]
        self._inputs: list[Any] = []
        self._place = 0
        self._handle = root.register_forward_pre_hook(self._change_inputs, with_kwargs=True, prepend=True)

    def draw(self) -> None:
        """Change the weights, from what they were."""
        self._inputs, self._place = [], 0
        with torch.no_grad():
            for p, kept in self._kept:
                p.copy_(self._changed(kept))

    def undo(self) -> None:
        """Put back what was there."""
        self._handle.remove()
        with torch.no_grad():
            for p, kept in self._kept:
                p.copy_(kept)

    def _changed(self, x: Tensor) -> Tensor:
        size = max(self.size, torch.finfo(x.dtype).eps)
        drawn = torch.rand(x.shape, generator=self._generator) - 0.5
        factor = 1 + (12**0.5 * size) * drawn.to(x.device)
        return (x.detach() * factor).to(x.dtype)

    def _change_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        del module
        if WatchSession.repeating:  # the same as in the real pass
            place = self._place % max(len(self._inputs), 1)
            given = self._inputs[place] if self._inputs else (args, kwargs)
            self._place += 1
            wide = active_casts.reference
            return given if wide is None else pytree.tree_map_only(Tensor, lambda x: as_wide(x, wide), given)
        changed = pytree.tree_map_only(Tensor, self._input, (args, kwargs))
        self._inputs.append(changed)
        return changed

    def _input(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        return self._changed(x).requires_grad_(x.requires_grad)
