"""One factor for gradients that several paths share.

Three cases need one. Without a constraint, every operation has its own factor forward and backward, so the paths into a
tensor that several operations use have its gradient in different units. Path e has c(e) times the true gradient. All
are brought to one number c with 1 / c^2 = sum of 1 / c(e)^2, so that the sum of independent parts is at unit scale
again. Residual additions need no separate rule: the branch's gradient is multiplied by sqrt(tau) at the start.
"""

import math
from collections.abc import Mapping

from torch import fx

from plimsoll.unit.capture.fused_functions import Cluster
from plimsoll.unit.capture.gradient_graph import SINK, Edge, Flow, base_name, shape_of
from plimsoll.unit.changes import ONE, Factor
from plimsoll.unit.rules.measured import ENTRY
from plimsoll.unit.rules.operation import Ideal, mean, number, times

_PARTS = frozenset({"getitem", "slice", "select", "narrow", "index_select"})


def balanced(
    graph: Flow,
    free: frozenset[Edge],
    ideals: Mapping[str, Ideal],
    clusters: Mapping[str, Cluster],
    nodes: Mapping[str, fx.Node],
    incoming: Mapping[str, float],
) -> dict[str, float]:
    """Return each tensor's gradient over the true one, which is 1 behind a bridge.

    Args:
        graph: Graph that gradients flow through.
        free: Edges that are bridges.
        ideals: Ideal factors of every operation.
        clusters: Operations that are one.
        nodes: Nodes by name.
        incoming: Ideal factor of the gradient of each loss that shares its paths, divided by the common one.
    """
    factors: dict[str, float] = {SINK: 1.0}
    for name in reversed(graph.nodes):
        cluster = clusters.get(name)
        if cluster is not None and cluster.exit != name:
            continue
        edges = {_end(edge, clusters): edge for edge in graph.out_of[name]}
        if any(edge in free for edge in edges.values()):
            factors[name] = 1.0
            continue
        parts: list[float] = []
        for (end, _), edge in edges.items():
            own = factors[end] * _ideal_ratio(edge, end, ideals, nodes) * incoming.get(end, 1.0)
            parts.append(_part(edge, end, graph) / own**2)
        factors[name] = math.fsum(parts) ** -0.5
    for name, cluster in clusters.items():
        factors[name] = factors[cluster.exit]
    return factors


def _end(edge: Edge, clusters: Mapping[str, Cluster]) -> tuple[str, object]:
    """Return the target operation of an edge and its port. A cluster has one port."""
    cluster = clusters.get(edge.target)
    return (edge.target, edge.port) if cluster is None else (cluster.exit, ENTRY)


def _ideal_ratio(edge: Edge, end: str, ideals: Mapping[str, Ideal], nodes: Mapping[str, fx.Node]) -> float:
    """Return the ideal backward factor of an edge divided by the forward one."""
    if end not in ideals:
        return 1.0
    ideal = ideals[end]
    port = edge.port if end == edge.target and ENTRY not in ideal.gradients else ENTRY
    back = number(ideal.gradients.get(port, ONE), nodes)
    return back / (number(ideal.output, nodes) * ideal.weights.get(port, 1.0))


def _part(edge: Edge, end: str, graph: Flow) -> float:
    """Return the share of a tensor whose gradient comes by one path, as by a slice."""
    if end == SINK or base_name(graph.nodes[end]) not in _PARTS:
        return 1.0
    node, source = graph.nodes[end], graph.nodes[edge.source]
    whole = shape_of(source)
    if not whole and graph.into[edge.source]:  # a list of parts has the shape of the tensor that was split
        whole = shape_of(graph.nodes[graph.into[edge.source][0].source])
    return min(1.0, math.prod(shape_of(node)) / max(math.prod(whole), 1))


# A parameter that several operations use is an end of the graph, so its number is free. But its uses are joined by the
# rest of the model, so they must agree on one, which is chosen in the same way.
def tied_factors(
    graph: Flow,
    free: frozenset[Edge],
    ideals: Mapping[str, Ideal],
    outputs: Mapping[str, Factor],
    nodes: Mapping[str, fx.Node],
    potential: Mapping[str, float],
) -> dict[Edge, Factor]:
    """Return the backward factor of every edge from a parameter that is no bridge."""

    def forward(edge: Edge) -> float:
        """Return the forward factor of an edge over the potential of its target."""
        ideal = ideals.get(edge.target)
        value = number(outputs[edge.target], nodes) * ideal.weights.get(edge.port, 1.0) if ideal else 1.0
        return value / potential.get(edge.target, 1.0)

    def own(edge: Edge) -> Factor:
        return ideals[edge.target].gradients.get(edge.port, ONE) if edge.target in ideals else ONE

    factors: dict[Edge, Factor] = {}
    for name in graph.parameters:
        edges = [edge for edge in graph.out_of[name] if edge not in free]
        if edges:
            whole = math.fsum((forward(edge) / number(own(edge), nodes)) ** 2 for edge in edges) ** -0.5
            share = _following([own(edge) for edge in edges], whole, nodes)
            factors |= {edge: times(share, forward(edge)) for edge in edges}
    return factors


def _following(factors: list[Factor], whole: float, nodes: Mapping[str, fx.Node]) -> Factor:
    """Return a number that follows the batch as the first use does."""
    first = next((factor for factor in factors if factor.of is not None), None)
    return Factor(value=whole) if first is None else times(first, whole / number(first, nodes))


# Losses that are added share their paths too, so their separate factors cannot be applied. Their geometric mean is
# applied where all of them end, at the result that the model returns.
def incoming_factors(
    graph: Flow, free: frozenset[Edge], ideals: Mapping[str, Ideal], nodes: Mapping[str, fx.Node]
) -> tuple[dict[str, Factor], dict[str, float]]:
    """Return the factors of incoming gradients, and each shared loss's own ratio."""
    losses = {name: ideal.incoming for name, ideal in ideals.items() if not ideal.incoming.is_one}
    alone = {name: factor for name, factor in losses.items() if all(edge in free for edge in graph.out_of[name])}
    shared = {name: factor for name, factor in losses.items() if name not in alone and not shape_of(nodes[name])}
    ends = [edge for edge in graph.into[SINK] if edge in free and edge.source in ideals]
    if not shared or len(graph.into[SINK]) != 1 or not ends or ends[0].source in alone:
        return alone, {}
    whole = mean("gmean", list(shared.values()), nodes)
    ratios = {name: number(factor, nodes) / number(whole, nodes) for name, factor in shared.items()}
    return {**alone, ends[0].source: whole}, ratios
