"""What a conversion does to a captured graph, as data: the analysis writes it, the rebuilt model carries it out.

Every operation becomes ``out = scale(op(scale(input), ...))``: a factor each way on its output and on each tensor
input. So whoever carries a change out need not know the operation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.notebook_repr import NotebookRepr

# How a parameter is drawn anew: unit variance, zeros, ones, or left as it was.
Draw = Literal["normal", "zeros", "ones", "keep"]

# An input of a node: its position among the arguments, its keyword, or (position, member) of a list among them.
Port = int | str | tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A number that multiplies: ``value * n ** power``, where n is the product of sizes of a node's tensor.

    - `of`, `dims`: the node, by its name in the graph, and the dimensions whose sizes are multiplied; None and () where
      the factor is `value` alone. So a factor follows the batch that comes, whatever the example's was.
    """

    value: float = 1.0
    of: str | None = None
    dims: tuple[int, ...] = ()
    power: float = 0.0

    @property
    def is_one(self) -> bool:
        """Whether it changes nothing."""
        return self.value == 1.0 and self.of is None


ONE = Factor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What multiplies a tensor forward, and its gradient backward."""

    forward: Factor = ONE
    backward: Factor = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """How one operation is carried out: what multiplies its output and its inputs; those not named are left alone.

    - `operation`: its name for people, as "linear". `why`: the rule that gave the factors, one phrase.
    """

    operation: str
    why: str
    output: Scale = field(default_factory=Scale)
    inputs: Mapping[Port, Scale] = field(default_factory=dict[Port, Scale])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChange:
    """What becomes of a parameter: how it is drawn, and its kind and depth for the optimizers' rules.

    - `depth`: how many residual branches join the path that its own branch joins; 1 outside of any.
    """

    draw: Draw
    kind: str
    std: float = 1.0
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(NotebookRepr):
    """An operation that was not converted: which, where in the source and in which module, and why."""

    operation: str
    module: str
    source: str | None
    why: str

    def __str__(self) -> str:
        place = f" ({self.source})" if self.source else ""
        return f"{self.module or 'model'}: {self.operation}{place}: {self.why}"
