"""State of a model, saved before an audit and restored after it.

- Parameters are replaced by new leaves over the same memory, so that gradients, hooks and optimizers of the real ones
  are not touched. Buffers are replaced by copies.
- Attributes of each module, and its lists, dictionaries and sets, are restored.
- The random generators of Python, NumPy and torch are restored.
- Watches do not record. Code of torch.compile runs eagerly.
"""

import contextlib
from collections.abc import Generator, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import leaves_of
from plimsoll.watch.session import nothing_recorded
from plimsoll.watch.shadow.replay import borrowed, buffers_of, eagerly
from plimsoll.watch.shadow.rng_state import RandomState

_MODULE_STATE = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def borrowed_models(roots: Iterable[nn.Module], devices: set[torch.device]) -> Generator[dict[int, nn.Parameter]]:
    """Lend the modules to an audit, and yield each parameter's leaf by its id."""
    random = RandomState(devices)
    leaves: dict[int, nn.Parameter] = {}
    copies: dict[int, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_watches())
            stack.enter_context(eagerly())  # compiled code calls no operation that can be observed
            stack.enter_context(torch.enable_grad())
            for root in roots:
                stack.enter_context(borrowed(root, {}, buffers_of(root)))
                for module in root.modules():
                    _replace_state(module, leaves, copies)
            yield leaves
    finally:
        random.restore()


def _replace_state(module: nn.Module, leaves: dict[int, nn.Parameter], copies: dict[int, Any]) -> None:
    attributes = module.__dict__
    for name, p in attributes["_parameters"].items():
        if p is not None:
            attributes["_parameters"][name] = _leaf(p, leaves)
    for name, value in list(attributes.items()):
        if name not in _MODULE_STATE and type(value) in (list, dict, set):
            attributes[name] = _copied(value, leaves, copies)


def _leaf(p: nn.Parameter, leaves: dict[int, nn.Parameter]) -> nn.Parameter:
    if any(p is leaf for leaf in leaves.values()):  # replaced already: a loss that contains the model
        return p
    if id(p) not in leaves:
        leaves[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    return leaves[id(p)]


def _copied(value: Any, leaves: dict[int, nn.Parameter], copies: dict[int, Any]) -> Any:
    """Return a copy of a module's container, one for all modules that share it.

    Parameters in it (as in an LSTM) are replaced by leaves.
    """
    key = id(value)
    if key not in copies:
        copied = value.copy()
        if isinstance(copied, list):
            for i, x in enumerate(cast("list[Any]", copied)):
                copied[i] = _leaf(x, leaves) if isinstance(x, nn.Parameter) else x
        copies[key] = copied
    return copies[key]


@contextlib.contextmanager
def gradients_restored(ends: Iterable[Tensor], audited: Iterable[Tensor]) -> Generator[None]:
    """Restore the gradients of leaves that these tensors reach, but the audited."""
    own = {id(x) for x in audited}
    saved = [(leaf, leaf.grad) for leaf in leaves_of(list(ends)).values() if id(leaf) not in own]
    for leaf, _ in saved:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved:
            leaf.grad = gradient


@contextlib.contextmanager
def _without_watches() -> Generator[None]:
    """Keep watches from recording."""
    if not torch_hooks.listeners():
        yield
        return
    with nothing_recorded(), torch_hooks.exclusive(cast("Any", _NoListener())):
        yield


class _NoListener:
    """Listener that ignores every event."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: object) -> None:
    return
