"""Changes of a captured graph by a conversion, as data.

Every operation becomes ``out = scale(op(scale(input), ...))``: a factor each way on its output and on each tensor
input. So a change can be applied without knowledge of the operation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.results import NotebookRepr

# How a parameter is drawn again: unit variance, zeros, ones, or kept unchanged.
Draw = Literal["normal", "zeros", "ones", "keep"]

# An input of a node: its position among the arguments, its keyword, or (position, member) of a list among them.
Port = int | str | tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """Factor ``value * n ** power``, n a product of sizes of a node's tensor.

    So it follows the batch.
    """

    value: float = 1.0  # constant part
    of: str | None = None  # name of the node in the graph, or None if the factor is `value` alone
    dims: tuple[int, ...] = ()  # dimensions whose sizes are multiplied
    power: float = 0.0

    @property
    def is_one(self) -> bool:
        """Return whether the factor changes nothing."""
        return self.value == 1.0 and self.of is None


ONE = Factor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Factors of a tensor forward, and of its gradient backward."""

    forward: Factor = ONE
    backward: Factor = ONE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """Factors of one operation's output and inputs, 1 for inputs without a name."""

    operation: str  # name such as "linear"
    why: str  # phrase for the rule that gave the factors
    output: Scale = field(default_factory=Scale)
    inputs: Mapping[Port, Scale] = field(default_factory=dict[Port, Scale])  # factors of inputs by their ports


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChange:
    """Change of a parameter: its draw, its kind and its depth."""

    draw: Draw
    kind: str
    std: float = 1.0  # standard deviation of a normal draw
    depth: int = 1  # number of residual branches that join the path that its own branch joins, 1 outside of any


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedOperation(NotebookRepr):
    """Operation that was not converted.

    Attributes:
        operation: Name of the operation.
        module: Path of the module that calls it, "" for the root.
        source: Line of the model's source, "file:line", or None.
        why: Reason.
    """

    operation: str
    module: str
    source: str | None
    why: str

    def __str__(self) -> str:
        location = f" ({self.source})" if self.source else ""
        return f"{self.module or 'model'}: {self.operation}{location}: {self.why}"


# Name in version 0.1, available for one release.
Left = SkippedOperation
