"""Ideal factors of one operation, and helpers of the rules."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from plimsoll.unit.capture.gradient_graph import Flow, Values, base_name, is_open, shape_of
from plimsoll.unit.changes import ONE, Factor, Port
from plimsoll.unit.formulas import Constraint, constrained, root


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """Ideal factors of an operation."""

    why: str  # phrase for the rule that gave them
    output: Factor = ONE  # multiplies the output forward
    # Multiplies the gradient of each port, 1 for ports that are not named.
    gradients: dict[Port, Factor] = field(default_factory=dict[Port, Factor])
    # Multiplies an input forward, as in a weighted sum.
    weights: dict[Port, float] = field(default_factory=dict[Port, float])
    incoming: Factor = ONE  # multiplies the gradient that comes to the output, for a loss, whose own gradient is 1
    # Mean of the output over its standard deviation, not zero behind a ReLU. The next rule needs it: a product sums
    # second moments, and an activation depends on the mean of its input.
    mean: float = 0.0
    # Whether forward factors are fixed, so that a constrained gradient takes theirs instead of a mean.
    rigid: bool = False
    skipped: str | None = None  # reason why the operation is not converted, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Operation with its surroundings: the argument of a rule."""

    node: fx.Node
    flow: Flow
    ports: dict[Port, fx.Node]  # nodes whose tensors carry a gradient
    means: Mapping[str, float]  # mean of every node before this one, over its standard deviation
    values: Values  # values of tensors without gradients

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return base_name(self.node)

    def argument(self, position: int, name: str, default: object = None) -> object:
        """Return an argument by its position or its keyword."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def port(self, position: int, name: str) -> Port | None:
        """Return the port of an argument, if it is a tensor with a gradient."""
        port: Port = position if position < len(self.node.args) else name
        return port if port in self.ports else None

    def is_parameter(self, port: Port) -> bool:
        """Return whether a port gets a parameter or a view of one (transposed, sliced)."""
        return parameter_behind(self.ports[port], self.flow) is not None

    def mean(self, node: object) -> float:
        """Return an argument's mean over its deviation, 0 without a gradient."""
        return self.means.get(node.name, 0.0) if isinstance(node, fx.Node) else 0.0

    def moment(self, node: object) -> float:
        """Return the root of an argument's second moment over its standard deviation."""
        return (1 + self.mean(node) ** 2) ** 0.5


# Operations that rearrange or select values of a tensor, and change none.
VIEWS = frozenset(
    """
    view reshape transpose permute t contiguous unsqueeze squeeze flatten unflatten slice select chunk split
    split_with_sizes unbind getitem narrow to clone alias _to_copy type_as movedim moveaxis swapaxes swapdims
    view_as reshape_as flip roll index_select float half bfloat16 double tensor_split numpy_T mT adjoint matrix_H
    pixel_shuffle pixel_unshuffle channel_shuffle _unsafe_view rot90 index gather detach_copy take_along_dim
    diagonal tril triu lift_fresh_copy native_channel_shuffle unfold
    """.split()
)

Rule = Callable[[Site], Ideal]


def skipped(why: str) -> Ideal:
    """Return the factors of an operation that is not converted."""
    return Ideal(why="not converted", rigid=True, skipped=why)


def parameter_behind(node: fx.Node, flow: Flow) -> str | None:
    """Return the placeholder of the parameter that a node is a view of, or None."""
    while node.op == "call_function" and base_name(node) in VIEWS | {"expand"} and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.name if flow.is_parameter(node.name) else None


def following(node: fx.Node, dims: Sequence[int], power: float, value: float = 1.0) -> Factor:
    """Return ``value * n ** power``, n a product of sizes, open ones at run time."""
    shape = shape_of(node)
    dims = [dim % len(shape) for dim in dims]
    value *= _power(math.prod(shape[dim] for dim in dims if not is_open(node, dim)), power)
    opened = tuple(dim for dim in dims if is_open(node, dim))
    return Factor(value=value, of=node.name, dims=opened, power=power) if opened and power else Factor(value=value)


def _power(n: int, power: float) -> float:
    return root(n) ** (-2 * power)


def number(factor: Factor, nodes: Mapping[str, fx.Node]) -> float:
    """Return a factor's value at the example's sizes."""
    if factor.of is None:
        return factor.value
    shape = shape_of(nodes[factor.of])
    return factor.value * _power(math.prod(shape[dim] for dim in factor.dims), factor.power)


def times(factor: Factor, value: float) -> Factor:
    """Return a factor multiplied by a number."""
    return factor if value == 1 else replace(factor, value=factor.value * value)


def mean(constraint: Constraint, factors: Sequence[Factor], nodes: Mapping[str, fx.Node]) -> Factor:
    """Return one factor for several.

    A geometric mean follows the batch like its members. Other means, and means of members that follow different
    tensors, are those of the example's sizes.
    """
    if constraint == "to_output_scale" or len(factors) == 1:
        return factors[0]
    if constraint == "to_grad_input_scale":
        return factors[1]
    followed = {(factor.of, factor.dims) for factor in factors if factor.of is not None}
    if constraint == "gmean" and len(followed) == 1:
        of, dims = next(iter(followed))
        value = math.prod(factor.value for factor in factors) ** (1 / len(factors))
        return Factor(value=value, of=of, dims=dims, power=sum(factor.power for factor in factors) / len(factors))
    return Factor(value=constrained(constraint, *(number(factor, nodes) for factor in factors))[0])
