"""Ideal factors both ways everywhere, and true gradients still: what paths disagree about is settled where they meet.

Every operation has its own factor forward and its own one backward, so every gradient is at unit scale if the one
before it is. The paths into a tensor that several operations use then bring its gradient in different units. Their true
proportions are known: path e brings c(e) times the true gradient. They are brought to one number, c with
1 / c^2 = sum of 1 / c(e)^2, so that the sum of independent parts is at unit scale again. A residual addition comes out
of this by itself: its branch's gradient is multiplied by sqrt(tau) at the branch's start.
"""

import math
from collections.abc import Mapping

from torch import fx

from plimsoll.unit.capture.fused_functions import Cluster
from plimsoll.unit.capture.gradient_graph import SINK, Edge, Flow, base_name, shape_of
from plimsoll.unit.changes import ONE
from plimsoll.unit.rules.measured import ENTRY
from plimsoll.unit.rules.operation import Ideal, number

_PARTS = frozenset({"getitem", "slice", "select", "narrow", "index_select"})


def balanced(
    graph: Flow, free: frozenset[Edge], ideals: Mapping[str, Ideal], clusters: Mapping[str, Cluster],
    nodes: Mapping[str, fx.Node], incoming: Mapping[str, float],
) -> dict[str, float]:  # fmt: skip
    """What the gradient of every tensor is multiplied by against the true one: 1 behind a bridge.

    `incoming`: what the gradient of a loss that shares its paths should be multiplied by, against what all of them are.
    """
    known: dict[str, float] = {SINK: 1.0}
    for name in reversed(graph.nodes):
        cluster = clusters.get(name)
        if cluster is not None and cluster.exit != name:
            continue
        edges = {_end(edge, clusters): edge for edge in graph.out_of[name]}
        if any(edge in free for edge in edges.values()):
            known[name] = 1.0
            continue
        parts: list[float] = []
        for (end, _), edge in edges.items():
            own = known[end] * _ideal_ratio(edge, end, ideals, nodes) * incoming.get(end, 1.0)
            parts.append(_part(edge, end, graph) / own**2)
        known[name] = math.fsum(parts) ** -0.5
    for name, cluster in clusters.items():
        known[name] = known[cluster.exit]
    return known


def _end(edge: Edge, clusters: Mapping[str, Cluster]) -> tuple[str, object]:
    """The operation that an edge goes into, and its port: all edges into a cluster are one."""
    cluster = clusters.get(edge.target)
    return (edge.target, edge.port) if cluster is None else (cluster.exit, ENTRY)


def _ideal_ratio(edge: Edge, end: str, ideals: Mapping[str, Ideal], nodes: Mapping[str, fx.Node]) -> float:
    """Backward against forward, as the operation would have it."""
    if end not in ideals:
        return 1.0
    ideal = ideals[end]
    port = edge.port if end == edge.target and ENTRY not in ideal.gradients else ENTRY
    back = number(ideal.gradients.get(port, ONE), nodes)
    return back / (number(ideal.output, nodes) * ideal.weights.get(port, 1.0))


def _part(edge: Edge, end: str, graph: Flow) -> float:
    """The part of a tensor that has a gradient by one path: a slice's gradient is zero elsewhere."""
    if end == SINK or base_name(graph.nodes[end]) not in _PARTS:
        return 1.0
    node, source = graph.nodes[end], graph.nodes[edge.source]
    whole = shape_of(source)
    if not whole and graph.into[edge.source]:  # a list of parts: of what was split
        whole = shape_of(graph.nodes[graph.into[edge.source][0].source])
    return min(1.0, math.prod(shape_of(node)) / max(math.prod(whole), 1))
