"""Numbers that sizes give, written so that a module computes them from the tensors that it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.unit.conversion.codegen.steps import Recipe, Ref, Step, is_number

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
