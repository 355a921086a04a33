"""What a tensor is to `locate`: its memory, whether all its values are finite, and a record of it."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.diagnosis.locating.fault import Operand
from plimsoll.errors import PlimsollError
from plimsoll.formats import get_element
from plimsoll.spectrum import Spectrum, measure
from plimsoll.spectrum.plain_tensors import plain

_PLAIN = (Tensor, nn.Parameter)


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


def readable(x: Tensor) -> Tensor | None:
    """The plain floating tensor whose values can be looked at; None where there is none."""
    if x.is_complex() and x.layout == torch.strided:
        return readable(torch.view_as_real(x.resolve_conj().detach()))
    if not x.is_floating_point():
        return None
    if type(x) in _PLAIN and x.layout == torch.strided and not x.is_meta and not x.is_neg():
        return x.detach()
    try:
        return plain(x._values() if x.is_sparse else x, "")  # noqa: SLF001  (values() refuses what is not coalesced)
    except PlimsollError:
        return None


def count_nonfinite(x: Tensor) -> int:
    """How many values are NaN or Inf; waits for the device."""
    counts = kernels.new_counts(1, x.device)
    kernels.count_nonfinite_into([x], counts, 0)
    return int(counts.item())


def spectrum_of(x: Tensor) -> Spectrum | None:
    """What the tensor holds; None where there is nothing to measure."""
    seen = readable(x)
    return None if seen is None else measure(seen)


def operand(name: str, x: Tensor, spectrum: Spectrum | None = None) -> Operand:
    """The record of a tensor."""
    return Operand(name=name, dtype=dtype_name(x.dtype), shape=tuple(x.shape), spectrum=spectrum or spectrum_of(x))


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name, or torch's where it is none: "fp16", "int64"."""
    if not dtype.is_floating_point:
        return str(dtype).removeprefix("torch.")
    return get_element(dtype, "locate").name


def memory_of(x: Tensor) -> tuple[int, ...]:
    """The identities of the memory that a tensor lies in; those of views are the same."""
    found: list[int] = []
    for part in parts_of(x):
        try:
            found.append(int(cast("Any", part.untyped_storage())._cdata))  # noqa: SLF001
        except (RuntimeError, NotImplementedError):  # one without memory of its own
            continue
    return tuple(found)


def parts_of(x: Tensor) -> Sequence[Tensor]:
    """The tensors with memory that a tensor is made of."""
    inside = cast("Any", x)
    if x.is_sparse:
        return [inside._values()]  # noqa: SLF001
    local = getattr(inside, "_local_tensor", None)
    return [local] if isinstance(local, Tensor) else [x]


def first_bad(x: Tensor) -> tuple[int, ...]:
    """The index of the first value that is not finite."""
    return first_true(~torch.isfinite(x.float() if x.dtype.itemsize == 1 else x))


def first_true(mask: Tensor) -> tuple[int, ...]:
    """The index of the first true value."""
    flat = int(mask.reshape(-1).to(torch.uint8).argmax().item())
    index: list[int] = []
    for size in reversed(mask.shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


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
