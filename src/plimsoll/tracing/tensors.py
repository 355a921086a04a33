"""Tensors inside values, their memory, and their names."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.precision.training.batch_replay import variables_of
from plimsoll.watch.names import ROOT, clean, unwrapped

# -- tensors inside arguments, results and variables, and their memory -------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result: itself, or those in its containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in cast("Iterable[Any]", value):
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from tensors_in(item)


def memory_of(x: Tensor) -> tuple[int, ...]:
    """The identities of the memory that a tensor lies in; those of views are the same."""
    memories: list[int] = []
    for part in parts_of(x):
        try:
            memories.append(int(cast("Any", part.untyped_storage())._cdata))  # noqa: SLF001
        except (RuntimeError, NotImplementedError):  # one without memory of its own
            continue
    return tuple(memories)


def parts_of(x: Tensor) -> Sequence[Tensor]:
    """The tensors with memory that a tensor is made of."""
    inside = cast("Any", x)
    if x.is_sparse:
        return [inside._values()]  # noqa: SLF001
    local = getattr(inside, "_local_tensor", None)
    return [local] if isinstance(local, Tensor) else [x]


def known_tensors(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a variable, by how they are reached: x, batch['x'], pair[0]."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth > 3:
        return
    elif isinstance(value, list | tuple):
        for index, item in enumerate(itertools.islice(cast("Sequence[Any]", value), 64)):
            yield from known_tensors(item, f"{name}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in itertools.islice(cast("dict[Any, Any]", value).items(), 64):
            yield from known_tensors(item, f"{name}[{key!r}]", depth + 1)


# -- names: parameters, buffers, moments, and the closure's variables --------------------------------------------------


class Names:
    """The names of modules, and of the memory of tensors."""

    def __init__(self, closure: Callable[[], Any], model: nn.Module | None) -> None:
        self._model = model
        self._modules: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._lasting: list[tuple[str, Tensor]] = []
        self._gradients: dict[int, str] = {}  # memory of a gradient -> the name of the tensor that it is of
        for variable, value in variables_of(closure).items():
            for name, x in known_tensors(value, variable):
                self._take(f"the input {name}", x)

    def learn(self, roots: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
        """Takes in the modules that ran and the optimizers that stepped."""
        models = list({id(unwrapped(root)): unwrapped(root) for root in roots}.values())
        inner = {id(m) for root in models for m in root.modules() if m is not root}
        models = [root for root in models if id(root) not in inner]
        main = self._model or max(models, key=lambda root: sum(1 for _ in root.modules()), default=None)
        for root in [main, *models] if main is not None else []:
            self._module(root, "" if root is main else type(root).__name__)
        for optimizer in optimizers:
            self._optimizer(optimizer)

    def learn_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Learn the gradients of leaves, also those that a closure's variable holds."""
        for leaf in [*leaves, *(p for what, p in self._lasting if not what.startswith("the optimizer's "))]:
            owner = self.of(leaf) if leaf.grad is not None else None
            if owner is not None and leaf.grad is not None:
                for memory in memory_of(leaf.grad):
                    self._gradients.setdefault(memory, owner.removeprefix("the input "))
                    self._memory[memory] = f"the gradient of {self._gradients[memory]}"

    def gradient_of(self, memory: Iterable[int]) -> str | None:
        """The name of the tensor whose gradient lies in this memory."""
        return next((self._gradients[m] for m in memory if m in self._gradients), None)

    def module(self, module: nn.Module | None) -> str | None:
        """A module's path; the root is called "model"."""
        if module is None:
            return None
        return self._modules.get(id(module), type(module).__name__)

    def owner(self, p: Tensor) -> str | None:
        """The path of the module that a parameter belongs to."""
        name = self.of(p)
        return None if name is None or name.startswith("the ") else name.rpartition(".")[0] or ROOT

    def of(self, x: Tensor) -> str | None:
        """Return the name of a tensor's memory."""
        return next((self._memory[memory] for memory in memory_of(x) if memory in self._memory), None)

    def of_memory(self, memory: Iterable[int]) -> str | None:
        """Return the name of memory."""
        return next((self._memory[m] for m in memory if m in self._memory), None)

    def lasting(self) -> list[tuple[str, Tensor]]:
        """Return what outlives a step: parameters, buffers, the optimizers' state."""
        return list(self._lasting)

    def _module(self, root: nn.Module, prefix: str) -> None:
        for raw, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
            path = ".".join(part for part in (prefix, clean(raw)) if part)
            self._modules.setdefault(id(module), path or ROOT)
        for kind, tensors in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
            for raw, x in tensors:
                name = ".".join(part for part in (prefix, clean(raw)) if part)
                self._take(name if kind == "parameter" else f"the buffer {name}", x)
                self._lasting.append((f"the {kind} {name}", x))

    def _optimizer(self, optimizer: Any) -> None:
        number = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.of(p)
                if name is None or name.startswith("the input "):
                    name = f"parameter {number}" if name is None else name.removeprefix("the input ")
                    self._memory.update((memory, name) for memory in memory_of(p))
                    self._lasting.append((f"the {name}" if name.startswith("parameter ") else name, p))
                number += 1
                for key, x in _tensors_of(optimizer.state.get(p, {})):
                    self._take(f"the optimizer's {key} of {name}", x)
                    self._lasting.append((f"the optimizer's {key} of {name}", x))

    def _take(self, name: str, x: Tensor) -> None:
        for memory in memory_of(x):
            self._memory.setdefault(memory, name)


def _tensors_of(state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, dict):
        named = cast("dict[Any, Any]", state)
        yield from ((str(key), x) for key, x in named.items() if isinstance(x, Tensor))
