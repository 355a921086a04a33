"""Parameters that several operations use: one number for what their gradient is multiplied by, whichever way it came.

A parameter is where gradients end, so its number is free; but its uses are joined by the rest of the model, so they
must agree. It is such that the sum of what they bring is at unit scale, were they independent (as in `balance`).
"""

import math
from collections.abc import Mapping

from torch import fx

from plimsoll.unit.capture.gradient_graph import Edge, Flow
from plimsoll.unit.changes import ONE, Factor
from plimsoll.unit.rules.operation import Ideal, number, times


def tied_factors(
    graph: Flow, free: frozenset[Edge], ideals: Mapping[str, Ideal], outputs: Mapping[str, Factor],
    nodes: Mapping[str, fx.Node], potential: Mapping[str, float],
) -> dict[Edge, Factor]:  # fmt: skip
    """The backward factor of every edge from a parameter that is no bridge."""

    def forward(edge: Edge) -> float:
        """What multiplies the value on an edge, against the number of what it goes into."""
        ideal = ideals.get(edge.target)
        value = number(outputs[edge.target], nodes) * ideal.weights.get(edge.port, 1.0) if ideal else 1.0
        return value / potential.get(edge.target, 1.0)

    def own(edge: Edge) -> Factor:
        return ideals[edge.target].gradients.get(edge.port, ONE) if edge.target in ideals else ONE

    found: dict[Edge, Factor] = {}
    for name in graph.parameters:
        edges = [edge for edge in graph.out_of[name] if edge not in free]
        if edges:
            whole = math.fsum((forward(edge) / number(own(edge), nodes)) ** 2 for edge in edges) ** -0.5
            share = _following([own(edge) for edge in edges], whole, nodes)
            found |= {edge: times(share, forward(edge)) for edge in edges}
    return found


def _following(factors: list[Factor], whole: float, nodes: Mapping[str, fx.Node]) -> Factor:
    """A number that follows the batch as the first use does: what comes first is known to all that come later."""
    first = next((factor for factor in factors if factor.of is not None), None)
    return Factor(value=whole) if first is None else times(first, whole / number(first, nodes))
