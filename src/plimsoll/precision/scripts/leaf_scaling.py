"""A backward whose gradients are scaled inside its graph, and unscaled at the graph's leaves."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

# Identifies the backward that runs on this thread, -1 for none. torch has no public way to ask.
_backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001
_WIDE = (torch.float32, torch.float64)  # dtypes of losses with enough range for the scale


def roots(tensors: Any, kwargs: Any) -> list[Tensor] | None:
    """Return the tensors that a backward starts from, or None if the backward must not be scaled."""
    inputs = kwargs.get("inputs")
    if not isinstance(tensors, Tensor | list | tuple) or not isinstance(inputs, Tensor | list | tuple | None):
        return None
    listed: list[Any] = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    asked: list[Any] = [inputs] if isinstance(inputs, Tensor) else [*(inputs or ())]
    plain = all(isinstance(x, Tensor) and x.is_leaf for x in asked)  # gradients of inner tensors are scaled
    if kwargs.get("grad_variables") is not None or not listed or not plain:
        return None
    fit = all(isinstance(x, Tensor) and x.requires_grad for x in listed)
    return cast("list[Tensor]", listed) if fit else None


def seeds(roots: Sequence[Tensor], given: Any, factor: float) -> list[Tensor] | None:
    """Return the scaled initial gradients; None if torch will raise, or if the dtype lacks the range."""
    grads: list[Any] = [given] if given is None or isinstance(given, Tensor) else list(given)
    if len(grads) == 1 and grads[0] is None:
        grads *= len(roots)
    if len(grads) != len(roots) or any(root.dtype not in _WIDE for root in roots):
        return None
    if any(grad is None and root.numel() != 1 for root, grad in zip(roots, grads, strict=True)):
        return None
    return [
        torch.full_like(root, factor) if grad is None else grad * factor
        for root, grad in zip(roots, grads, strict=True)
    ]


@contextlib.contextmanager
def true_at_leaves(roots: Sequence[Tensor], inverse: float, *, nested: bool = False) -> Generator[list[Tensor]]:
    """Inside, one backward from these tensors multiplies the gradients of its leaves by `inverse`.

    A backward nested in it does not run these hooks. In a backward that a re-entrant checkpoint runs, only parameters
    are such leaves. The others stand for the checkpoint's inputs, and their gradients continue through the outer graph.
    """
    task = [-1]

    def see(_: Tensor) -> None:
        task[0] = _backward_running()

    def divide(g: Tensor | None) -> Tensor | None:
        return None if g is None or _backward_running() != task[0] else g * inverse

    leaves = [leaf for leaf in _leaves(roots) if not nested or isinstance(leaf, torch.nn.Parameter)]
    handles = [_hook_first(leaf, divide) for leaf in leaves]
    handles += [_hook_first(root, see) for root in roots]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def _hook_first(x: Any, hook: Callable[..., Any]) -> Any:
    """Register a hook that runs before the existing ones."""
    handle, hooks = x.register_hook(hook), x._backward_hooks  # noqa: SLF001  (torch calls them in its order)
    if len(hooks) > 1:
        others = list(hooks.items())[:-1]
        for key, _ in others:  # torch reads the underlying dict, where move_to_end of an OrderedDict has no effect
            del hooks[key]
        hooks.update(others)
    return handle


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that a graph ends in, each once."""
    found = {id(root): root for root in roots if root.grad_fn is None}
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None) if not node.next_functions else None
        if leaf is not None:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return list(found.values())
