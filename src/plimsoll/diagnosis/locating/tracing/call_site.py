"""Where an operation was called from: the user's line, and the module whose forward runs.

Python's own stack says both, so nothing has to be hooked. Files are told apart by their path: torch's, Plimsoll's and
Python's own are never the user's.
"""

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from plimsoll.diagnosis.locating.fault import Source

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[3]) + os.sep
_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")})
_INSTALLED = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("purelib", "platlib")})

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

    def source(self) -> Source | None:
        """The line, with its text."""
        if self.file is None:
            return None
        text = linecache.getline(self.file, self.line).strip()
        return Source(file=self.file, line=self.line, function=self.function, text=text)


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
