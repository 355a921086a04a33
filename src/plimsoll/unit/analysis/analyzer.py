"""Changes of a graph by a conversion: separate factors on free edges only.

Every tensor u has a number c(u), the factor between its gradient and the true one. An edge from u to v with the factors
a forward and b backward changes it by b / a. So the gradient is a true one if and only if there are such numbers with b
/ a = c(u) / c(v) on every edge. On a bridge that holds for any b and a. Elsewhere an operation has one factor both
ways. There c is 1, except inside residual branches (`residuals`) and for shared parameters, which have one number for
all their uses.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import fx

from plimsoll.errors import ArgumentError
from plimsoll.unit.analysis.parameters import parameter_changes
from plimsoll.unit.analysis.residuals import Tau, residuals
from plimsoll.unit.capture.captured_program import TORCH, Captured
from plimsoll.unit.capture.gradient_graph import (
    SINK,
    Cluster,
    Edge,
    Flow,
    Values,
    base_name,
    clusters,
    flow,
    free_edges,
    operation_of,
    shape_of,
    tensor_ports,
)
from plimsoll.unit.changes import ONE, Factor, NodeChange, ParameterChange, Port, Scale, SkippedOperation
from plimsoll.unit.formulas import Constraint, check_constraint
from plimsoll.unit.rules.by_formula import LOSSES, POINTWISE, PRODUCTS, SUMS
from plimsoll.unit.rules.measured import ENTRY, MEASURED, of_cluster
from plimsoll.unit.rules.operation import VIEWS, Ideal, Rule, Site, mean, number, parameter_behind, skipped, times

# -- locations of operations in source and model, and refusals that name them ------------------------------------------

_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def module_of(node: fx.Node) -> str:
    """Return the innermost module that called an operation, "" for the root."""
    stack: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values() if not name.startswith("_empty_nn_module_stack")]
    return names[-1] if names else ""


def source_of(node: fx.Node) -> str | None:
    """Return ``file:line`` of an operation: the innermost line outside torch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if not file.startswith(TORCH)]
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


# -- one factor for gradients that several paths share -----------------------------------------------------------------

# Three cases need one. Without a constraint, every operation has its own factor forward and backward, so the paths into
# a tensor that several operations use have its gradient in different units. Path e has c(e) times the true gradient.
# All are brought to one number c with 1 / c^2 = sum of 1 / c(e)^2, so that the sum of independent parts is at unit
# scale again. Residual additions need no separate rule: the branch's gradient is multiplied by sqrt(tau) at the start.

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

    `free` are the bridges. `incoming` has the ideal factor of the gradient of each loss that shares its paths, divided
    by the common one.
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


# -- analysis ----------------------------------------------------------------------------------------------------------

# A formula replaces the measurement of the same operation: it is exact and follows the batch.
_RULES: dict[str, Rule] = {**MEASURED, **PRODUCTS, **POINTWISE, **SUMS, **LOSSES}
_INSIDE = Ideal(why="part of an operation written in several", rigid=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Changes of all operations and parameters of a captured model."""

    changes: Mapping[str, NodeChange]  # Changes of operations by node. Nodes that are missing here stay unchanged.
    # Changes of parameters by name in the model, under every name of a shared one.
    parameters: Mapping[str, ParameterChange]
    skipped: tuple[SkippedOperation, ...]  # operations and parameters that are not converted, with reasons
    flow: Flow
    reasons: Mapping[str, str]  # reason of the rule for every operation that a gradient flows through, changed or not


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Facts known before edges: ideal factors, clusters, free edges."""

    graph: Flow
    nodes: Mapping[str, fx.Node]
    clusters: Mapping[str, Cluster]
    free: frozenset[Edge]
    ideals: dict[str, Ideal]
    constraint: Constraint | None
    potential: Mapping[str, float]
    incoming: Mapping[str, Factor]
    depth: Mapping[str, int]

    def ratio(self, edge: Edge, end: str) -> float:
        """Return the backward over the forward factor of an edge into an operation."""
        return self.potential.get(edge.source, 1.0) / self.potential.get(end, 1.0)


def analyse(captured: Captured, *, constraint: Constraint | None = "gmean", residual_tau: Tau = None) -> Analysis:
    """Return the changes that bring every tensor to unit scale in both directions.

    The arguments are those of `convert`. Without a constraint gradients are corrected where paths meet (`balanced`).
    Raises an `ArgumentError` if the constraint or a weight is not allowed, or a conversion would be wrong.
    """
    check_constraint("convert", constraint)
    graph = flow(captured)
    check_aliases(captured, graph)
    rules = _rules(captured, graph, constraint, residual_tau)
    changes = _changes(rules)
    left = {name: ideal.skipped for name, ideal in rules.ideals.items() if ideal.skipped}
    parameters, unchanged = parameter_changes(captured, graph, set(left), rules.depth)
    skipped = (*(skipped_operation(rules.nodes[name], why) for name, why in left.items()), *unchanged)
    reasons = {name: ideal.why for name, ideal in rules.ideals.items()}
    return Analysis(changes=changes, parameters=parameters, skipped=skipped, flow=graph, reasons=reasons)


def _rules(captured: Captured, graph: Flow, constraint: Constraint | None, tau: Tau) -> _Rules:
    values = Values(captured, frozenset(graph.carrying))
    together = clusters(graph)
    joins = residuals(graph, tau, frozenset(together))
    ideals: dict[str, Ideal] = {}
    means: dict[str, float] = {}
    for name, node in graph.nodes.items():
        if node.op != "call_function":
            continue
        if name in together:
            cluster = together[name]
            ideals[name] = of_cluster(cluster, graph, values, means) if cluster.exit == name else _INSIDE
        else:
            ports = {port: source for port, source in tensor_ports(node) if source.name in graph.nodes}
            site = Site(node=node, flow=graph, ports=ports, means=means, values=values)
            ideals[name] = joins.weighted(name, _ideal(site))
        means[name] = ideals[name].mean
    nodes = {node.name: node for node in captured.graph.nodes}
    free = free_edges(graph, together)
    incoming, own = incoming_factors(graph, free, ideals, nodes)
    potential = joins.potential if constraint else balanced(graph, free, ideals, together, nodes, own)
    return _Rules(
        graph=graph,
        nodes=nodes,
        clusters=together,
        free=free,
        ideals=ideals,
        constraint=constraint,
        potential=potential,
        incoming=incoming,
        depth=joins.depth,
    )


def _ideal(site: Site) -> Ideal:
    rule = _RULES.get(site.operation)
    return skipped("no rule for this operation") if rule is None else rule(site)


def _changes(rules: _Rules) -> dict[str, NodeChange]:
    outputs = {name: _output(name, ideal, rules) for name, ideal in rules.ideals.items()}
    tied = tied_factors(rules.graph, rules.free, rules.ideals, outputs, rules.nodes, rules.potential)
    changes: dict[str, NodeChange] = {}
    for name, ideal in rules.ideals.items():
        inputs: dict[Port, Scale] = {}
        for edge in rules.graph.into[name]:
            weight = ideal.weights.get(edge.port, 1.0)
            inputs[edge.port] = Scale(forward=Factor(value=weight), backward=_backward(edge, rules, outputs, tied))
        inputs = {port: scale for port, scale in inputs.items() if not _is_one(scale)}
        output = Scale(forward=outputs[name], backward=rules.incoming.get(name, ONE))
        if inputs or not _is_one(output):
            operation = base_name(rules.graph.nodes[name])
            changes[name] = NodeChange(operation=operation, why=ideal.why, output=output, inputs=inputs)
    return changes


def _is_one(scale: Scale) -> bool:
    return scale.forward.is_one and scale.backward.is_one


def _bound(name: str, rules: _Rules) -> list[Edge]:
    """Return the bound edges into an operation or cluster, without parameters'."""
    cluster = rules.clusters.get(name)
    inside = cluster.nodes if cluster else frozenset({name})
    edges = [edge for member in inside for edge in rules.graph.into[member] if edge.source not in inside]
    return [
        edge
        for edge in edges
        if edge not in rules.free and parameter_behind(rules.graph.nodes[edge.source], rules.graph) is None
    ]


def _output(name: str, ideal: Ideal, rules: _Rules) -> Factor:
    """Return a result's factor: the ideal one, or one common to both directions."""
    bound = [] if ideal.rigid else _bound(name, rules)
    if not bound or rules.constraint is None:
        return ideal.output
    if name in rules.clusters:
        return mean(rules.constraint, [ideal.output, ideal.gradients[ENTRY]], rules.nodes)
    own = [ideal.gradients.get(edge.port, ONE) for edge in bound]
    return mean(rules.constraint, [ideal.output, *own], rules.nodes)


def _backward(edge: Edge, rules: _Rules, outputs: Mapping[str, Factor], tied: Mapping[Edge, Factor]) -> Factor:
    """Return the factor of the gradient that leaves an operation at one port."""
    if edge in tied:
        return tied[edge]
    cluster = rules.clusters.get(edge.target)
    if cluster is not None and edge.source in cluster.nodes:
        return ONE
    end, port = (cluster.exit, ENTRY) if cluster else (edge.target, edge.port)
    if edge in rules.free:
        return rules.ideals[end].gradients.get(port, ONE)
    return times(outputs[end], rules.ideals[edge.target].weights.get(edge.port, 1.0) * rules.ratio(edge, end))
