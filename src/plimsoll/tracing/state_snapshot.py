"""State that a closure changes, noted beforehand, so that it can be restored.

Contents of tensors that were there before are copied right before an operation first writes them: parameters, buffers,
gradients, moments, a scaler's scale. In addition: which tensors the gradients, the modules' attributes, the optimizers'
state and the scalers' attributes are, and the random generators.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.tracing.tensors import parts_of
from plimsoll.watch.shadow.replay import RandomState

_ABSENT = object()
_OURS = ("plimsoll.scaling", "torch.amp")


class Before:
    """All as it was."""

    def __init__(self, model: nn.Module | None) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        self._random = RandomState({x.device for x in tensors} | _cuda())
        for module in () if model is None else model.modules():
            self._module(module)
        if model is not None:
            self.gradients_of(model.parameters())
            for buffer in model.buffers():
                self.about_to_write(buffer)  # a few operations write them without saying so

    def gradients_of(self, leaves: Iterable[Tensor]) -> None:
        """Notes the gradients of tensors not seen yet."""
        for leaf in leaves:
            if id(leaf) not in self._gradients:
                self._gradients[id(leaf)] = (leaf, leaf.grad)

    def about_to_write(self, x: Tensor) -> None:
        """An operation is about to write memory that was there before."""
        for part in parts_of(x):
            storage = part.untyped_storage()
            key = int(cast("Any", storage)._cdata)  # noqa: SLF001
            if key not in self._contents:
                self._contents[key] = (storage, storage.clone())

    def optimizer(self, optimizer: Any) -> None:
        """Notes an optimizer that is about to step."""
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        for group in optimizer.param_groups:
            self.gradients_of(group["params"])
            self._mapping(group, deep=False)
        for state in optimizer.state.values():
            if isinstance(state, dict):
                named = cast("dict[Any, Any]", state)
                self._mapping(named, deep=False)
                for value in named.values():  # LBFGS appends to lists of its own
                    if isinstance(value, list | deque):
                        self._sequence(cast("list[Any]", value))
        self._mapping(optimizer.state, deep=False)
        self._mapping(
            cast("dict[str, Any]", vars(optimizer)), deep=False
        )  # counters of steps, as for stochastic rounding

    def scaler(self, scaler: Any) -> None:
        """Notes a loss scaler that is about to be used."""
        self._remember(scaler)

    def put_back(self) -> None:
        """Makes all as it was."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()
            for storage, content in self._contents.values():
                if storage.nbytes() != content.nbytes():
                    storage.resize_(content.nbytes())
                storage.copy_(content)
            for leaf, grad in self._gradients.values():
                leaf.grad = grad
        self._random.restore()

    def _module(self, module: nn.Module) -> None:
        inside = vars(module)
        for mapping in (inside, *(inside[kind] for kind in ("_parameters", "_buffers", "_modules"))):
            self._mapping(mapping, deep=False)
        for p in module.parameters(recurse=False):
            self._data(p)

    def _data(self, p: Tensor) -> None:
        content = p.data
        place = p.data_ptr() if type(p) is nn.Parameter else None

        def undo() -> None:
            if place is not None and p.data_ptr() != place:
                p.data = content

        self._undo.append(undo)

    def _mapping(self, mapping: MutableMapping[Any, Any], *, deep: bool = True) -> None:
        before = dict(mapping)

        def undo() -> None:
            for key in [key for key in mapping if key not in before]:
                del mapping[key]
            for key, value in before.items():
                if mapping.get(key, _ABSENT) is not value:
                    mapping[key] = value

        self._undo.append(undo)
        for value in before.values() if deep else ():
            self._remember(value)

    def _remember(self, value: Any) -> None:
        """A scaler's part: containers, tensors, and objects of the scalers' own."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            before = value.detach().clone()
            self._undo.append(functools.partial(_copy, value, before))
        elif isinstance(value, dict):
            self._mapping(cast("dict[Any, Any]", value))
        elif isinstance(value, list | deque):
            self._sequence(cast("list[Any]", value))
        elif type(value).__module__.startswith(_OURS):
            if hasattr(value, "__dict__"):
                self._mapping(cast("dict[str, Any]", vars(value)))
            self._slots(value)

    def _sequence(self, value: "list[Any] | deque[Any]") -> None:
        before = list(value)

        def undo() -> None:
            value.clear()
            value.extend(before)

        self._undo.append(undo)
        for item in before:
            self._remember(item)

    def _slots(self, value: Any) -> None:
        names = [name for kind in type(value).__mro__ for name in _slot_names(kind)]
        before = {name: getattr(value, name) for name in names if hasattr(value, name)}
        if not before:
            return

        def undo() -> None:
            for name, content in before.items():
                object.__setattr__(value, name, content)

        self._undo.append(undo)
        for content in before.values():
            self._remember(content)


def _copy(x: Tensor, content: Tensor) -> None:
    x.copy_(content)


def _slot_names(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in {"__dict__", "__weakref__"} and not name.startswith("__")]


def _cuda() -> set[torch.device]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return set()
    return {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
