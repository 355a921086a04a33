"""Clusters: functions of one tensor that are written in several operations."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from plimsoll.unit.capture.gradient_graph import Edge, Flow, base_name, bridges, shape_of, value_of

_VALUES = frozenset(
    """
    add sub rsub mul div pow square sqrt rsqrt reciprocal neg abs exp expm1 log log1p tanh sigmoid erf relu silu
    gelu softplus clamp clamp_min clamp_max sin cos maximum minimum elu leaky_relu logsigmoid masked_fill where
    true_divide
    """.split()
)
_STATISTICS = frozenset(
    {"mean", "sum", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "amax", "amin", "logsumexp"}
)
_SHAPES = frozenset(
    """
    view reshape unsqueeze squeeze expand expand_as slice select chunk split getitem cat stack to _to_copy
    contiguous clone type_as transpose permute flatten unflatten split_with_sizes unbind narrow broadcast_to repeat
    roll float _unsafe_view
    """.split()
)
_INSIDE = _VALUES | _STATISTICS | _SHAPES
_SOFTMAX = frozenset({"softmax", "_softmax", "log_softmax"})
_MASKING = frozenset({"masked_fill", "add", "where", "to", "view", "reshape", "unsqueeze", "maximum", "clamp"})


@dataclass(frozen=True, slots=True)
class Cluster:
    """Operations that are one function: its input, its last one, and all of them."""

    entry: str
    exit: str
    nodes: frozenset[str]


def clusters(flow: Flow) -> dict[str, Cluster]:
    """Return the clusters of a graph, by the name of every operation inside."""
    by_name: dict[str, Cluster] = {}
    order = {name: position for position, name in enumerate(flow.nodes)}
    for name in reversed(flow.nodes):
        node = flow.nodes[name]
        if node.op != "call_function" or name in by_name:
            continue
        cluster = _softmax(node, flow) if base_name(node) in _SOFTMAX else _joined(node, flow, order, by_name)
        if cluster is not None:
            by_name |= dict.fromkeys(cluster.nodes, cluster)
    return by_name


# Scaled one by one, its operations would compute something else: `x * rsqrt(mean(x^2))` is a norm only as a whole. So
# from the point where its paths come together, they are followed back to the one tensor they all come from, through
# operations that act on values or take statistics of them. If nothing else goes in or out, that is one operation, with
# a factor on its output and one on the gradient of its input.
def _joined(node: fx.Node, flow: Flow, order: Mapping[str, int], taken: Mapping[str, Cluster]) -> Cluster | None:
    """Return the cluster whose paths meet in `node`."""
    if base_name(node) not in _VALUES or not shape_of(node) or len({edge.source for edge in flow.into[node.name]}) < 2:
        return None
    inside, sources = {node.name}, {edge.source for edge in flow.into[node.name]}
    while len(sources) > 1 or not isinstance(value_of(flow.nodes[min(sources)]), Tensor):  # a list of parts is no entry
        last = max(sources, key=order.__getitem__)
        if last in taken or not _may_be_inside(flow.nodes[last], flow, inside):
            return None
        sources.remove(last)
        inside.add(last)
        sources |= {edge.source for edge in flow.into[last]}
    entry = sources.pop()
    if flow.is_parameter(entry) or not any(base_name(flow.nodes[name]) in _VALUES for name in inside - {node.name}):
        return None
    return Cluster(entry, node.name, frozenset(inside))


def _may_be_inside(node: fx.Node, flow: Flow, inside: set[str]) -> bool:
    if node.op != "call_function" or base_name(node) not in _INSIDE:
        return False
    return all(edge.target in inside for edge in flow.out_of[node.name])


def _softmax(node: fx.Node, flow: Flow) -> Cluster | None:
    """Return a softmax with the masks before it, which decide over its length."""
    inside, entry = {node.name}, flow.into[node.name][0].source
    while True:
        before = flow.nodes[entry]
        edges = flow.into[entry]
        masks = before.op == "call_function" and base_name(before) in _MASKING and len(edges) == 1
        if not masks or len(flow.out_of[entry]) != 1:
            break
        inside.add(entry)
        entry = edges[0].source
    return Cluster(entry, node.name, frozenset(inside)) if len(inside) > 1 else None


def free_edges(flow: Flow, by_name: Mapping[str, Cluster]) -> frozenset[Edge]:
    """Return the edges without another path around them. A cluster is one node."""
    outer = {edge: _outer_edge(edge, by_name) for edge in flow.edges}
    free = bridges(dict.fromkeys(edge for edge in outer.values() if edge is not None))
    return frozenset(edge for edge, between in outer.items() if between in free)


def _outer_edge(edge: Edge, by_name: Mapping[str, Cluster]) -> Edge | None:
    """Return an edge with clusters as nodes, or None for one inside a cluster."""
    cluster = by_name.get(edge.target)
    if cluster is None:
        return edge
    return None if edge.source in cluster.nodes else Edge(cluster.entry, cluster.exit, "entry")
