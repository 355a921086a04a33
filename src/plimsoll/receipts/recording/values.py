"""Memory during a step: what is alive, and the formats its values went through."""

import functools
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from plimsoll.errors import FormatError
from plimsoll.formats import BLOCKS, ELEMENTS, BlockFormat, Format, get, get_element
from plimsoll.kernels import dtypes
from plimsoll.kernels.operators.cast_spec import BlockSpec, CastSpec
from plimsoll.tracing.tensors import parts_of

Role = Literal["weights", "buffers", "gradients", "optimizer", "inputs", "other"]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's format, or torch's own name without one: "bf16", "int64"."""
    if not dtype.is_floating_point:
        return str(dtype).removeprefix("torch.")
    try:
        return get_element(dtype, "receipt").name
    except FormatError:
        return str(dtype).removeprefix("torch.")


def part_format(format_name: str) -> str:
    """Return the format of both parts of complex numbers, and others as they are."""
    dtype = getattr(torch, format_name, None)
    return dtype_name(dtype.to_real()) if isinstance(dtype, torch.dtype) and dtype.is_complex else format_name


SIXTEEN_BIT = frozenset(map(dtype_name, dtypes.SIXTEEN_BIT))


def spec_name(spec: list[int]) -> str:
    """Return the name of the format that a Plimsoll cast rounds to."""
    if len(spec) == len(CastSpec._fields):
        return _element_name(CastSpec(*spec).format)
    block_spec = BlockSpec.from_ints(spec)
    element, scale = _element_name(block_spec.element.format), _element_name(block_spec.scale.format)
    for fmt in BLOCKS:
        if (fmt.element.name, fmt.block, fmt.scale.name, fmt.tensor_scale) == (
            element, block_spec.block, scale, block_spec.tensor_scale,
        ):  # fmt: skip
            return fmt.name
    return element


def _element_name(found: Format) -> str:
    same = (fmt for fmt in ELEMENTS if (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.specials)
            == (found.exponent_bits, found.mantissa_bits, found.bias, found.specials))  # fmt: skip
    return next((fmt.name for fmt in same), found.name)


@functools.cache
def holds(wide: str, narrow: str) -> bool:
    """Return whether a format has all of another's values, blocks' by elements.

    A block's elements count, since its scale moves them.
    """
    try:
        a, b = get(part_format(wide)), get(part_format(narrow))
    except FormatError:
        return wide == narrow
    if isinstance(b, BlockFormat):
        return isinstance(a, Format) and a.mantissa_bits >= b.element.mantissa_bits and a.exponent_bits >= 8
    if isinstance(a, BlockFormat):
        return False
    return a.mantissa_bits >= b.mantissa_bits and a.max >= b.max and a.smallest_subnormal <= b.smallest_subnormal


def narrower(format_name: str, than: str) -> bool:
    """Return whether a format lacks values that another one has."""
    return format_name != than and not holds(format_name, than)


@functools.cache
def is_code(format_name: str) -> bool:
    """Return whether a format is narrower than 16 bits."""
    try:
        fmt = get(format_name)
    except FormatError:
        return False
    return isinstance(fmt, BlockFormat) or fmt.bits < 16


def size_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements; repeated ones (`expand`) count once."""
    if x.layout != torch.strided:
        return 0
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= int(size) if stride or not size else 1
    return count * x.element_size()


# A tensor in FP32 whose values were BF16 a moment ago holds BF16 values: what a product of it can lose is BF16's. So
# each piece of memory is known by the narrowest format that its values have been rounded to and not computed with
# since.
@dataclass(slots=True, eq=False)
class Held:
    """A piece of memory."""

    bytes: int
    role: Role
    values: str  # the format that its values have
    scripted: bool = False  # whether code of the script has rounded them to it
    producer: Any = None  # the entry of the operation that made it
    cast_of: int | None = None  # the parameter's memory, if this is its cast by autocast
    uses: int = 0  # of such a cast, by operations of the forward
    reference: Any = field(default=None, repr=False)


class Memory:
    """All memory that operations of the step have met."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self.live: Counter[Role] = Counter()
        self.peak = 0

    def close(self) -> None:
        """Forget everything; memory that dies later is not counted."""
        self._held.clear()

    def restart(self) -> None:
        """Begin to look for the peak again."""
        self.peak = 0
        self._grow("other", 0)

    def key(self, x: Tensor) -> int | None:
        """Return the identity of a tensor's memory; None where it has none of its own."""
        storage = _storage(x)
        return None if storage is None else int(storage._cdata)  # noqa: SLF001

    def of(self, x: Tensor, role: Role = "inputs") -> Held | None:
        """Return the facts on a tensor's memory; new memory is noted under that role."""
        storage = _storage(x)
        if storage is None:
            return None
        key = int(storage._cdata)  # noqa: SLF001
        known = self._held.get(key)
        size = int(storage.nbytes())
        if known is None:
            known = self._held[key] = Held(size, role, dtype_name(x.dtype))
            known.reference = weakref.ref(storage, functools.partial(self._dies, key))
            self._grow(role, size)
        elif known.bytes != size:  # `fully_shard` frees memory by resizing it
            self._grow(known.role, size - known.bytes)
            known.bytes = size
        return known

    def assign(self, x: Tensor, role: Role) -> None:
        """Note the role of a tensor's memory."""
        for part in parts_of(x):
            known = self.of(part, role)
            if known is not None and known.role != role:
                self.live[known.role] -= known.bytes
                self.live[role] += known.bytes
                known.role = role

    def _grow(self, role: Role, size: int) -> None:
        self.live[role] += size
        self.peak = max(self.peak, sum(self.live.values()))

    def _dies(self, key: int, reference: object) -> None:
        known = self._held.get(key)
        if known is not None and known.reference is reference:
            del self._held[key]
            self.live[known.role] -= known.bytes


def _storage(x: Tensor) -> Any:
    try:
        return cast("Any", x).untyped_storage()
    except (RuntimeError, NotImplementedError):  # wrappers of other tensors, and layouts without memory of their own
        return None
