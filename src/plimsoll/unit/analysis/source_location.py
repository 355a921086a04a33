"""Where in the source and in the model an operation stands."""

import re
from typing import cast

from torch import fx

from plimsoll.errors import ArgumentError
from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import Flow, base_name, operation_of
from plimsoll.unit.changes import Left
from plimsoll.unit.rules.operation import VIEWS

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


def check_aliases(captured: Captured, graph: Flow) -> None:
    """Refuses a tensor that is written in place and read again under another name: a factor would part the two."""
    nodes = list(captured.graph.nodes)
    for position, node in enumerate(nodes):
        if node.name not in graph.carrying or node.op != "call_function" or base_name(node) == operation_of(node):
            continue
        written = cast("fx.Node", node.args[0])
        shown = _shown(written)
        again = [one for one in nodes[position + 1 :] for source in one.all_input_nodes if _reads(source, node, shown)]
        if again:
            raise ArgumentError(
                f"convert: expected no tensor to be written in place and read again under another name; got "
                f"{operation_of(node)} in {_named(module_of(node))}{_at(node)}, read again by {operation_of(again[0])}"
                f"{_at(again[0])}. Write {base_name(node)} out of place there."
            )


def _reads(source: fx.Node, writing: fx.Node, shown: fx.Node) -> bool:
    """Whether a node is the tensor that was written to, under another name than the writing's result."""
    while source is not writing:
        if source is shown:
            return True
        if source.op != "call_function" or base_name(source) not in VIEWS or not isinstance(source.args[0], fx.Node):
            return False
        source = source.args[0]
    return False


def _shown(node: fx.Node) -> fx.Node:
    """The tensor that a node shows through views."""
    while node.op == "call_function" and base_name(node) in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _named(module: str) -> str:
    return f"module '{module}'" if module else "the root module"


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" at {source}" if source else ""


def left_of(node: fx.Node, why: str) -> Left:
    """The record of an operation that was left as it is."""
    return Left(operation=operation_of(node), module=module_of(node), source=source_of(node), why=why)
