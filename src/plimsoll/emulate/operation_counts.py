"""Counts of operations inside an emulation, emulated and native 16-bit ones."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast as typed

import torch
from torch import Tensor

from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.results import NotebookRepr


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations(NotebookRepr):
    """Number of runs of each operation, by name, inside a context.

    It counts the forward and, inside the context, the backward. Operations that only create, move or convert values are
    in neither mapping, nor are native ones without a 16-bit result. The backward of an emulated operation is emulated
    too, and is not counted separately.

    Attributes:
        emulated: Runs computed by the emulation.
        native: Runs computed by a kernel of the machine, with a 16-bit result.
    """

    emulated: Mapping[str, int]
    native: Mapping[str, int]

    @property
    def counted(self) -> str:
        """Return the number of operations in a few words."""
        return f"{sum(self.emulated.values()):,} emulated and {sum(self.native.values()):,} native operations"

    def __str__(self) -> str:
        """Return a line for each operation, those that ran most often first."""
        if not self.emulated and not self.native:
            return "No operation ran."
        rows = [(name, count, "emulated") for name, count in self.emulated.items()]
        rows += [(name, count, "native") for name, count in self.native.items()]
        width = max((len(name) for name, _, _ in rows), default=0)
        return "\n".join(f"{name:<{width}} {count:>8} {how}" for name, count, how in sorted(rows, key=_by_count))


def _by_count(row: tuple[str, int, str]) -> tuple[str, int, str]:
    name, count, how = row
    return how, -count, name


@dataclass(slots=True, eq=False)
class Counts:
    """Counts of one context, without those of the contexts inside it."""

    by_rule: Counter[str] = field(default_factory=Counter[str])
    by_torch: Counter[str] = field(default_factory=Counter[str])

    def ruled(self, op: Any) -> None:
        """Count an emulated call."""
        self.by_rule[name_of(op)] += 1

    def native(self, op: Any, arguments: Any, result: Any) -> Any:  # noqa: ARG002  (signature of OperationTracer)
        """Count a call that ran on a kernel of torch."""
        if _is_16_bits(result):
            self.by_torch[name_of(op)] += 1
        return result

    def total(self) -> Operations:
        """Return all counts so far."""
        return Operations(emulated=dict(self.by_rule), native=dict(self.by_torch))


def name_of(op: Any) -> str:
    """Return the operation's name, one for all of its overloads."""
    return op.overloadpacket.__name__


_MOVING = frozenset(
    """
    _to_copy _unsafe_view clone copy copy_ empty empty_like empty_strided fill fill_ full full_like new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like resize_ select_backward slice_backward zero zero_
    zeros zeros_like
""".split()
)
_known: dict[Any, bool] = {}


def computes(op: Any) -> bool:
    """Return whether the operation computes, and is not composed of others."""
    known = _known.get(op)
    if known is None:
        moves = name_of(op) in _MOVING or op.namespace == "plimsoll" or _gives_views(op)
        known = _known[op] = not moves and not op.has_kernel_for_dispatch_key(_COMPOSITE)
    return known


def _gives_views(op: Any) -> bool:
    aliases = [value.alias_info for value in op._schema.returns]  # noqa: SLF001
    return any(alias is not None and not alias.is_write for alias in aliases)


_DispatchKey: Any = torch._C.DispatchKey  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  # noqa: SLF001
_COMPOSITE = _DispatchKey.CompositeImplicitAutograd


def _is_16_bits(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.dtype in SIXTEEN_BIT
    return isinstance(result, tuple | list) and any(map(_is_16_bits, typed("list[Any]", result)))
