"""Checks at the end: the loss, the gradients and the lasting state are finite."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from plimsoll.diagnosis.locating.tracing.nonfinite_trail import MemoryProvenance, NonfiniteResult
from plimsoll.diagnosis.locating.tracing.tensor_facts import count_nonfinite, readable
from plimsoll.tracing.tensors import Names, memory_of, tensors_in

_LOSS, _RESULT, _GRADIENT, _LEFT = range(4)


class EndChecks:
    """Looks at them, and keeps those that are not finite."""

    def __init__(self, trail: MemoryProvenance, leaves: Sequence[Tensor]) -> None:
        self._trail = trail
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self.reached: list[NonfiniteResult] = []

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves that gradients come to."""
        return list(self._leaves.values())

    def backward(self, tensors: Any) -> list[Tensor]:
        """Note a backward of these tensors; return the leaves that gradients come to."""
        roots = list(tensors_in(tensors))
        for root in roots:
            self._look("the loss", _LOSS, root.detach(), deliberate=True)
        leaves = _leaves(roots)
        self._leaves.update((id(leaf), leaf) for leaf in leaves)
        return leaves

    def loss(self, result: Any) -> None:
        """The closure has returned."""
        for x in tensors_in(result):
            alone = x.numel() == 1
            what = "the loss" if alone else "what the closure returned"
            self._look(what, _LOSS if alone else _RESULT, x.detach(), deliberate=alone)

    def gradients(self) -> None:
        """Gradients are there."""
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                self._look("gradient", _GRADIENT, leaf.grad, owner=leaf, deliberate=True)

    def left(self, names: Names, written: Mapping[int, Any]) -> None:
        """The step is over: of what has a name, and was written, what is not finite."""
        for what, tensor in names.lasting():
            if any(memory in written for memory in memory_of(tensor)):
                self._look(what, _LEFT, tensor.detach(), deliberate=False)

    def _look(self, what: str, rank: int, x: Tensor, *, deliberate: bool, owner: Tensor | None = None) -> None:
        plain = readable(x)
        if plain is None or not count_nonfinite(plain):
            return
        origins = self._trail.of(x)
        blame = origins if deliberate else frozenset(o for o in origins if not o.deliberate)
        if blame or not origins:
            was_there = not origins and rank in {_RESULT, _LEFT}
            if not was_there:
                self.reached.append(NonfiniteResult(what=what, rank=rank, origins=blame, tensor=x, owner=owner))


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that gradients of the roots come to."""
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves: dict[int, Tensor] = {id(root): root for root in roots if root.grad_fn is None and root.requires_grad}
    seen: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(leaves.values())
