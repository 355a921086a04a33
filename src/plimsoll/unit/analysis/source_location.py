"""Locations of operations in source and model, and refusals that name them."""

import re
from typing import cast

from torch import fx

from plimsoll.errors import ArgumentError
from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import Flow, base_name, operation_of
from plimsoll.unit.changes import SkippedOperation
from plimsoll.unit.rules.operation import VIEWS

_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def module_of(node: fx.Node) -> str:
    """Return the innermost module that called an operation, "" for the root."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values() if not name.startswith("_empty_nn_module_stack")]
    return names[-1] if names else ""


def source_of(node: fx.Node) -> str | None:
    """Return ``file:line`` of an operation: the innermost line outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file]
    return ":".join(own[-1]) if own else None


def check_aliases(captured: Captured, graph: Flow) -> None:
    """Refuse a tensor that is written in place and read under another name."""
    nodes = list(captured.graph.nodes)
    for position, node in enumerate(nodes):
        if node.name not in graph.carrying or node.op != "call_function" or base_name(node) == operation_of(node):
            continue
        written = cast("fx.Node", node.args[0])
        base = _base(written)
        # A factor would apply to only one of the two.
        again = [
            later for later in nodes[position + 1 :] for source in later.all_input_nodes if _reads(source, node, base)
        ]
        if again:
            raise ArgumentError(
                f"convert: expected no tensor to be written in place and read again under another name; got "
                f"{operation_of(node)} in {_named(module_of(node))}{_at(node)}, read again by {operation_of(again[0])}"
                f"{_at(again[0])}. Write {base_name(node)} out of place there."
            )


def _reads(source: fx.Node, writing: fx.Node, base: fx.Node) -> bool:
    """Return whether a node is the written tensor, but not the write's result."""
    while source is not writing:
        if source is base:
            return True
        if source.op != "call_function" or base_name(source) not in VIEWS or not isinstance(source.args[0], fx.Node):
            return False
        source = source.args[0]
    return False


def _base(node: fx.Node) -> fx.Node:
    """Return the tensor that a node is a view of."""
    while node.op == "call_function" and base_name(node) in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _named(module: str) -> str:
    return f"module '{module}'" if module else "the root module"


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" at {source}" if source else ""


def skipped_operation(node: fx.Node, why: str) -> SkippedOperation:
    """Return the record of an operation that is not converted."""
    return SkippedOperation(operation=operation_of(node), module=module_of(node), source=source_of(node), why=why)
