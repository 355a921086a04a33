"""Where an operation is called from: the module that runs, the user's line, and what of ours it is a part of.

Python's own stack says all three, so nothing has to be hooked. An operation with its factors is one call of a function
of `unit.functional`; in a converted model, it is one line of a module's code.
"""

import functools
import linecache
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_FUNCTIONAL = str(Path(__file__).parents[1] / "functional") + os.sep
_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")})
_INSTALLED = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("purelib", "platlib")})

_GENERATED = "<plimsoll.unit.convert "  # how the files of a converted model's code begin
_SCALES_ITSELF = re.compile(r"\s*(\w+) = ((?:scaled|sized)\(\1, |\1 \* )")

_CALLS, _FUNCTION, _LINE, _USER, _OTHER = "calls a module", "a function", "a line", "the user's", "other"


@dataclass(slots=True)
class Place:
    """Where an operation was called from.

    - `call`: the frame of the function of `unit.functional`, or of the converted module's code, that it is a part of;
      kept so that its identity stays its own. `function`: that function's name; `line`: that code's line.
    """

    module: nn.Module | None = None
    source: str | None = None
    call: FrameType | None = None
    function: str = ""
    line: int = 0

    def part_of(self, other: "Place") -> bool:
        """Whether both are parts of one operation and its factors."""
        if self.call is None or self.call is not other.call:
            return False
        return self.line == other.line or (self.line == other.line + 1 and self._scales_itself())

    def _scales_itself(self) -> bool:
        """Whether the line gives a value of the line before its factor."""
        assert self.call is not None
        return bool(_SCALES_ITSELF.match(linecache.getline(self.call.f_code.co_filename, self.line)))


def look(until: CodeType) -> Place:
    """The place of the operation that is called now; not beyond the frame of that code."""
    place = Place()
    frame: FrameType | None = cast("Any", sys)._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind is _USER:
            if place.source is None:
                place.source = f"{code.co_filename}:{frame.f_lineno}"
        elif kind is _FUNCTION or kind is _LINE:
            if place.module is None:
                _take_call(place, frame, of_line=kind is _LINE)
        elif kind is _CALLS and code.co_name == "_call_impl" and place.module is None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                place.module = module
        frame = frame.f_back
    return place


def _take_call(place: Place, frame: FrameType, *, of_line: bool) -> None:
    place.call, place.function, place.line = frame, frame.f_code.co_name, frame.f_lineno if of_line else 0
    if of_line:
        place.function = ""
        place.source = place.source or f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str:
    """Whose file it is."""
    if file.startswith(_TORCH):
        return _CALLS if file.endswith(os.path.join("nn", "modules", "module.py")) else _OTHER  # noqa: PTH118
    if file.startswith(_FUNCTIONAL):
        return _FUNCTION
    if file.startswith(_GENERATED):
        return _LINE
    library = file.startswith(_LIBRARIES) and not file.startswith(_INSTALLED)
    if library or file.startswith(("<frozen", "<eval_with_key")):
        return _OTHER
    return _OTHER if file.startswith(_OURS) else _USER
