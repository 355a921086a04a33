"""Values of tensors without gradients, as in the example: masks, positions."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import size_at_example, value_of


class NoValueError(Exception):
    """Tensor without known values: on the meta device, or of an unrunnable node."""


# Measured factors need these values: a softmax behind a causal mask has another scale than one without. Nothing here
# depends on a parameter, so a model without values (on the meta device) only lacks its buffers.
class Values:
    """Values of nodes without gradients, computed on the CPU at their first use."""

    def __init__(self, captured: Captured, carrying: frozenset[str]) -> None:
        self._carrying = carrying
        self._known: dict[str, Any] = {}
        self._inputs = _input_values(captured)
        self._module = captured.program.graph_module
        self._remembered: dict[str, Any] = {}

    def remembered(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once for a key."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    def of(self, argument: Any) -> Any:
        """Return an argument of a node with every node in it replaced by its value."""
        return map_arg(argument, self._node)

    def _node(self, node: fx.Node) -> Any:
        if node.name not in self._known:
            self._known[node.name] = self._computed(node)
        return self._known[node.name]

    def _computed(self, node: fx.Node) -> Any:
        known = value_of(node)
        if known is not None and not isinstance(known, (Tensor, list, tuple)):
            return size_at_example(known) if isinstance(known, torch.SymInt) else known
        if node.name in self._carrying:
            raise NoValueError(node.name)
        if node.op == "placeholder":
            return self._input_value(node)
        if node.op == "get_attr":  # the inside of a region without gradients or under autocast
            return self._module.get_submodule(str(node.target))
        if node.op != "call_function" or isinstance(node.target, str):
            raise NoValueError(node.name)
        arguments, keywords = self._ready(node)
        with torch.no_grad():
            return node.target(*arguments, **keywords)

    def _ready(self, node: fx.Node) -> tuple[Any, dict[str, Any]]:
        arguments = self.of(node.args)
        keywords = {name: value for name, value in self.of(node.kwargs).items() if name != "pin_memory"}
        if "device" in keywords:
            keywords["device"] = torch.device("cpu")
        if node.target is operator.getitem or not arguments:
            return arguments, keywords
        # An operation in place gets copies, so that buffers do not change.
        return pytree.tree_map(_copied, arguments), keywords

    def _input_value(self, node: fx.Node) -> Any:
        value = self._inputs.get(node.name)
        if isinstance(value, Tensor) and value.device.type == "meta":
            raise NoValueError(node.name)
        return value.detach().cpu() if isinstance(value, Tensor) else value


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _input_values(captured: Captured) -> dict[str, Any]:
    """Return values of the example, buffers and constants by placeholders."""
    inputs = iter(pytree.tree_leaves((captured.args, dict(captured.kwargs))))
    program = captured.program
    values: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            values[name] = next(inputs, None)
        elif spec.target is not None:
            values[name] = program.state_dict.get(spec.target, program.constants.get(spec.target))
    return values
