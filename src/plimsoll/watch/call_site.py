"""The place of an operation's call: the user's line, and the running module.

Python's own stack says both, so nothing has to be hooked. A file's path says whose it is: torch's, Plimsoll's
and Python's own are never the user's. A compiled graph's nodes carry the place in their metadata.
"""

import ast
import bisect
import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from torch import fx, nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")})
INSTALLED = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("purelib", "platlib")})

# Between a dispatch mode and the code that it observes: torch keeps its compiler out of modes, and DTensor calls an
# operation again on each rank's part of a tensor.
_BETWEEN = (
    "utils/_python_dispatch.py", "_ops.py", "_compile.py", "_dynamo/eval_frame.py", "distributed/tensor/_api.py",
    "distributed/tensor/_dispatch.py",
)  # fmt: skip
_UNSEEN = tuple(str(Path(torch.__file__).parent / file) for file in _BETWEEN)

Call = TypeVar("Call")

_CALLS = "calls a module"
_ENGINE = "runs a backward"
_CHECKPOINT = "recomputes"
_OPTIMIZER = "steps an optimizer"
_SHARDING = "shards parameters"
_GRAPH = "runs a graph of torch.fx"
_INTERPRETER = "runs such a graph node by node"
_USER = "the user's"
_FILES = {
    str(Path("nn", "modules", "module.py")): _CALLS,
    str(Path("autograd", "graph.py")): _ENGINE,
    str(Path("utils", "checkpoint.py")): _CHECKPOINT,
    str(Path("fx", "interpreter.py")): _INTERPRETER,
    str(Path("distributed", "fsdp", "_fully_shard", "_fsdp_param_group.py")): _SHARDING,
}


@dataclass(slots=True)
class Place:
    """The place that an operation was called from."""

    file: str | None = None
    line: int = 0
    function: str = ""
    module: nn.Module | None = None
    root: nn.Module | None = None  # the outermost module that runs
    recomputing: bool = False
    optimizer: bool = False
    sharding: bool = False  # `fully_shard` gathers or reduces
    node: fx.Node | None = None  # of a graph that is run as Python code

    @property
    def text(self) -> str:
        """The text of the line."""
        return "" if self.file is None else linecache.getline(self.file, self.line).strip()

    @property
    def shown(self) -> str | None:
        """File and line, as "file:line" below the package's folder or the working directory."""
        if self.file is None:
            return None
        folder = next((base for base in (*INSTALLED, f"{Path.cwd()}{os.sep}") if self.file.startswith(base)), "")
        return f"{self.file.removeprefix(folder)}:{self.line}"


def look(*, backward: bool = False) -> Place:
    """Return the place of the current operation; in a backward at most what runs the backward."""
    place = Place()
    frame: FrameType | None = cast("Any", sys)._getframe(1)  # noqa: SLF001
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if backward and kind is _ENGINE and frame.f_code.co_name == "_engine_run_backward":
            break
        if kind is not None:
            _note(place, frame, kind, backward=backward)
        frame = frame.f_back
    if backward and place.module is not None and not place.sharding:
        place.recomputing = True
    return place


def _note(place: Place, frame: FrameType, kind: str, *, backward: bool) -> None:
    """Note what a frame says of the place; inner frames come first."""
    if kind is _USER:
        if place.file is None:
            place.file, place.line, place.function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
    elif kind is _CALLS and frame.f_code.co_name == "_call_impl":
        _take_module(place, frame.f_locals)
    elif kind is _CHECKPOINT:
        place.recomputing = place.recomputing or (backward and place.file is not None)
    elif kind is _OPTIMIZER:
        place.optimizer = True
    elif kind is _SHARDING:
        _take_sharded(place, frame.f_locals)
    elif kind is _GRAPH and place.node is None:
        place.node = _node_at(frame.f_locals.get("self"), frame.f_lineno)
    elif kind is _INTERPRETER and place.node is None and frame.f_code.co_name == "run_node":
        node = frame.f_locals.get("n")
        place.node = node if isinstance(node, fx.Node) and node.stack_trace else None


def _node_at(module: Any, line: int) -> fx.Node | None:
    """Return the node of a graph whose code stands at a line of its module's forward."""
    numbers: Mapping[int, int] | None = getattr(module, "_lineno_map", None)
    if not isinstance(module, fx.GraphModule) or numbers is None:
        return None
    begin = module.code.partition("\ndef ")[0].count("\n") + 2  # the line that the numbers of the map count from
    number = numbers.get(line - begin)
    return None if number is None else next(itertools.islice(module.graph.nodes, number, None), None)


def _take_sharded(place: Place, variables: Mapping[str, Any]) -> None:
    place.sharding = True
    modules = getattr(variables.get("self"), "modules", ())
    if place.module is None and modules:
        place.module = modules[0]


Owner = Literal["user", "torch", "plimsoll"]


def owner_of(file: str) -> Owner:
    """Return whose code a file holds; libraries other than torch count as the user's."""
    return "torch" if file.startswith(_TORCH) else "plimsoll" if file.startswith(_OURS) else "user"


class Caller(NamedTuple):
    """The innermost running Python code: owner, file, function, name of its callee."""

    owner: Owner
    file: str
    function: str
    callee: str  # "" where that cannot be known


def innermost(beyond: tuple[str, ...]) -> Caller:
    """Return the code that makes the present call into torch, past frames of files that begin with `beyond`."""
    frame: FrameType | None = cast("Any", sys)._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename.startswith((*beyond, *_UNSEEN)):
        frame = frame.f_back
    if frame is None:
        return Caller("torch", "", "", "")
    file = frame.f_code.co_filename
    return Caller(owner_of(file), file, frame.f_code.co_name, _callee(frame.f_code, frame.f_lasti))


@functools.lru_cache(maxsize=8192)
def _callee(code: CodeType, instruction: int) -> str:
    """Return the name of the function that an instruction calls, by its position."""
    positions = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        called = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return ""
    function = called.func if isinstance(called, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _take_module(place: Place, variables: Mapping[str, Any]) -> None:
    module = variables.get("self")
    if isinstance(module, nn.Module) and not isinstance(module, fx.GraphModule):
        place.root = module
        if place.module is None:
            place.module = module


class ForwardIndex(Generic[Call]):
    """Index of forward operations by the number of their autograd node."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[int, Call]] = {}  # number -> thread, operation
        self._numbers: list[int] = []  # ascending
        self._last: Call | None = None  # of the backward: what sums of gradients belong to

    def note(self, call: Call, number: int) -> Call:
        """Note a forward operation by its node's number; return the node's first."""
        thread = threading.get_ident()  # each counts its nodes by itself
        known = self._calls.get(number)
        if known is None:
            bisect.insort(self._numbers, number)
        elif known[0] == thread:
            return known[1]
        self._calls[number] = thread, call
        return call

    def of(self, node: Any) -> Call | None:
        """Return the forward operation of a node; between nodes, the last one."""
        if node is None:
            return self._last
        if node.name().endswith("AccumulateGrad"):
            return None
        place = bisect.bisect_right(self._numbers, node._sequence_nr())  # noqa: SLF001
        self._last = self._calls[self._numbers[place - 1]][1] if place else None
        return self._last


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str | None:
    """Return the owner of a file, as a kind; None for a library's and ours."""
    if file.startswith(_TORCH):
        inside = file[len(_TORCH) :]
        return _OPTIMIZER if inside.startswith("optim" + os.sep) else _FILES.get(inside)
    if file.startswith("<eval_with_key"):
        return _GRAPH
    library = file.startswith(_LIBRARIES) and not file.startswith(INSTALLED)
    if library or file.startswith((_OURS, "<frozen")):
        return None
    return _USER


# -- nodes of a compiled graph -----------------------------------------------------------------------------------------

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_CAST = re.compile(r"\.(to|float|half|bfloat16|double|type|type_as)\(")
_STEPS = re.compile(r"\.(?!_modules\b)(\w+)|\[(?:'(\w+)'|\"(\w+)\"|(\d+))\]")


def path_of(node: Any) -> str | None:
    """Return the module of a node, as its name below the module that was compiled."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entry = next(reversed(list(stack.values())), None)
    return None if entry is None else path_below(str(entry[0]))


def path_below(expression: str) -> str:
    """Return the names by which Dynamo's expression reaches a module, from its root.

    >>> path_below("L['self']._modules['blocks']._modules['0'].attn"), path_below("L['self'].blocks[3]")
    ('blocks.0.attn', 'blocks.3')
    """
    rest = re.sub(r"^(?:[LG]\[[^\]]*\]|\w+)", "", expression)
    return ".".join(next(part for part in step if part) for step in _STEPS.findall(rest) if "_modules" not in step)


def place_of(node: Any) -> Place:
    """Return the line of a node's program: the innermost of the user's."""
    frames = list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    users = [frame for frame in frames if owner_of(frame["file"]) == "user"] or frames
    if not users:
        return Place()
    last = users[-1]
    return Place(file=last["file"], line=int(last["line"]), function=last["function"])


def cause_of(node: Any, place: Place) -> Literal["backward", "script", "autocast"]:
    """Return the origin of a cast in a graph traced with autograd and autocast."""
    if node.meta.get("fwd_nn_module_stack") is not None or "backward" in str(node.meta.get("partitioner_tag", "")):
        return "backward"
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    kind = next((entry[1] for entry in reversed(list(stack.values()))), None)
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}."
    # A graph has no calls of the program any more: a cast counts as the script's where its line casts, outside of
    # torch's own modules.
    return "script" if _CAST.search(place.text) and not name.startswith("torch.") else "autocast"
