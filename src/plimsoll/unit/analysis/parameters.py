"""Draw, kind and fan-in of each parameter, derived from its uses."""

import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import fx, nn

from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import SINK, Edge, Flow, base_name, shape_of
from plimsoll.unit.changes import ParameterChange, SkippedOperation
from plimsoll.unit.optim.parameter_kinds import tag_fan_in
from plimsoll.unit.rules.operation import VIEWS

_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"})
_PRODUCTS = frozenset(
    """
    linear matmul mm bmm mv dot addmm einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    """.split()
)
# Position of the argument that is multiplied from the right.
_RIGHT = {"matmul": 1, "mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_ADDITIONS = frozenset({"add", "sub", "cat", "stack", "where"})


def parameter_changes(
    captured: Captured, graph: Flow, skipped: set[str], depth: Mapping[str, int]
) -> tuple[dict[str, ParameterChange], list[SkippedOperation]]:
    """Return the change of every parameter, and the unchanged ones with reasons.

    Shared parameters are listed under each of their names. Parameters of `skipped` operations stay unchanged. `depth`
    is that of the operations in residual branches.
    """
    names = {name: group for group in captured.ties for name in group}
    changes: dict[str, ParameterChange] = {}
    unchanged: list[SkippedOperation] = []
    for placeholder, name in captured.parameters.items():
        if placeholder in graph.nodes:
            change = replace(_change(placeholder, graph, skipped), depth=_depth(placeholder, graph, depth))
            changes |= dict.fromkeys(names.get(name, (name,)), change)
    for name in captured.parameters.values():
        if name not in changes:
            changes[name] = ParameterChange(draw="keep", kind="weight")
        if changes[name].draw == "keep":
            unchanged.append(_unchanged(name))
    return changes, unchanged


def _unchanged(name: str) -> SkippedOperation:
    module, _, own = name.rpartition(".")
    return SkippedOperation(
        operation=f"parameter {own}", module=module, source=None, why="no rule for its first values: kept unchanged"
    )


def _change(placeholder: str, graph: Flow, skipped: set[str]) -> ParameterChange:
    uses = list(_uses(placeholder, graph))
    shape = shape_of(graph.nodes[placeholder])
    names = {base_name(graph.nodes[edge.target]) for edge in uses if edge.target != SINK}
    if not uses or any(edge.target in skipped or edge.target == SINK for edge in uses):
        return ParameterChange(draw="keep", kind="weight")
    if "embedding" in names:
        return ParameterChange(draw="normal", kind="embedding")
    if names & _NORMS:
        return ParameterChange(draw="ones" if any(_is_gain(edge, graph) for edge in uses) else "zeros", kind="norm")
    if any(_is_weight(edge, graph) for edge in uses):
        return ParameterChange(draw="normal", kind="weight")
    if names & {"mul"}:
        return ParameterChange(draw="ones", kind="norm")
    # A table of positions that is added, or a custom token that is put before the others.
    if names <= _ADDITIONS and (names & {"cat", "stack"} or sum(size != 1 for size in shape) > 1):
        return ParameterChange(draw="normal", kind="embedding")
    if names <= _PRODUCTS | {"add", "sub"}:
        return ParameterChange(draw="zeros", kind="bias")
    return ParameterChange(draw="keep", kind="weight")


def _depth(placeholder: str, graph: Flow, depth: Mapping[str, int]) -> int:
    """Return the depth of the least deep operation that computes with the parameter."""
    return min((depth.get(edge.target, 1) for edge in _uses(placeholder, graph)), default=1)


def _uses(name: str, graph: Flow) -> Generator[Edge]:
    """Yield the edges into operations that compute with a tensor, through views."""
    for edge in graph.out_of[name]:
        node = graph.nodes.get(edge.target)
        if node is not None and base_name(node) in VIEWS | {"expand"}:
            yield from _uses(edge.target, graph)
        else:
            yield edge


def _is_gain(edge: Edge, graph: Flow) -> bool:
    name = base_name(graph.nodes[edge.target])
    return name in _NORMS and edge.port in ("weight", 1 if name in ("batch_norm", "instance_norm") else 2)


def _is_weight(edge: Edge, graph: Flow) -> bool:
    """Return whether a parameter is an operand of a product, and not its bias."""
    node: fx.Node = graph.nodes[edge.target]
    name = base_name(node)
    bias = 0 if name == "addmm" else 2
    return name in _PRODUCTS and edge.port not in ("bias", bias)


def tag_fan_ins(model: nn.Module, captured: Captured) -> None:
    """Tag the converted model's parameters with a fan-in that the shape lacks."""
    ties = {name: group for group in captured.ties for name in group}
    names = captured.parameters
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules(remove_duplicate=False))
    # A weight that is multiplied from the right, `x @ w`, sums over its first dimension. Torch's linear products and
    # convolutions sum over all but the first.
    for node in captured.graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" else ():
            if source.name not in names:
                continue
            fan = _fan_in(node, source)
            if fan is not None:
                for path in ties.get(names[source.name], (names[source.name],)):
                    owner, _, name = path.rpartition(".")
                    tag_fan_in(modules[owner], **{name: fan})


def _fan_in(node: fx.Node, parameter: fx.Node) -> int | None:
    shape = tuple(int(size) for size in parameter.meta["val"].shape)
    operation = base_name(node)
    if operation in _TRANSPOSED and len(node.args) > 1 and node.args[1] is parameter:
        strides = _strides(node)
        return max(1, shape[0] * math.prod(shape[2:]) // strides)
    if operation == "einsum" and len(node.args) > 1:
        return _einsum_fan_in(node, parameter, shape)
    at = _RIGHT.get(operation)
    right = at is not None and len(node.args) > at and node.args[at] is parameter
    return max(1, shape[-2]) if right and len(shape) > 1 else None


def _strides(node: fx.Node) -> int:
    stride: Any = (*node.args, None, None)[3] or 1  # input, weight, bias, stride
    return stride if isinstance(stride, int) else math.prod(cast("list[int]", stride))


def _einsum_fan_in(node: fx.Node, parameter: fx.Node, shape: tuple[int, ...]) -> int | None:
    left, _, out = str(node.args[0]).replace(" ", "").partition("->")
    operands = list(node.args[1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportUnknownVariableType, reportUnknownArgumentType]
    letters = left.split(",")[operands.index(parameter)]
    if "." in letters or not out or len(letters) != len(shape):
        return None
    return max(1, math.prod(size for letter, size in zip(letters, shape, strict=True) if letter not in out))
