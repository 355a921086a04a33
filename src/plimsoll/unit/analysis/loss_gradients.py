"""What multiplies the gradient that comes to a loss, one alone or several that a model adds up."""

from collections.abc import Mapping

from torch import fx

from plimsoll.unit.capture.gradient_graph import SINK, Edge, Flow, shape_of
from plimsoll.unit.changes import Factor
from plimsoll.unit.rules.operation import Ideal, mean, number


def incoming_factors(
    graph: Flow, free: frozenset[Edge], ideals: Mapping[str, Ideal], nodes: Mapping[str, fx.Node]
) -> tuple[dict[str, Factor], dict[str, float]]:
    """The factor at each result that gradients come to, and what each loss would have had alone against it.

    Losses that are added share their paths, so what each would have had cannot stand at each. It stands at the end of
    them all, on the result that the model returns: the geometric mean.
    """
    losses = {name: ideal.incoming for name, ideal in ideals.items() if not ideal.incoming.is_one}
    alone = {name: one for name, one in losses.items() if all(edge in free for edge in graph.out_of[name])}
    shared = {name: one for name, one in losses.items() if name not in alone and not shape_of(nodes[name])}
    ends = [edge for edge in graph.into[SINK] if edge in free and edge.source in ideals]
    if not shared or len(graph.into[SINK]) != 1 or not ends or ends[0].source in alone:
        return alone, {}
    whole = mean("gmean", list(shared.values()), nodes)
    against = {name: number(one, nodes) / number(whole, nodes) for name, one in shared.items()}
    return {**alone, ends[0].source: whole}, against
