"""What a conversion does to a captured graph: factors where edges are free, shared ones where they are not.

Every tensor u has a number c(u), what its gradient is multiplied by against the true one. An edge from u to v that is
multiplied forward by a and backward by b changes it by b / a, so the gradient is a true one if and only if there are
such numbers with b / a = c(u) / c(v) on every edge. On a bridge that holds whatever b and a are. Elsewhere an operation
has one factor both ways, and c is 1 but inside residual branches (`residuals`) and for shared parameters, which have
one number for all their uses (`tied_parameters`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from plimsoll.unit.analysis.balance import balanced
from plimsoll.unit.analysis.loss_gradients import incoming_factors
from plimsoll.unit.analysis.parameters import parameter_changes
from plimsoll.unit.analysis.residuals import Tau, residuals
from plimsoll.unit.analysis.source_location import check_aliases, left_of
from plimsoll.unit.analysis.tied_parameters import tied_factors
from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.example_values import Values
from plimsoll.unit.capture.fused_functions import Cluster, clusters, free_edges
from plimsoll.unit.capture.gradient_graph import Edge, Flow, base_name, flow, tensor_ports
from plimsoll.unit.changes import ONE, Factor, Left, NodeChange, ParameterChange, Port, Scale
from plimsoll.unit.factors.formulas import Constraint, check_constraint
from plimsoll.unit.rules.measured import ENTRY, of_cluster
from plimsoll.unit.rules.operation import Ideal, Site, mean, parameter_behind, times
from plimsoll.unit.rules.registry import ideal_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What becomes of every operation and parameter of a captured model.

    - `changes`: by node; one that is not here is carried out as it is. `parameters`: by name in the model, every name
      of a shared one. `left`: what was not converted, and why. `flow`: the graph that gradients flow through.
    - `reasons`: by node, the rule's word on every operation that a gradient flows through, changed or not.
    """

    changes: Mapping[str, NodeChange]
    parameters: Mapping[str, ParameterChange]
    left: tuple[Left, ...]
    flow: Flow
    reasons: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """All that is known before the edges are looked at: ideal factors, what is one operation, which edges are free."""

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
        """What the gradient is multiplied by on an edge into an operation, beyond what the value is."""
        return self.potential.get(edge.source, 1.0) / self.potential.get(end, 1.0)


def analyse(captured: Captured, *, constraint: Constraint | None = "gmean", residual_tau: Tau = None) -> Analysis:
    """The changes that bring every tensor of `captured` to unit scale, forward and backward.

    Args:
        captured: the graph.
        constraint: how the factors of an operation become one, where its edges are no bridges. None: they do not;
            every operation keeps its own each way, and gradients are corrected where paths meet (`balance`).
        residual_tau: the weight of a residual branch: a number in (0, 1); one for each kind of branch ("attention",
            "mlp", "other"); None: 1 / (k + 1) for the k-th on a skip path, so that all of them count alike.

    Raises `ArgumentError` for a constraint or a weight that is none, and where a conversion would be wrong.
    """
    check_constraint("convert", constraint)
    graph = flow(captured)
    check_aliases(captured, graph)
    rules = _rules(captured, graph, constraint, residual_tau)
    changes = _changes(rules)
    as_they_are = {name for name, one in rules.ideals.items() if one.left}
    parameters, kept = parameter_changes(captured, graph, as_they_are, rules.depth)
    left = [left_of(rules.nodes[name], ideal.left) for name, ideal in rules.ideals.items() if ideal.left]
    reasons = {name: ideal.why for name, ideal in rules.ideals.items()}
    return Analysis(changes=changes, parameters=parameters, left=(*left, *kept), flow=graph, reasons=reasons)


def _rules(captured: Captured, graph: Flow, constraint: Constraint | None, tau: Tau) -> _Rules:
    values = Values(captured, frozenset(graph.carrying))
    together = clusters(graph)
    found = residuals(graph, tau, frozenset(together))
    ideals: dict[str, Ideal] = {}
    means: dict[str, float] = {}
    for name, node in graph.nodes.items():
        if node.op != "call_function":
            continue
        if name in together:
            cluster = together[name]
            ideals[name] = of_cluster(cluster, graph, values, means) if cluster.exit == name else _inside(node)
        else:
            ports = {port: source for port, source in tensor_ports(node) if source.name in graph.nodes}
            site = Site(node=node, flow=graph, ports=ports, means=means, values=values)
            ideals[name] = found.weighted(name, ideal_of(site))
        means[name] = ideals[name].mean
    nodes = {node.name: node for node in captured.graph.nodes}
    free = free_edges(graph, together)
    incoming, own = incoming_factors(graph, free, ideals, nodes)
    potential = found.potential if constraint else balanced(graph, free, ideals, together, nodes, own)
    return _Rules(
        graph=graph, nodes=nodes, clusters=together, free=free, ideals=ideals, constraint=constraint,
        potential=potential, incoming=incoming, depth=found.depth,
    )  # fmt: skip


def _inside(node: fx.Node) -> Ideal:
    return Ideal(operation=base_name(node), why="part of an operation written in several", rigid=True)


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
            changes[name] = NodeChange(operation=ideal.operation, why=ideal.why, output=output, inputs=inputs)
    return changes


def _is_one(scale: Scale) -> bool:
    return scale.forward.is_one and scale.backward.is_one


def _bound(name: str, rules: _Rules) -> list[Edge]:
    """The edges into an operation (into all of a cluster) that are not free and bring no parameter."""
    cluster = rules.clusters.get(name)
    inside = cluster.nodes if cluster else frozenset({name})
    edges = [edge for one in inside for edge in rules.graph.into[one] if edge.source not in inside]
    return [
        edge for edge in edges
        if edge not in rules.free and parameter_behind(rules.graph.nodes[edge.source], rules.graph) is None
    ]  # fmt: skip


def _output(name: str, ideal: Ideal, rules: _Rules) -> Factor:
    """What multiplies an operation's result: its ideal factor, or the one that stands for both directions."""
    bound = [] if ideal.rigid else _bound(name, rules)
    if not bound or rules.constraint is None:
        return ideal.output
    if name in rules.clusters:
        return mean(rules.constraint, [ideal.output, ideal.gradients[ENTRY]], rules.nodes)
    own = [ideal.gradients.get(edge.port, ONE) for edge in bound]
    return mean(rules.constraint, [ideal.output, *own], rules.nodes)


def _backward(edge: Edge, rules: _Rules, outputs: Mapping[str, Factor], tied: Mapping[Edge, Factor]) -> Factor:
    """What multiplies the gradient that leaves an operation at one port."""
    if edge in tied:
        return tied[edge]
    cluster = rules.clusters.get(edge.target)
    if cluster is not None and edge.source in cluster.nodes:
        return ONE
    end, port = (cluster.exit, ENTRY) if cluster else (edge.target, edge.port)
    if edge in rules.free:
        return rules.ideals[end].gradients.get(port, ONE)
    return times(outputs[end], rules.ideals[edge.target].weights.get(edge.port, 1.0) * rules.ratio(edge, end))
