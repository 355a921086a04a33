"""Where in the source and in the model an operation stands."""

import re

from torch import fx

from plimsoll.unit._changes import Left
from plimsoll.unit._graph import operation_of

_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def module_of(node: fx.Node) -> str:
    """The name of the innermost module that an operation was called in; "" for the root."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values() if not name.startswith("_empty_nn_module_stack")]
    return names[-1] if names else ""


def source_of(node: fx.Node) -> str | None:
    """``file:line`` of the model's own code that called an operation: the innermost line outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file]
    return ":".join(own[-1]) if own else None


def left_of(node: fx.Node, why: str) -> Left:
    """The record of an operation that was left as it is."""
    return Left(operation=operation_of(node), module=module_of(node), source=source_of(node), why=why)
