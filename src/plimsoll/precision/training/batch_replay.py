"""Batch that can run again: its closures, and the state before them."""

import dis
import functools
import types
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.watch.shadow.replay import RandomState

Closure = Callable[[], Tensor]
_MISSING = object()
_GLOBAL_READS = {"LOAD_GLOBAL", "LOAD_NAME"}


# For each closure the random generators of Python, NumPy, the CPU and the model's devices are saved before it runs, and
# the model's buffers once per batch. `rewound` restores both, so a repetition draws the same dropout masks and counts
# the batch into running statistics once.
class Batch:
    """Closures of one optimizer step, in order."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._devices = {t.device for t in (*root.parameters(), *root.buffers())}
        self._closures: list[tuple[Closure, RandomState]] = []
        self._variables: list[dict[str, object]] = []
        self._buffers = _Buffers(root)

    def begin(self, closure: Closure) -> None:
        """Save the state before the closure runs for the first time."""
        if not self._closures:
            self._buffers = _Buffers(self._root)
        self._check_unchanged()
        self._closures.append((closure, RandomState(self._devices)))

    def end(self) -> None:
        """Save the closure after its first run."""
        self._variables.append(variables_of(self._closures[-1][0]))

    def drop_last(self) -> None:
        """Forget the closure that has raised in its first run, unless all are forgotten already."""
        del self._closures[-1:]

    def clear(self) -> None:
        """Drop all closures at the end of a step."""
        self._closures.clear()
        self._variables.clear()

    def rewound(self) -> Generator[Closure]:
        """Yield each closure, with buffers and generators as before its first run."""
        self._buffers.restore()
        for closure, random in self._closures:
            random.restore()
            yield closure

    # A saved closure must still mean the same later. One that reads a variable of the loop would read the next batch
    # when it runs again. The variables that saved closures read are therefore compared whenever another closure is
    # saved.
    def _check_unchanged(self) -> None:
        for (closure, _), before in zip(self._closures, self._variables, strict=True):
            now = variables_of(closure)
            changed = [name for name, value in before.items() if now.get(name, _MISSING) is not value]
            if changed:
                names = ", ".join(changed)
                raise ArgumentError(
                    f"step: expected closures that can be run again; got one whose variable {names} was assigned again "
                    f"since, so that a repetition would not see its own batch. Bind what it reads: "
                    f"loop.step(lambda {changed[0]}={changed[0]}: ...), or use functools.partial."
                )


def variables_of(closure: Any) -> dict[str, object]:
    """Return outer variables that a function reads, with their present values."""
    while isinstance(closure, functools.partial):
        closure = cast("functools.partial[Any]", closure).func
    function = getattr(closure, "__func__", closure)
    if not isinstance(function, types.FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    variables = {name: _content(cell) for name, cell in cells}
    everywhere = function.__globals__
    return variables | {name: everywhere[name] for name in _globals_read(function.__code__) if name in everywhere}


@functools.lru_cache(maxsize=256)
def _globals_read(code: types.CodeType) -> frozenset[str]:
    """Return the global names that the code reads, nested functions included."""
    own = {str(i.argval) for i in dis.get_instructions(code) if i.opname in _GLOBAL_READS}
    inner = (_globals_read(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(own.union(*inner))


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


class _Buffers:
    """Identity and contents of a model's buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._copies = [
            (module, name, buffer, buffer.detach().clone())
            for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer, content in self._copies:
                buffer.copy_(content)
                setattr(module, name, buffer)
