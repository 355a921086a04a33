"""What a rule says of one operation: the factors that it would have if nothing else used its tensors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from plimsoll.unit._changes import ONE, Factor, Port
from plimsoll.unit._constraints import Constraint, constrained
from plimsoll.unit._graph import Flow, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """The factors of an operation by itself.

    - `output`: multiplies the output forward. `gradients`: multiplies the gradient of each port; 1 for those not named.
    - `weights`: multiplies an input forward, as in a weighted sum.
    - `incoming`: multiplies the gradient that comes to the output: of a loss, whose own gradient is 1.
    - `rigid`: whether forward factors are fixed, so that a constrained gradient takes theirs instead of a mean.
    - `left`: why the operation is left as it is; None where it is not.
    """

    operation: str
    why: str
    output: Factor = ONE
    gradients: dict[Port, Factor] = field(default_factory=dict[Port, Factor])
    weights: dict[Port, float] = field(default_factory=dict[Port, float])
    incoming: Factor = ONE
    rigid: bool = False
    left: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An operation in its surroundings, as a rule sees it."""

    node: fx.Node
    flow: Flow
    ports: dict[Port, fx.Node]  # those whose tensors carry a gradient
    nodes: dict[str, fx.Node]  # every node of the graph by its name

    def argument(self, position: int, name: str, default: object = None) -> object:
        """An argument by its position or its keyword."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def port(self, position: int, name: str) -> Port | None:
        """The port of an argument, if a tensor that carries a gradient comes in there."""
        port: Port = position if position < len(self.node.args) else name
        return port if port in self.ports else None

    def is_parameter(self, port: Port) -> bool:
        """Whether a parameter comes in at a port, as it is or seen otherwise (transposed, sliced)."""
        return parameter_behind(self.ports[port], self.flow) is not None


# Operations that show a tensor otherwise and change no value.
VIEWS = frozenset(
    {
        "view", "reshape", "transpose", "permute", "t", "contiguous", "unsqueeze", "squeeze", "flatten", "unflatten",
        "slice", "select", "chunk", "split", "split_with_sizes", "unbind", "getitem", "narrow", "to", "clone", "alias",
        "_to_copy", "type_as", "movedim", "moveaxis", "swapaxes", "swapdims", "view_as", "reshape_as", "flip", "roll",
        "index_select", "float", "half", "bfloat16", "tensor_split", "numpy_T", "mT", "squeeze_copy", "lift_fresh_copy",
        "adjoint", "matrix_H", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "_unsafe_view", "rot90", "take_along_dim",
    }
)  # fmt: skip


def parameter_behind(node: fx.Node, flow: Flow) -> str | None:
    """The placeholder of the parameter that a node shows, through views; None where it is no parameter."""
    from plimsoll.unit._graph import base_name

    while node.op == "call_function" and base_name(node) in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.name if flow.is_parameter(node.name) else None


Rule = Callable[[Site], Ideal]


def rows_of(node: fx.Node, dims: Sequence[int], power: float, value: float = 1.0) -> Factor:
    """A factor that follows sizes of a node's tensor, whatever batch comes."""
    kept = tuple(dims)
    return Factor(value=value, of=node.name, dims=kept, power=power) if kept and power else Factor(value=value)


def number(factor: Factor, nodes: dict[str, fx.Node]) -> float:
    """A factor's value at the example's sizes."""
    if factor.of is None:
        return factor.value
    shape = shape_of(nodes[factor.of])
    n = math.prod(shape[dim] for dim in factor.dims)
    return factor.value * float(n) ** factor.power if n else factor.value


def times(factor: Factor, value: float) -> Factor:
    """A factor multiplied by a number."""
    return factor if value == 1 else replace(factor, value=factor.value * value)


def mean(constraint: Constraint, factors: Sequence[Factor], nodes: dict[str, fx.Node]) -> Factor:
    """The one factor that stands for several.

    A geometric mean follows the batch as its members do; other means, and members that follow different tensors, are
    taken at the example's sizes.
    """
    if constraint == "to_output_scale" or len(factors) == 1:
        return factors[0]
    if constraint == "to_grad_input_scale":
        return factors[1]
    followed = {(one.of, one.dims) for one in factors if one.of is not None}
    if constraint == "gmean" and len(followed) == 1:
        of, dims = next(iter(followed))
        value = math.prod(one.value for one in factors) ** (1 / len(factors))
        return Factor(value=value, of=of, dims=dims, power=sum(one.power for one in factors) / len(factors))
    return Factor(value=constrained(constraint, *(number(one, nodes) for one in factors))[0])
