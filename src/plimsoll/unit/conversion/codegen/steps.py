"""Steps of a captured program, as data for the converted model's code.

A step is one operation of torch with the factors around it, and the calls of modules that it ran in. Three things are
decided when the model runs: whether it trains (dropout, batch norm), its device, and the sizes of its inputs. Steps
contain nothing of the capture. They are pickled with the model, and `unit.fold` works on them.

Three changes are made to the program. Operations that write into their input become those that do not, since a factor
would be missing on the input's other uses. (Buffers are written as before.) Assertions about dtypes and devices of the
example are dropped. So are slices that contain everything.
"""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from plimsoll.unit.changes import NodeChange


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a value of the program, by its name."""

    name: str


class Here(enum.Enum):
    """Value that a step reads from its module at run time."""

    TRAINING = "training"  # `self.training`
    DEVICE = "device"  # of the module's first tensor


DEVICE_TYPE = "<device type>"  # stands in a region's text for the device type of the module's first tensor


@dataclass(frozen=True, slots=True)
class WhenTraining:
    """Probability of attention's dropout, 0 unless the model trains."""

    value: float


Kind = Literal["parameter", "buffer", "constant", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Value that no step computes: a tensor of the model, or an input.

    Attributes:
        name: Name in the program.
        kind: Kind of the source.
        paths: All names of a tensor in the model, several for a tied one.
        sizes: As in `Step`.
    """

    name: str
    kind: Kind
    paths: tuple[str, ...] = ()
    sizes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Operation of the program.

    Attributes:
        name: Name of the result.
        target: Name of the operation in torch, such as "aten.linear.default".
        args: Positional arguments, with values as `Ref` and `Here`.
        kwargs: Keyword arguments likewise.
        stack: Calls that it ran in, outermost first: a key of each, and the module's name.
        change: Factors around it.
        sizes: Sizes of the result as expressions in those of the inputs, or None if it is no tensor.
        size: Expression of a result that is a number computed from sizes.
        place: Line in the model's source.
        regions: Contexts around it, outermost first, such as `torch.set_grad_enabled(False)`.
        floating: Whether all of the result is floating point.
    """

    name: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stack: tuple[tuple[str, str], ...] = ()
    change: NodeChange | None = None
    sizes: tuple[str, ...] | None = None
    size: str | None = None
    place: str | None = None
    regions: tuple[str, ...] = ()
    floating: bool = True

    def refs(self) -> Iterator[str]:
        """Yield the values that it needs in order, with those of its run-time factors."""
        yield from refs_in((self.args, dict(self.kwargs)))
        if self.change is not None:
            yield from (factor.of for factor in _factors(self.change) if factor.of is not None)


def _factors(change: NodeChange) -> Iterator[Any]:
    for scale in (change.output, *change.inputs.values()):
        yield scale.forward
        yield scale.backward


def refs_in(value: object) -> Iterator[str]:
    """Yield the names of the values in nested arguments."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for item in cast("Iterable[object]", value):
            yield from refs_in(item)
    elif isinstance(value, dict):
        yield from refs_in(list(cast("Mapping[str, object]", value).values()))
    elif isinstance(value, slice):
        yield from refs_in((value.start, value.stop, value.step))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with each leaf changed."""
    if isinstance(value, (list, tuple)):
        inside = [mapped(item, change) for item in cast("list[Any]", value)]
        return tuple(inside) if isinstance(value, tuple) else inside
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, slice):
        return slice(mapped(value.start, change), mapped(value.stop, change), mapped(value.step, change))  # pyright: ignore[reportUnknownMemberType]
    return change(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Whole program.

    Attributes:
        sources: Sources by name.
        steps: Steps in order.
        outputs: Results, each a `Ref` or a constant.
        shared: All names of each module that has several.
    """

    sources: Mapping[str, Source]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def is_number(step: Step) -> bool:
    """Return whether the step computes a number from sizes."""
    return step.size is not None


_ALL = 9223372036854775807


def is_whole_slice(node: torch.fx.Node) -> bool:
    """Return whether a node is a slice that contains everything."""
    if str(node.target) != "aten.slice.Tensor":
        return False
    start, end, step = (*node.args[2:], *(None, None, None))[:3]
    return start in (None, 0) and end in (None, _ALL) and step in (None, 1)


_SIGNS = {
    "mul": "*",
    "add": "+",
    "sub": "-",
    "floordiv": "//",
    "mod": "%",
    "truediv": "/",
    "pow": "**",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}
_TARGETS = {"aten.sym_size.int": "shape", "aten.sym_numel.default": "numel"}


@dataclass(frozen=True, slots=True)
class SizeOf:
    """Size of a tensor's dimension, or its number of elements without a dimension."""

    tensor: str
    dimension: int | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """Function of numbers, or a sign between two."""

    function: str
    operands: tuple[Any, ...]


class Sizes:
    """Expressions for the numbers of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._numbers: dict[str, Step] = {step.name: step for step in recipe.steps if is_number(step)}
        self._sizes: dict[str, tuple[str, ...]] = {
            value.name: value.sizes for value in (*recipe.sources.values(), *recipe.steps) if value.sizes is not None
        }

    def is_number(self, name: str) -> bool:
        """Return whether the value is a number."""
        return name in self._numbers

    def of(self, name: str) -> tuple[str, ...] | None:
        """Return the sizes of a tensor as expressions, or None for other values."""
        return self._sizes.get(name)

    def expression(self, name: str, at_hand: Sequence[str]) -> Any:
        """Return a number in terms of these values, or None.

        It is a literal, `SizeOf`, `Computed` or `Ref`.
        """
        step = self._numbers[name]
        if name in at_hand:
            return Ref(name)
        literal = _literal(step.size)
        if literal is not None:
            return literal
        for tensor in at_hand:
            if step.size in self._sizes.get(tensor, ()):
                return SizeOf(tensor, self._sizes[tensor].index(str(step.size)))
        return self._computed(step, at_hand)

    def _computed(self, step: Step, at_hand: Sequence[str]) -> Any:
        kind = _TARGETS.get(step.target)
        if kind is not None:
            tensor = step.args[0].name
            if tensor not in at_hand:
                return None
            return SizeOf(tensor, step.args[1]) if kind == "shape" else SizeOf(tensor)
        operands = [self.expression(item.name, at_hand) if isinstance(item, Ref) else item for item in step.args]
        if None in operands:
            return None
        return Computed(_SIGNS.get(step.target.removeprefix("operator."), step.target), tuple(operands))


def size_text(value: Any, local: Mapping[str, str]) -> str:
    """Return a number as Python text, with the local names of values.

    >>> size_text(Computed("*", (SizeOf("x", 0), 4)), {"x": "x"})
    '(x.shape[0] * 4)'
    """
    if isinstance(value, Ref):
        return local[value.name]
    if isinstance(value, SizeOf):
        tensor = local[value.tensor]
        return f"{tensor}.numel()" if value.dimension is None else f"{tensor}.shape[{value.dimension}]"
    if isinstance(value, Computed):
        operands = [size_text(operand, local) for operand in value.operands]
        if value.function in _SIGNS.values() and len(operands) == 2:
            return f"({operands[0]} {value.function} {operands[1]})"
        return f"{value.function}({', '.join(operands)})"
    return repr(value)


def tensors_in(value: Any) -> list[str]:
    """Return the tensors and the input numbers that an expression needs."""
    if isinstance(value, SizeOf):
        return [value.tensor]
    if isinstance(value, Ref):
        return [value.name]
    return [name for operand in value.operands for name in tensors_in(operand)] if isinstance(value, Computed) else []


def _literal(size: str | None) -> int | None:
    try:
        return int(str(size))
    except ValueError:
        return None
