"""The dispatch mode that sees every operation of a closure.

It calls each operation as it came, with the same arguments, and has `Call` look at the result. In a forward with
gradients it also keeps, by the autograd node's sequence number, where the operation was called from: an operation of
the backward is told by its node.
"""

import bisect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.diagnosis.locating.tracing.nonfinite_trail import Forward, Origin, Trail
from plimsoll.diagnosis.locating.tracing.operation_check import Call
from plimsoll.diagnosis.locating.tracing.operation_schema import bound, facts_of
from plimsoll.diagnosis.locating.tracing.tensor_facts import memory_of

_C = cast("Any", torch)._C  # noqa: SLF001


class Witness(TorchDispatchMode):
    """Sees the operations inside its context."""

    def __init__(self, flush_share: float | None, about_to_write: Callable[[Tensor], None] | None) -> None:
        super().__init__()
        self.trail = Trail()
        self.flushed: Origin | None = None
        self.operations = 0
        self.backwards = 0
        self.scaling = False  # a scaler multiplies the loss
        self.roots: dict[int, Any] = {}
        self._flush_share, self._about_to_write = flush_share, about_to_write
        self._forwards: dict[int, Forward] = {}
        self._numbers: list[int] = []  # of the nodes noted, ascending
        self._last: Forward | None = None  # of the backward: what sums of gradients belong to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        given = bound(facts, args, kwargs)
        self.operations += 1
        call = Call(self, facts, func, given)
        with _C.DisableTorchFunction(), torch.no_grad():
            call.begin()
        result = func(*args, **kwargs)
        with _C.DisableTorchFunction(), torch.no_grad():
            call.end(result)
        return result

    def about_to_write(self, x: Tensor) -> None:
        """An operation changes memory; if it was there before the closure began, its content is kept."""
        for memory in memory_of(x):
            if self.trail.birth(memory) is None:
                self.trail.written.setdefault(memory, x)
                if self._about_to_write is not None:
                    self._about_to_write(x)

    def note(self, forward: Forward, number: int) -> Forward:
        """Notes a forward operation by its node's number; the first of a node is the one that names it."""
        known = self._forwards.get(number)
        if known is None:
            bisect.insort(self._numbers, number)
        elif known.thread == forward.thread:
            return known
        self._forwards[number] = forward
        return forward

    def forward_of(self, node: Any) -> Forward | None:
        """The forward operation that a node differentiates; between nodes, the last one."""
        if node is None:
            return self._last
        if node.name().endswith("AccumulateGrad"):
            return None
        place = bisect.bisect_right(self._numbers, node._sequence_nr())  # noqa: SLF001
        self._last = self._forwards[self._numbers[place - 1]] if place else None
        return self._last

    def flush_share(self) -> float | None:
        """The share from which on a flush is a fault; None once there is one, or if none is asked for."""
        return self._flush_share if self.flushed is None else None
