"""State of a thread: the innermost context's `Frame`.

A frame has lists (what to cast before an operation) and rules (what to run in the operation's place). Lists belong to
the forward: in a backward they do nothing, unless the frame itself was entered in that backward, as a checkpoint's
recomputation does. Rules hold in both.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch

from plimsoll.emulate.casting.argument_casts import CastCache
from plimsoll.emulate.casting.operation_lists import Category, OperationLists
from plimsoll.errors import ArgumentError

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
graph_task: Callable[[], int] = _C._current_graph_task_id  # noqa: SLF001

# (operation, arguments, keyword arguments) -> result, or NotImplemented for a call that is not the rule's. While it
# runs, nothing is heard.
Rule = Callable[[Any, Any, Any], Any]

NO_LISTS = OperationLists()


class OperationTracer(Protocol):
    """Protocol of an observer of every operation."""

    def ruled(self, op: Any) -> None:
        """A rule has stood in for an operation."""
        ...

    def native(self, op: Any, arguments: Any, result: Any) -> Any:
        """Torch has run an operation; gives the result to return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """Settings of one context, combined with those of its outer contexts."""

    lists: OperationLists = NO_LISTS
    low: torch.dtype = torch.float16
    cache: CastCache | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    witness: OperationTracer | None = None  # hears of every operation
    eager: bool = True  # False: compiled code must not run in it, and nothing keeps it from that
    formats: Mapping[str, str] = field(default_factory=dict[str, str])  # of all results, by a run's collection
    task: int = -1  # the backward that it was entered in, or none
    nesting: int = 0  # of torch's autocast contexts, when it was entered
    categories: Mapping[str, Category] = field(default_factory=dict[str, "Category"])
    without_lists: "Frame | None" = None
    again: AbstractContextManager[Any] | None = None  # entered too, where a checkpoint runs what it has seen once more

    def casts_now(self) -> bool:
        """Return whether the lists hold for the call at hand."""
        if graph_task() != self.task:
            return False
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == self.nesting:
            return True
        refuse_torch_autocast("inside")
        return False  # torch.autocast(enabled=False) asks for no casts here


class Local(threading.local):
    """A thread's frame."""

    frame: Frame | None = None
    silent: bool = False  # the keys alone do not tell: torch.func sets them again for the calls that it takes apart


local = Local()


def current() -> Frame | None:
    """Return the innermost frame of this thread."""
    return local.frame


@functools.lru_cache(maxsize=64)
def categories_of(lists: OperationLists) -> Mapping[str, Category]:
    """Return the list of each operation that is on one."""
    return MappingProxyType(dict(lists.rows()))


def nesting() -> int:
    """Return how many of torch's autocast contexts are open on this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def refuse_torch_autocast(where: str) -> None:
    """Raise if torch's own autocast is on: two lists would cast one call."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ArgumentError(
                f"autocast: expected torch.autocast to be off {where} a context that casts by its own lists; got "
                f"torch.autocast({device!r}) on. Take one of the two away."
            )


def in_backward() -> bool:
    """Return whether the call at hand is part of a backward; what a checkpoint recomputes in one is a forward."""
    frame = local.frame
    return frame is not None and graph_task() != frame.task


def in_forward(rule: Rule) -> Rule:
    """Return the rule for the forward only. A backward's calls are formulas, whose operands have other roles."""

    def ruled(op: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented if in_backward() else rule(op, args, kwargs)

    return ruled
