"""A captured program as steps: plain data, from which the converted model's code is written.

A step is one operation of torch with the factors around it, and the calls of modules that it ran in. Steps say what a
trained model has to decide when it runs: whether it trains (dropout, batch norm), which device it is on, and the sizes
of what came. They keep nothing of the capture: steps are pickled with the model, and `unit.fold` works on them.

What changes on the way from the program: operations that write into their input become the ones that do not (a factor
would otherwise be lost on the input's other uses), but for buffers, which are meant to be written; assertions about the
example's dtypes and devices are dropped; slices of everything are dropped.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from plimsoll.unit.changes import NodeChange


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the program, by its name."""

    name: str


class Here(enum.Enum):
    """What a step takes from the module that it runs in."""

    TRAINING = "training"  # `self.training`
    DEVICE = "device"  # that of the module's first tensor


DEVICE_TYPE = "<device type>"  # in the text of a region: that of the module's first tensor


@dataclass(frozen=True, slots=True)
class WhenTraining:
    """A probability that is 0 where the model does not train: the dropout of attention."""

    value: float


Kind = Literal["parameter", "buffer", "constant", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A value that no step computes: a tensor of the model, or an input.

    - `paths`: every name that a tensor of the model has in it (a tied one has several). `sizes`: as in `Step`.
    """

    name: str
    kind: Kind
    paths: tuple[str, ...] = ()
    sizes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation.

    - `target`: its name in torch, "aten.linear.default". `args`, `kwargs`: values as `Ref` and `Here`, all else as is.
    - `stack`: the calls that it ran in, outermost first: each a key of its own and the module's name.
    - `sizes`: of its result, as expressions in the sizes of the inputs; None where it is no tensor. `size`: the
      expression of its result, where that is a number that sizes give. `place`: its line in the model's source.
    - `floating`: whether its result holds floating-point numbers, all of it.
    - `regions`: the contexts around it, outermost first, as `torch.set_grad_enabled(False)`.
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
        """The values that it needs, in order, those of its run-time factors too."""
        yield from refs_in((self.args, dict(self.kwargs)))
        if self.change is not None:
            yield from (factor.of for factor in _factors(self.change) if factor.of is not None)


def _factors(change: NodeChange) -> Iterator[Any]:
    for scale in (change.output, *change.inputs.values()):
        yield scale.forward
        yield scale.backward


def refs_in(value: object) -> Iterator[str]:
    """The names of the values in a nest of arguments."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (list, tuple)):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            yield from refs_in(one)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, dict):
        for one in value.values():  # pyright: ignore[reportUnknownVariableType]
            yield from refs_in(one)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, slice):
        yield from refs_in((value.start, value.stop, value.step))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The nest of arguments with each leaf changed."""
    if isinstance(value, (list, tuple)):
        inside = [mapped(one, change) for one in cast("list[Any]", value)]
        return tuple(inside) if isinstance(value, tuple) else inside
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, slice):
        return slice(mapped(value.start, change), mapped(value.stop, change), mapped(value.step, change))  # pyright: ignore[reportUnknownMemberType]
    return change(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole program: its sources, its steps in order, and what it returns (each a `Ref` or a constant).

    - `shared`: all names of each module that has several.
    """

    sources: Mapping[str, Source]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def with_steps(self, steps: tuple[Step, ...]) -> "Recipe":
        """The same with other steps."""
        return replace(self, steps=steps)


def is_number(step: Step) -> bool:
    """Whether the step computes a number from sizes: it belongs to no module, each computes those that it needs."""
    return step.size is not None


_ALL = 9223372036854775807


def is_whole_slice(node: torch.fx.Node) -> bool:
    """Whether it is a slice of everything."""
    if str(node.target) != "aten.slice.Tensor":
        return False
    start, end, step = (*node.args[2:], *(None, None, None))[:3]
    return start in (None, 0) and end in (None, _ALL) and step in (None, 1)


_SIGNS = {"mul": "*", "add": "+", "sub": "-", "floordiv": "//", "mod": "%", "truediv": "/", "pow": "**",
          "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}  # fmt: skip
_TARGETS = {"aten.sym_size.int": "shape", "aten.sym_numel.default": "numel"}


@dataclass(frozen=True, slots=True)
class SizeOf:
    """A dimension of a tensor; all of its elements where there is no dimension."""

    tensor: str
    dimension: int | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """A function or a sign between numbers."""

    function: str
    operands: tuple[Any, ...]


class Sizes:
    """How each number of a recipe is found."""

    def __init__(self, recipe: Recipe) -> None:
        self._numbers: dict[str, Step] = {step.name: step for step in recipe.steps if is_number(step)}
        self._sizes: dict[str, tuple[str, ...]] = {
            one.name: one.sizes for one in (*recipe.sources.values(), *recipe.steps) if one.sizes is not None
        }

    def is_number(self, name: str) -> bool:
        """Whether the value is a number."""
        return name in self._numbers

    def of(self, name: str) -> tuple[str, ...] | None:
        """The sizes of a tensor, as expressions; None for what is none."""
        return self._sizes.get(name)

    def expression(self, name: str, at_hand: Sequence[str]) -> Any:
        """A literal, `SizeOf`, `Computed` or `Ref` of a number, from these values; None where they do not tell it."""
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
        operands = [self.expression(one.name, at_hand) if isinstance(one, Ref) else one for one in step.args]
        if any(one is None for one in operands):
            return None
        return Computed(_SIGNS.get(step.target.removeprefix("operator."), step.target), tuple(operands))


def size_text(value: Any, local: Mapping[str, str]) -> str:
    """A number as Python text; `local`: what values are called there.

    >>> size_text(Computed("*", (SizeOf("x", 0), 4)), {"x": "x"})
    '(x.shape[0] * 4)'
    """
    if isinstance(value, Ref):
        return local[value.name]
    if isinstance(value, SizeOf):
        tensor = local[value.tensor]
        return f"{tensor}.numel()" if value.dimension is None else f"{tensor}.shape[{value.dimension}]"
    if isinstance(value, Computed):
        operands = [size_text(one, local) for one in value.operands]
        if value.function in _SIGNS.values() and len(operands) == 2:
            return f"({operands[0]} {value.function} {operands[1]})"
        return f"{value.function}({', '.join(operands)})"
    return repr(value)


def tensors_in(value: Any) -> list[str]:
    """The tensors, and numbers that came in, that an expression needs."""
    if isinstance(value, SizeOf):
        return [value.tensor]
    if isinstance(value, Ref):
        return [value.name]
    return [name for one in value.operands for name in tensors_in(one)] if isinstance(value, Computed) else []


def _literal(size: str | None) -> int | None:
    try:
        return int(str(size))
    except ValueError:
        return None
