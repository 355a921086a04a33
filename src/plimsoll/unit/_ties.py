"""Parameters that several operations use: one number for what their gradient is multiplied by, whichever way it came.

A parameter is where gradients end, so its number is free; but its uses are joined by the rest of the model, so they must
agree. It is the geometric mean of what each use would have alone.
"""

import math
from collections.abc import Mapping

from torch import fx

from plimsoll.unit._changes import ONE, Factor
from plimsoll.unit._graph import Edge, Flow
from plimsoll.unit._ideal import Ideal, number, times


def tied_ratios(
    graph: Flow, free: frozenset[Edge], ideals: Mapping[str, Ideal], outputs: Mapping[str, Factor],
    nodes: Mapping[str, fx.Node],
) -> dict[Edge, Factor]:  # fmt: skip
    """The backward factor of every edge from a parameter that is no bridge."""
    found: dict[Edge, Factor] = {}
    for name in graph.parameters:
        edges = [edge for edge in graph.out_of[name] if edge not in free]
        if edges:
            found |= _shared(edges, ideals, outputs, nodes)
    return found


def _shared(
    edges: list[Edge], ideals: Mapping[str, Ideal], outputs: Mapping[str, Factor], nodes: Mapping[str, fx.Node]
) -> dict[Edge, Factor]:
    forward = {edge: number(_forward(edge, ideals, outputs), nodes) for edge in edges}
    own = [(edge, ideals[edge.target].gradients.get(edge.port)) for edge in edges if edge.target in ideals]
    ratios = [number(factor, nodes) / forward[edge] for edge, factor in own if factor is not None]
    whole = math.prod(ratio ** (1 / len(ratios)) for ratio in ratios)
    followed = next((factor for _, factor in own if factor is not None and factor.of is not None), None)
    # It follows the batch as the first use does: the size of what comes first is known to all that come later.
    share = times(followed, whole / number(followed, nodes)) if followed is not None else Factor(value=whole)
    return {edge: times(share, forward[edge]) for edge in edges}


def _forward(edge: Edge, ideals: Mapping[str, Ideal], outputs: Mapping[str, Factor]) -> Factor:
    if edge.target not in ideals:
        return ONE
    return times(outputs[edge.target], ideals[edge.target].weights.get(edge.port, 1.0))
