"""What a conversion does to a captured graph: factors where edges are free, shared ones where they are not.

Every tensor u has a number c(u), what its gradient is multiplied by against the true one. An edge from u to v that is
multiplied forward by a and backward by b changes it by b / a, so the gradient is a true one if and only if there are
such numbers with b / a = c(u) / c(v) on every edge. On a bridge that holds whatever b and a are. Elsewhere the rules
give each operation one factor both ways, and c is 1 but inside residual branches (`_residuals`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from plimsoll.unit._capture import Captured
from plimsoll.unit._changes import ONE, Factor, Left, NodeChange, ParameterChange, Port, Scale
from plimsoll.unit._constraints import Constraint, check_constraint
from plimsoll.unit._coverage import left_of
from plimsoll.unit._graph import Edge, Flow, flow, tensor_ports
from plimsoll.unit._ideal import Ideal, Site, mean, times
from plimsoll.unit._parameters import parameter_changes
from plimsoll.unit._residuals import Residuals, Tau, residuals
from plimsoll.unit._rules import forward_weight, ideal_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What becomes of every operation and parameter of a captured model.

    - `changes`: by node; one that is not here is carried out as it is. `parameters`: by name in the model, every name of
      a shared one. `left`: what was not converted, and why. `flow`: the graph that gradients flow through.
    """

    changes: Mapping[str, NodeChange]
    parameters: Mapping[str, ParameterChange]
    left: tuple[Left, ...]
    flow: Flow


def analyse(captured: Captured, *, constraint: Constraint = "gmean", residual_tau: Tau = None) -> Analysis:
    """The changes that bring every tensor of `captured` to unit scale, forward and backward.

    Args:
        captured: the graph.
        constraint: how the factors of an operation become one, where its edges are no bridges.
        residual_tau: the weight of a residual branch: a number in (0, 1); one for each kind of branch ("attention",
            "mlp", "other"); None: 1 / (k + 1) for the k-th on a skip path, so that all of them count alike.

    Raises `ArgumentError` for a constraint or a weight that is none.
    """
    check_constraint("convert", constraint)
    graph = flow(captured)
    found = residuals(graph, residual_tau)
    nodes = {node.name: node for node in captured.graph.nodes}
    ideals = {node.name: _ideal(node, graph, nodes, found) for node in graph.nodes.values() if node.op == "call_function"}  # fmt: skip
    changes = {name: _change(name, ideal, graph, nodes, found, constraint) for name, ideal in ideals.items()}
    left = tuple(left_of(nodes[name], ideal.left) for name, ideal in ideals.items() if ideal.left)
    return Analysis(
        changes={name: change for name, change in changes.items() if not _changes_nothing(change)},
        parameters=parameter_changes(captured, graph),
        left=left,
        flow=graph,
    )


def _ideal(node: fx.Node, graph: Flow, nodes: dict[str, fx.Node], found: Residuals) -> Ideal:
    ports = {port: source for port, source in tensor_ports(node) if source.name in graph.nodes}
    ideal = ideal_of(Site(node=node, flow=graph, ports=ports, nodes=nodes))
    return found.weighted(node.name, ideal)


def _change(
    name: str, ideal: Ideal, graph: Flow, nodes: dict[str, fx.Node], found: Residuals, constraint: Constraint
) -> NodeChange:
    bound = [edge for edge in graph.into[name] if edge not in graph.bridges]
    output = ideal.output
    if bound and not ideal.rigid:
        activations = [edge for edge in bound if not graph.is_parameter(edge.source)]
        own = [ideal.gradients.get(edge.port, ONE) for edge in activations]
        output = mean(constraint, [ideal.output, *own], nodes) if own else output
    inputs: dict[Port, Scale] = {}
    for edge in graph.into[name]:
        forward = Factor(value=forward_weight(ideal, edge.port))
        backward = _backward(edge, ideal, output, bound, found)
        inputs[edge.port] = Scale(forward=forward, backward=backward)
    incoming = ideal.incoming if not bound else ONE
    return NodeChange(
        operation=ideal.operation, why=ideal.why, output=Scale(forward=output, backward=incoming), inputs=inputs
    )


def _backward(edge: Edge, ideal: Ideal, output: Factor, bound: list[Edge], found: Residuals) -> Factor:
    if edge not in bound:
        return ideal.gradients.get(edge.port, ONE)
    return times(output, forward_weight(ideal, edge.port) * found.ratio(edge))


def _changes_nothing(change: NodeChange) -> bool:
    scales = [change.output, *change.inputs.values()]
    return all(scale.forward.is_one and scale.backward.is_one for scale in scales)
