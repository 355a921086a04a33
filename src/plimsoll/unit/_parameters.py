"""How each parameter is drawn anew, and its kind: told from the operations that use it."""

from plimsoll.unit._capture import Captured
from plimsoll.unit._changes import ParameterChange
from plimsoll.unit._graph import Edge, Flow, base_name, shape_of

_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"})
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "einsum", "conv1d", "conv2d", "conv3d"})


def parameter_changes(captured: Captured, graph: Flow) -> dict[str, ParameterChange]:
    """What becomes of every parameter of the model, by each of its names."""
    ties = {name: group for group in captured.ties for name in group}
    found: dict[str, ParameterChange] = {}
    for placeholder, name in captured.parameters.items():
        edges = graph.out_of.get(placeholder, [])
        if not edges:
            continue
        change = _drawn(edges, graph)
        found |= dict.fromkeys(ties.get(name, (name,)), change)
    for name in captured.parameters.values():
        found.setdefault(name, ParameterChange(draw="keep", kind="weight"))
    return found


def _drawn(edges: list[Edge], graph: Flow) -> ParameterChange:
    uses = {(base_name(graph.nodes[edge.target]), edge.port) for edge in edges if edge.target in graph.nodes}
    names = {name for name, _ in uses}
    if "embedding" in names:
        return ParameterChange(draw="normal", kind="embedding")
    shape = shape_of(graph.nodes[edges[0].source])
    if names & _NORMS:
        first = any(port in (1, 2, "weight") and not (name == "batch_norm" and port == 2) for name, port in uses)
        return ParameterChange(draw="ones" if first else "zeros", kind="norm")
    if len(shape) > 1:
        return ParameterChange(draw="normal", kind="weight")
    return ParameterChange(draw="zeros", kind="bias")
