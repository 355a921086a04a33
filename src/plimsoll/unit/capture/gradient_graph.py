"""Graph that gradients flow through, and its bridges."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import networkx as nx
import torch
from torch import Tensor, fx

from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.changes import Port

# Operations that are step functions of their inputs, or that block gradients by design.
_NO_GRADIENT = frozenset(
    """
    detach alias_detach argmax argmin eq ne lt le gt ge sign round floor ceil isnan isinf isfinite zeros_like
    ones_like full_like empty_like rand_like randn_like bernoulli new_zeros new_ones new_full new_empty heaviside
    one_hot
    """.split()
)
SINK = "output"


@dataclass(frozen=True, slots=True)
class Edge:
    """Tensor between two operations: from its source to a port of its target."""

    source: str
    target: str
    port: Port


def operation_of(node: fx.Node) -> str:
    """Return an operation's name without overload: "linear", "add_"."""
    schema: Any = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def base_name(node: fx.Node) -> str:
    """Return the operation's name, without the mark of an operation in place."""
    name = operation_of(node)
    return name.removesuffix("_") if not name.startswith("_") else name


def value_of(node: fx.Node) -> object:
    """Return the captured result of a node: fake tensor, list of them, or number."""
    return node.meta.get("val")


def size_at_example(size: object) -> int:
    """Return an open size as in the example."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint if hint is not None else size)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's result as in the example."""
    value = value_of(node)
    return tuple(size_at_example(size) for size in value.shape) if isinstance(value, Tensor) else ()


def is_open(node: fx.Node, dim: int) -> bool:
    """Return whether a size is open, so that it follows the batch."""
    value = value_of(node)
    return isinstance(value, Tensor) and fixed_size(value.shape[dim]) is None


def fixed_size(size: object) -> int | None:
    """Return a size that the model fixes, or None for an open one."""
    # Export may write a fixed size as a symbol.
    if isinstance(size, torch.SymInt):
        return cast("int | None", size.node.maybe_as_int())
    return int(size)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def tensor_ports(node: fx.Node) -> Generator[tuple[Port, fx.Node]]:
    """Yield the nodes among the arguments of `node`, with their ports."""
    for position, argument in enumerate(node.args):
        # Tensors that a loss broadcasts against each other are taken from before the broadcast.
        if isinstance(argument, fx.Node) and operation_of(argument) == "broadcast_tensors":
            yield position, cast("list[fx.Node]", argument.args[0])[cast("int", node.args[1])]
        elif isinstance(argument, fx.Node):
            yield position, argument
        elif isinstance(argument, (list, tuple)):
            for member, item in enumerate(argument):
                if isinstance(item, fx.Node):
                    yield (position, member), item
    for keyword, argument in node.kwargs.items():
        if isinstance(argument, fx.Node):
            yield keyword, argument


def _floats(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_floats(item) for item in cast("list[object]", value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


@dataclass(frozen=True)
class Flow:
    """Nodes that carry a gradient, and the edges between them.

    Attributes:
        nodes: Nodes by name.
        edges: Edges in the order of the program.
        outputs: Names of the results that gradients start from: scalars (losses) if there are any, else all.
        parameters: Names of parameters in the model by those of their placeholders.
        carrying: Names of all nodes that carry a gradient, also of those that no output depends on.
    """

    nodes: dict[str, fx.Node]
    edges: tuple[Edge, ...]
    outputs: tuple[str, ...]
    parameters: dict[str, str]
    carrying: frozenset[str]

    @cached_property
    def into(self) -> dict[str, list[Edge]]:
        """Edges that end at each node."""
        edges: dict[str, list[Edge]] = {name: [] for name in [*self.nodes, SINK]}
        for edge in self.edges:
            edges[edge.target].append(edge)
        return edges

    @cached_property
    def out_of(self) -> dict[str, list[Edge]]:
        """Edges that start at each node."""
        edges: dict[str, list[Edge]] = {name: [] for name in [*self.nodes, SINK]}
        for edge in self.edges:
            edges[edge.source].append(edge)
        return edges

    @cached_property
    def directed(self) -> "nx.DiGraph[str]":
        """Graph for networkx, with parallel edges as one."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from((edge.source, edge.target) for edge in self.edges)
        return graph

    def is_parameter(self, name: str) -> bool:
        """Return whether the node of that name is a parameter."""
        return name in self.parameters


# The nodes of the graph are the operations whose results carry a gradient: from the parameters and the floating-point
# inputs to the outputs. A factor on one edge may differ forward and backward only if no other path joins the edge's
# ends: if the edge is a bridge of the undirected graph. Two edges between the same operations are no bridges, so it is
# a multigraph.
def bridges(edges: Iterable[Edge]) -> frozenset[Edge]:
    """Return the edges without another path around them, in any direction."""
    edges = tuple(edges)
    between: dict[frozenset[str], list[Edge]] = {}
    for edge in edges:
        between.setdefault(frozenset((edge.source, edge.target)), []).append(edge)
    plain: nx.Graph[str] = nx.Graph()
    plain.add_edges_from((edge.source, edge.target) for edge in edges)
    # networkx joins parallel edges into one, which then is a bridge although none of them is.
    candidates = (between[frozenset(ends)] for ends in nx.bridges(plain))
    return frozenset(parallel[0] for parallel in candidates if len(parallel) == 1)


def flow(captured: Captured) -> Flow:
    """Return the part of a captured graph that gradients flow through."""
    graph = captured.graph
    carrying = _carrying(captured)
    outputs = _outputs(graph, carrying)
    reaching = _reaching(graph, carrying, outputs)
    nodes = {node.name: node for node in graph.nodes if node.name in reaching}
    edges = [
        Edge(source.name, node.name, port)
        for node in nodes.values()
        for port, source in tensor_ports(node)
        if source.name in nodes and node.op == "call_function"
    ]
    edges += [Edge(name, SINK, position) for position, name in enumerate(outputs)]
    parameters = {name: target for name, target in captured.parameters.items() if name in nodes}
    return Flow(nodes, tuple(edges), outputs, parameters, frozenset(carrying))


def _carrying(captured: Captured) -> set[str]:
    roots = set(captured.parameters) | set(captured.inputs)
    carrying: set[str] = set()
    for node in captured.graph.nodes:
        if not _floats(value_of(node)):
            continue
        if node.op == "placeholder":
            if node.name in roots:
                carrying.add(node.name)
        elif base_name(node) not in _NO_GRADIENT and any(n.name in carrying for _, n in tensor_ports(node)):
            carrying.add(node.name)
    return carrying


def _leaves(argument: object) -> Iterator[fx.Node]:
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in cast("Iterable[object]", argument):
            yield from _leaves(item)


def _outputs(graph: fx.Graph, carrying: set[str]) -> tuple[str, ...]:
    last = next(iter(reversed(graph.nodes)))
    names = dict.fromkeys(node.name for node in _leaves(last.args[0]) if node.name in carrying)
    by_name = {node.name: node for node in graph.nodes}
    scalars = tuple(
        name for name in names if not shape_of(by_name[name]) and isinstance(value_of(by_name[name]), Tensor)
    )
    return scalars or tuple(names)


def _reaching(graph: fx.Graph, carrying: set[str], outputs: tuple[str, ...]) -> set[str]:
    reaching = set(outputs)
    for node in reversed(graph.nodes):
        if node.name in reaching:
            reaching |= {source.name for _, source in tensor_ports(node) if source.name in carrying}
    return reaching
