"""State of a thread: the innermost context's `Frame`.

A frame has lists (casts before an operation) and rules (functions that run in the operation's place). Lists apply to
the forward. In a backward they do nothing, unless the frame itself was entered in that backward, as the recomputation
of a checkpoint does. Rules apply to both.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch

from plimsoll.emulate.casting import CastCache, Category, OperationLists
from plimsoll.errors import ArgumentError

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
graph_task: Callable[[], int] = _C._current_graph_task_id  # noqa: SLF001

# (operation, arguments, keyword arguments) -> result, or NotImplemented for a call that the rule does not cover. Its
# own calls are not intercepted.
Rule = Callable[[Any, Any, Any], Any]

NO_LISTS = OperationLists()


class OperationTracer(Protocol):
    """Protocol of an observer of every operation."""

    def ruled(self, op: Any) -> None:
        """Record a call that a rule computed."""
        ...

    def native(self, op: Any, arguments: Any, result: Any) -> Any:
        """Record a call that torch computed, and return its final result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """Settings of one context, combined with those of its outer contexts."""

    lists: OperationLists = NO_LISTS
    low: torch.dtype = torch.float16
    cache: CastCache | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    tracer: OperationTracer | None = None
    eager: bool = True  # False: the compiler was not loaded, so compiled code would escape the frame and must raise
    formats: Mapping[str, str] = field(default_factory=dict[str, str])  # of all results, by collection of a run
    task: int = -1  # id of the backward in which it was entered; -1: none
    nesting: int = 0  # number of open autocast contexts of torch when it was entered
    categories: Mapping[str, Category] = field(default_factory=dict[str, "Category"])
    without_lists: "Frame | None" = None
    again: AbstractContextManager[Any] | None = None  # a checkpoint's recomputation enters it too

    def casts_now(self) -> bool:
        """Return whether the lists apply to the current call."""
        if graph_task() != self.task:
            return False
        if nesting() == self.nesting:
            return True
        refuse_torch_autocast("inside")
        return False  # torch.autocast(enabled=False): a region without casts


class Local(threading.local):
    """Frame of a thread."""

    frame: Frame | None = None
    # The state of the keys does not show it: torch.func sets them again for the calls that it splits up.
    bypassed: bool = False


local = Local()


def current() -> Frame | None:
    """Return the innermost frame of this thread."""
    return local.frame


@functools.lru_cache(maxsize=64)
def categories_of(lists: OperationLists) -> Mapping[str, Category]:
    """Return the list of each operation that is on one."""
    return MappingProxyType(dict(lists.rows()))


def nesting() -> int:
    """Return the number of torch's autocast contexts that this thread has open."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def refuse_torch_autocast(where: str) -> None:
    """Raise if torch's own autocast is on: two lists would cast one call."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ArgumentError(
                f"autocast: expected torch.autocast to be off {where} a context that casts by its own lists; got "
                f"torch.autocast({device!r}) on. Remove one of the two."
            )


def in_backward() -> bool:
    """Return whether the current call belongs to a backward."""
    frame = local.frame
    # The recomputation of a checkpoint within a backward is a forward.
    return frame is not None and graph_task() != frame.task


def in_forward(rule: Rule) -> Rule:
    """Return the rule, restricted to the forward."""

    # A backward calls autograd's formulas, in which the operands of a product have other roles.
    def ruled(op: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented if in_backward() else rule(op, args, kwargs)

    return ruled
