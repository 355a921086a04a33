"""A model lent to an audit: whatever a forward and a backward read and change is its own again afterwards.

- Parameters are replaced by fresh leaves over the same memory: gradients, hooks and optimizers of the real ones are not
  touched. Buffers are replaced by copies.
- Each module's attributes, and its lists, dictionaries and sets.
- The random generators of Python, NumPy and torch.
- Watches do not record. Code of torch.compile runs eagerly.
"""

import contextlib
import sys
from collections.abc import Generator, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.session import nothing_recorded
from plimsoll.watch.shadow.fp32_replay import borrowed, buffers_of
from plimsoll.watch.shadow.rng_state import RandomState

_TORCHS_OWN = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def lent(roots: Iterable[nn.Module], devices: set[torch.device]) -> Generator[dict[int, nn.Parameter]]:
    """Inside, the modules are an audit's: gives the leaf of each parameter, by the parameter's identity."""
    random = RandomState(devices)
    leaves: dict[int, nn.Parameter] = {}
    copies: dict[int, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_silent())
            stack.enter_context(_eagerly())
            stack.enter_context(torch.enable_grad())
            for root in roots:
                stack.enter_context(borrowed(root, {}, buffers_of(root)))
                for module in root.modules():
                    _lend(module, leaves, copies)
            yield leaves
    finally:
        random.restore()


def _lend(module: nn.Module, leaves: dict[int, nn.Parameter], copies: dict[int, Any]) -> None:
    inside = module.__dict__
    for name, p in inside["_parameters"].items():
        if p is not None:
            inside["_parameters"][name] = _leaf(p, leaves)
    for name, value in list(inside.items()):
        if name not in _TORCHS_OWN and type(value) in (list, dict, set):
            inside[name] = _copied(value, leaves, copies)


def _leaf(p: nn.Parameter, leaves: dict[int, nn.Parameter]) -> nn.Parameter:
    if any(p is leaf for leaf in leaves.values()):  # lent already: a loss that has the model in it
        return p
    if id(p) not in leaves:
        leaves[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    return leaves[id(p)]


def _copied(value: Any, leaves: dict[int, nn.Parameter], copies: dict[int, Any]) -> Any:
    """A container of a module, copied once however many modules have it; parameters in it (of an LSTM) are leaves."""
    key = id(value)
    if key not in copies:
        copied = value.copy()
        if isinstance(copied, list):
            for i, x in enumerate(cast("list[Any]", copied)):
                copied[i] = _leaf(x, leaves) if isinstance(x, nn.Parameter) else x
        copies[key] = copied
    return copies[key]


@contextlib.contextmanager
def gradients_kept(ends: Iterable[Tensor], ours: Iterable[Tensor]) -> Generator[None]:
    """Inside, a backward from these tensors may add to all that it reaches; only our own leaves keep that."""
    own = {id(x) for x in ours}
    kept = [(leaf, leaf.grad) for leaf in _leaves_of(ends) if id(leaf) not in own]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in kept:
            leaf.grad = gradient


def _leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose gradients a backward from these would add to."""
    nodes: list[Any] = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen, found = set(nodes), list[Tensor]()
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


@contextlib.contextmanager
def _silent() -> Generator[None]:
    """Inside, no watch hears of anything."""
    if not torch_hooks.listeners():
        yield
        return
    with nothing_recorded(), torch_hooks.exclusive(cast("Any", _Deaf())):
        yield


class _Deaf:
    """A listener that hears nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: object) -> None:
    return


def _eagerly() -> contextlib.AbstractContextManager[Any]:
    """Inside, nothing compiled runs: what is compiled calls no operation that could be looked at."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
