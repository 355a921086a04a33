"""Residual additions, which join a branch with the path it left, and weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import networkx as nx
from torch import fx

from plimsoll.checks import number
from plimsoll.errors import ArgumentError
from plimsoll.unit.capture.gradient_graph import Flow, base_name
from plimsoll.unit.changes import Port
from plimsoll.unit.rules.operation import VIEWS, Ideal

Tau = float | Mapping[str, float] | None
_KEEPING = VIEWS | {"dropout"}
_ATTENTION = frozenset({"scaled_dot_product_attention", "softmax", "_softmax"})
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "einsum", "addmm", "baddbmm"})


@dataclass(frozen=True, slots=True)
class Join:
    """Residual addition: the skip path's start, both ports, the branch's weight."""

    addition: str
    start: str
    skip: Port
    branch: Port
    tau: float
    kind: str


@dataclass(frozen=True)
class Residuals:
    """Residual additions of a graph, with potential c and depth of inner nodes.

    The depth is the number of branches that join the same path. Depths of paths within branches multiply.
    """

    joins: dict[str, Join] = field(default_factory=dict[str, Join])
    potential: dict[str, float] = field(default_factory=dict[str, float])
    depth: dict[str, int] = field(default_factory=dict[str, int])

    def weighted(self, name: str, ideal: Ideal) -> Ideal:
        """Return a node's factors, with weights if it is a residual addition."""
        join = self.joins.get(name)
        if join is None:
            return ideal
        weights = {join.skip: (1 - join.tau) ** 0.5, join.branch: join.tau**0.5}
        return replace(ideal, weights=weights, why=f"residual ({join.kind}), tau {join.tau:.4g}")


def residuals(graph: Flow, tau: Tau, inside: frozenset[str] = frozenset()) -> Residuals:
    """Return the residual additions of `graph` that are outside of clusters."""
    _check(tau)
    result = Residuals()
    depth: dict[str, int] = {}
    for name, node in graph.nodes.items():
        join = None if name in inside else _join(node, graph, tau, depth)
        if join is None:
            continue
        result.joins[name] = join
        _enter(join, graph, result.potential)
    _count(result, graph)
    return result


def _join(node: fx.Node, graph: Flow, tau: Tau, depth: dict[str, int]) -> Join | None:
    edges = graph.into[node.name] if node.op == "call_function" else []
    if base_name(node) != "add" or len(edges) != 2:
        return None
    for skip, branch in (edges, edges[::-1]):
        start = _behind(skip.source, branch.source, graph)
        if start is not None:
            depth[node.name] = depth.get(start, 0) + 1
            kind = _kind(start, branch.source, graph)
            return Join(node.name, start, skip.port, branch.port, _tau(tau, kind, depth[node.name]), kind)
    return None


def _behind(skip: str, branch: str, graph: Flow) -> str | None:
    """Return the common start of skip path and branch, behind views and dropout."""
    before = nx.ancestors(graph.directed, branch)
    while skip not in before:
        edges = graph.into[skip]
        if base_name(graph.nodes[skip]) not in _KEEPING or len(edges) != 1:
            return None
        skip = edges[0].source
    return None if graph.is_parameter(skip) else skip


def _region(start: str, end: str, graph: Flow) -> set[str]:
    """Return every node on a path from `start` to `end`, without the start."""
    return (nx.descendants(graph.directed, start) & nx.ancestors(graph.directed, end)) | {end}


def _kind(start: str, end: str, graph: Flow) -> str:
    operations = {base_name(graph.nodes[name]) for name in _region(start, end, graph)}
    if operations & _ATTENTION:
        return "attention"
    return "mlp" if operations & _PRODUCTS else "other"


def _tau(tau: Tau, kind: str, k: int) -> float:
    if tau is None:
        return 1 / (k + 1)
    return tau[kind] if isinstance(tau, Mapping) else tau


def _inside(join: Join, graph: Flow) -> set[str]:
    """Return every node of the branch."""
    end = next(edge.source for edge in graph.into[join.addition] if edge.port == join.branch)
    return _region(join.start, end, graph)


def _count(result: Residuals, graph: Flow) -> None:
    """Set the depths. Additions of one path lead from one to the next."""
    starts: dict[str, str] = {}
    lengths: dict[str, int] = {}
    for name, join in result.joins.items():
        starts[name] = starts.get(join.start, join.start)
        lengths[starts[name]] = lengths.get(starts[name], 0) + 1
    for name, join in result.joins.items():
        for node in _inside(join, graph):
            result.depth[node] = result.depth.get(node, 1) * lengths[starts[name]]


# A branch joins as `x * sqrt(1 - tau) + f(x) * sqrt(tau)`. With ordinary products its gradient would be small by
# sqrt(tau) all the way through. So it enters the branch unscaled, and is multiplied by sqrt(tau) at the branch's start.
def _enter(join: Join, graph: Flow, potential: dict[str, float]) -> None:
    region = _inside(join, graph)
    leaving = [
        edge
        for name in region
        for edge in graph.out_of[name]
        if edge.target not in region and (edge.target, edge.port) != (join.addition, join.branch)
    ]
    if leaving:
        return  # the inside of the branch is used elsewhere, so its gradient needs the scale of the outside
    for name in region:
        potential[name] = potential.get(name, 1.0) / join.tau**0.5


def _check(tau: Tau) -> None:
    weights = tau if isinstance(tau, Mapping) else {} if tau is None else {"": tau}
    remedy = "0.5 weights a branch as its skip path; None weights all equally."
    for kind, value in weights.items():
        number("convert", f"residual_tau[{kind!r}]" if kind else "residual_tau", value, above=0, below=1, remedy=remedy)
    if isinstance(tau, Mapping) and set(tau) != {"attention", "mlp", "other"}:
        raise ArgumentError(
            f"convert: expected residual_tau for the kinds attention, mlp and other; got {sorted(tau)}. Name all three."
        )
