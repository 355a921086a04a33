"""Graph that gradients flow through, its clusters, and values of the rest.

A cluster is a function of one tensor that is written in several operations. Tensors without gradients (masks,
positions) have the values of the example.
"""

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import networkx as nx
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

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
    """Nodes that carry a gradient, and the edges between them."""

    nodes: dict[str, fx.Node]
    edges: tuple[Edge, ...]  # edges in the order of the program
    # Names of the results that gradients start from: scalars (losses) if there are any, else all.
    outputs: tuple[str, ...]
    parameters: dict[str, str]  # names of parameters in the model by those of their placeholders
    carrying: frozenset[str]  # names of all nodes that carry a gradient, also of those that no output depends on

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


# -- clusters ----------------------------------------------------------------------------------------------------------

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


# -- values of tensors without gradients, as in the example: masks, positions ------------------------------------------


class NoValueError(Exception):
    """Tensor without known values: on the meta device, or of an unrunnable node."""


# Measured factors need these values: a softmax behind a causal mask has another scale than one without. Nothing here
# depends on a parameter, so a model without values (on the meta device) only lacks its buffers.
class Values:
    """Values of nodes without gradients, computed on the CPU at their first use."""

    def __init__(self, captured: Captured, carrying: frozenset[str]) -> None:
        self._carrying = carrying
        self._known: dict[str, Any] = {}
        self._inputs = _input_values(captured)
        self._module = captured.program.graph_module
        self._remembered: dict[str, Any] = {}

    def remembered(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once for a key."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    def of(self, argument: Any) -> Any:
        """Return an argument of a node with every node in it replaced by its value."""
        return map_arg(argument, self._node)

    def _node(self, node: fx.Node) -> Any:
        if node.name not in self._known:
            self._known[node.name] = self._computed(node)
        return self._known[node.name]

    def _computed(self, node: fx.Node) -> Any:
        known = value_of(node)
        if known is not None and not isinstance(known, (Tensor, list, tuple)):
            return size_at_example(known) if isinstance(known, torch.SymInt) else known
        if node.name in self._carrying:
            raise NoValueError(node.name)
        if node.op == "placeholder":
            return self._input_value(node)
        if node.op == "get_attr":  # the inside of a region without gradients or under autocast
            return self._module.get_submodule(str(node.target))
        if node.op != "call_function" or isinstance(node.target, str):
            raise NoValueError(node.name)
        arguments, keywords = self._ready(node)
        with torch.no_grad():
            return node.target(*arguments, **keywords)

    def _ready(self, node: fx.Node) -> tuple[Any, dict[str, Any]]:
        arguments = self.of(node.args)
        keywords = {name: value for name, value in self.of(node.kwargs).items() if name != "pin_memory"}
        if "device" in keywords:
            keywords["device"] = torch.device("cpu")
        if node.target is operator.getitem or not arguments:
            return arguments, keywords
        # An operation in place gets copies, so that buffers do not change.
        return pytree.tree_map(_copied, arguments), keywords

    def _input_value(self, node: fx.Node) -> Any:
        value = self._inputs.get(node.name)
        if isinstance(value, Tensor) and value.device.type == "meta":
            raise NoValueError(node.name)
        return value.detach().cpu() if isinstance(value, Tensor) else value


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _input_values(captured: Captured) -> dict[str, Any]:
    """Return values of the example, buffers and constants by placeholders."""
    inputs = iter(pytree.tree_leaves((captured.args, dict(captured.kwargs))))
    program = captured.program
    values: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT:
            values[name] = next(inputs, None)
        elif spec.target is not None:
            values[name] = program.state_dict.get(spec.target, program.constants.get(spec.target))
    return values
