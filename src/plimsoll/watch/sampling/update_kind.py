"""How an optimizer's step reaches 16-bit weights: what a run must tell of it for others to judge weights that stay.

Whoever sees to it tells, in the optimizer's attribute `plimsoll_update`: "masters", "stochastic" or "kahan". The watch
says it in an event, when it first meets the weights and whenever it has changed since.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plimsoll.watch.session import Core

OWN = "own"  # as the optimizer does it itself
_NARROW = (torch.float16, torch.bfloat16)


class Kinds:
    """What one watch has said of each 16-bit weight."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._told: dict[str, str] = {}

    def tell(self, optimizer: Any, named: Mapping[str, Tensor]) -> None:
        """Says how the optimizer steps these weights, as far as that is not known."""
        kind = kind_of(optimizer)
        new = [name for name, p in named.items() if p.dtype in _NARROW and self._told.get(name) != kind]
        if new:
            self._told.update(dict.fromkeys(new, kind))
            who = type(optimizer).__name__
            message = f"{who} steps {len(new)} 16-bit weights: {kind}"
            self._core.say("update", message, optimizer=who, update=kind, parameters=new)


def kind_of(optimizer: Any) -> str:
    """What the optimizer tells of its step."""
    return str(getattr(optimizer, "plimsoll_update", OWN))
