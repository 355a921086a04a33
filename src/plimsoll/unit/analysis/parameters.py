"""How each parameter is drawn anew, and its kind: told from the operations that use it."""

from collections.abc import Generator, Mapping
from dataclasses import replace

from torch import fx

from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import SINK, Edge, Flow, base_name, shape_of
from plimsoll.unit.changes import Left, ParameterChange
from plimsoll.unit.rules.operation import VIEWS

_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"})
_PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
     "conv_transpose2d", "conv_transpose3d"}
)  # fmt: skip
_ADDITIONS = frozenset({"add", "sub", "cat", "stack", "where"})


def parameter_changes(
    captured: Captured, graph: Flow, left: set[str], depth: Mapping[str, int]
) -> tuple[dict[str, ParameterChange], list[Left]]:
    """What becomes of every parameter of the model, by each of its names; and those that stay as they are, with why.

    Args:
        captured: the model's graph.
        graph: its part that gradients flow through.
        left: the operations that were left as they are: their parameters are, too.
        depth: of the operations in residual branches.
    """
    names = {name: group for group in captured.ties for name in group}
    found: dict[str, ParameterChange] = {}
    kept: list[Left] = []
    for placeholder, name in captured.parameters.items():
        if placeholder in graph.nodes:
            change = replace(_change(placeholder, graph, left), depth=_depth(placeholder, graph, depth))
            found |= dict.fromkeys(names.get(name, (name,)), change)
    for name in captured.parameters.values():
        if name not in found:
            found[name] = ParameterChange(draw="keep", kind="weight")
        if found[name].draw == "keep":
            kept.append(_kept(name))
    return found, kept


def _kept(name: str) -> Left:
    module, _, own = name.rpartition(".")
    return Left(
        operation=f"parameter {own}", module=module, source=None, why="no rule says how it begins: kept as it is"
    )


def _change(placeholder: str, graph: Flow, left: set[str]) -> ParameterChange:
    uses = list(_uses(placeholder, graph))
    shape = shape_of(graph.nodes[placeholder])
    names = {base_name(graph.nodes[edge.target]) for edge in uses if edge.target != SINK}
    if not uses or any(edge.target in left or edge.target == SINK for edge in uses):
        return ParameterChange(draw="keep", kind="weight")
    if "embedding" in names:
        return ParameterChange(draw="normal", kind="embedding")
    if names & _NORMS:
        return ParameterChange(draw="ones" if any(_is_gain(edge, graph) for edge in uses) else "zeros", kind="norm")
    if any(_is_weight(edge, graph) for edge in uses):
        return ParameterChange(draw="normal", kind="weight")
    if names & {"mul"}:
        return ParameterChange(draw="ones", kind="norm")
    # A table of positions that is added, or a token of its own that is put before the others.
    if names <= _ADDITIONS and (names & {"cat", "stack"} or sum(size != 1 for size in shape) > 1):
        return ParameterChange(draw="normal", kind="embedding")
    if names <= _PRODUCTS | {"add", "sub"}:
        return ParameterChange(draw="zeros", kind="bias")
    return ParameterChange(draw="keep", kind="weight")


def _depth(placeholder: str, graph: Flow, depth: Mapping[str, int]) -> int:
    """That of the least deep operation that computes with the parameter."""
    return min((depth.get(edge.target, 1) for edge in _uses(placeholder, graph)), default=1)


def _uses(name: str, graph: Flow) -> Generator[Edge]:
    """The edges into whatever computes with a tensor, through views."""
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
    """Whether a parameter is an operand of a product, and not its bias."""
    node: fx.Node = graph.nodes[edge.target]
    name = base_name(node)
    bias = 0 if name == "addmm" else 2
    return name in _PRODUCTS and edge.port not in ("bias", bias)
