"""Where an operation was called from: the user's line, and the module whose forward runs.

Python's own stack says both, so nothing has to be hooked. Files are told apart by their path: torch's, Plimsoll's and
Python's own are never the user's.
"""

import bisect
import functools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")})
_INSTALLED = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("purelib", "platlib")})

Call = TypeVar("Call")

_CALLS = "calls a module"
_ENGINE = "runs a backward"
_CHECKPOINT = "recomputes"
_OPTIMIZER = "steps an optimizer"
_USER = "the user's"
_FILES = {
    str(Path("nn", "modules", "module.py")): _CALLS,
    str(Path("autograd", "graph.py")): _ENGINE,
    str(Path("utils", "checkpoint.py")): _CHECKPOINT,
}


@dataclass(slots=True)
class Place:
    """Where an operation was called from."""

    file: str | None = None
    line: int = 0
    function: str = ""
    module: nn.Module | None = None
    root: nn.Module | None = None  # the outermost module that runs
    recomputing: bool = False
    optimizer: bool = False

    @property
    def text(self) -> str:
        """The text of the line."""
        return "" if self.file is None else linecache.getline(self.file, self.line).strip()


def look(*, backward: bool = False) -> Place:
    """The place of the operation that is called now; in a backward, not beyond what runs the backward."""
    place = Place()
    frame: FrameType | None = cast("Any", sys)._getframe(1)  # noqa: SLF001
    while frame is not None:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind is _USER:
            if place.file is None:
                place.file, place.line, place.function = code.co_filename, frame.f_lineno, code.co_name
        elif kind is _CALLS and code.co_name == "_call_impl":
            _take_module(place, frame.f_locals)
        elif backward and kind is _ENGINE and code.co_name == "_engine_run_backward":
            break
        elif kind is _CHECKPOINT:
            place.recomputing = place.recomputing or (backward and place.file is not None)
        elif kind is _OPTIMIZER:
            place.optimizer = True
        frame = frame.f_back
    if backward and place.module is not None:
        place.recomputing = True
    return place


def _take_module(place: Place, variables: Mapping[str, Any]) -> None:
    module = variables.get("self")
    if isinstance(module, nn.Module):
        place.root = module
        if place.module is None:
            place.module = module


class ForwardIndex(Generic[Call]):
    """Forward operations by the number of their autograd node, for the operations of a backward to be looked up."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[int, Call]] = {}  # number -> thread, operation
        self._numbers: list[int] = []  # ascending
        self._last: Call | None = None  # of the backward: what sums of gradients belong to

    def note(self, call: Call, number: int) -> Call:
        """Note a forward operation by its node's number. The first of a node names it, and is returned."""
        thread = threading.get_ident()  # each counts its nodes by itself
        known = self._calls.get(number)
        if known is None:
            bisect.insort(self._numbers, number)
        elif known[0] == thread:
            return known[1]
        self._calls[number] = thread, call
        return call

    def of(self, node: Any) -> Call | None:
        """Return the forward operation that a node differentiates; between nodes, the last one."""
        if node is None:
            return self._last
        if node.name().endswith("AccumulateGrad"):
            return None
        place = bisect.bisect_right(self._numbers, node._sequence_nr())  # noqa: SLF001
        self._last = self._calls[self._numbers[place - 1]][1] if place else None
        return self._last


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str | None:
    """Whose file it is."""
    if file.startswith(_TORCH):
        inside = file[len(_TORCH) :]
        return _OPTIMIZER if inside.startswith("optim" + os.sep) else _FILES.get(inside)
    library = file.startswith(_LIBRARIES) and not file.startswith(_INSTALLED)
    if library or file.startswith((_OURS, "<frozen", "<eval_with_key")):
        return None
    return _USER
