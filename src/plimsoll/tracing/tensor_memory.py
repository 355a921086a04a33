"""Tensors inside arguments, results and variables, and tensors' memory."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor


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
