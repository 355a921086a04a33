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
    """Value that no step computes: a tensor of the model, or an input."""

    name: str
    kind: Kind
    paths: tuple[str, ...] = ()  # all names of a tensor in the model, several for a tied one
    sizes: tuple[str, ...] | None = None  # as in `Step`


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Operation of the program."""

    name: str
    target: str  # name of the operation in torch, such as "aten.linear.default"
    args: tuple[Any, ...] = ()  # positional arguments, with values as `Ref` and `Here`
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # keyword arguments likewise
    # Calls that it ran in, outermost first: a key of each, and the module's name.
    stack: tuple[tuple[str, str], ...] = ()
    change: NodeChange | None = None
    # Sizes of the result as expressions in those of the inputs, or None if it is no tensor.
    sizes: tuple[str, ...] | None = None
    size: str | None = None  # expression of a result that is a number computed from sizes
    place: str | None = None  # line in the model's source
    regions: tuple[str, ...] = ()  # contexts around it, outermost first, such as `torch.set_grad_enabled(False)`
    floating: bool = True  # whether all of the result is floating point

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
    """Whole program."""

    sources: Mapping[str, Source]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]  # results, each a `Ref` or a constant
    # All names of each module that has several.
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
        """Return a number in these values (literal, SizeOf, Computed or Ref), or None."""
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


# -- algebra of operations for `unit.fold`, by their names without overload --------------------------------------------

# f(a x) = a f(x), x the first argument.
_HOMOGENEOUS = frozenset(
    """
    view reshape flatten unflatten transpose permute t contiguous clone expand squeeze unsqueeze select slice narrow
    split split_with_sizes chunk unbind getitem repeat repeat_interleave to _to_copy movedim swapaxes numpy_T roll
    flip expand_as view_as relu leaky_relu neg abs mean sum cumsum max_pool1d max_pool2d avg_pool1d avg_pool2d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d detach alias
    dropout gather index_select pixel_shuffle unfold amax amin unsafe_view _unsafe_view lift_fresh_copy index
    """.split()
)
# f(a x, a y) = a f(x, y) if all terms are tensors.
_SUMS = frozenset({"add", "sub", "cat", "stack", "concat"})
# f(a x, b y) = a b f(x, y).
_PRODUCTS = frozenset({"mul", "matmul", "mm", "bmm", "einsum"})
_ATTENTION = "scaled_dot_product_attention"

# Positions of input, weight and bias of an operation that is linear in weight and bias together.
WEIGHTS: Mapping[str, tuple[int, int, int | None]] = {
    "linear": (0, 1, 2),
    "conv1d": (0, 1, 2),
    "conv2d": (0, 1, 2),
    "conv3d": (0, 1, 2),
    "conv_transpose1d": (0, 1, 2),
    "conv_transpose2d": (0, 1, 2),
    "conv_transpose3d": (0, 1, 2),
    "addmm": (1, 2, 0),
}
# Positions of weight, bias and epsilon of an operation whose result does not change with its input's scale.
NORMS: Mapping[str, tuple[int, int | None, int]] = {
    "layer_norm": (2, 3, 4),
    "group_norm": (2, 3, 4),
    "rms_norm": (2, None, 3),
    "batch_norm": (1, 2, 7),
}
# Positions of the running mean and variance of a norm over the batch.
RUNNING: Mapping[str, tuple[int, int]] = {"batch_norm": (3, 4)}
EMBEDDING = "embedding"


def name_of(step: Step) -> str:
    """Return the operation's name: "linear", "getitem"."""
    return step.target.split(".")[1] if "." in step.target else step.target


def argument(step: Step, position: int) -> Any:
    """Return an argument by position, or None if it is omitted."""
    return step.args[position] if position < len(step.args) else None


def terms_of(step: Step) -> list[tuple[Any, str]] | None:
    """Return a sum's ports with their values, or None if it is no sum of tensors."""
    name = name_of(step)
    if name not in _SUMS:
        return None
    if name in ("cat", "stack", "concat"):
        return _named([((0, i), term) for i, term in enumerate(step.args[0])])
    return _named([(0, step.args[0]), (1, step.args[1])])


def factors_of(step: Step) -> list[tuple[Any, str]] | None:
    """Return a product's ports with their values, or None for another step.

    An operation that is homogeneous in its first argument alone has that port.
    """
    name = name_of(step)
    if name in _PRODUCTS or (name == "div" and "rounding_mode" not in step.kwargs):
        return _operands(step)
    if name == _ATTENTION:
        return _named([(2, argument(step, 2))])
    if name in _HOMOGENEOUS or _keeps_scale(step, name):
        return _named([(0, argument(step, 0))])
    return None


def _operands(step: Step) -> list[tuple[Any, str]] | None:
    if name_of(step) == "einsum":
        return [((1, i), operand.name) for i, operand in enumerate(step.args[1])]
    left, right = step.args[:2]
    if name_of(step) == "div":  # a divisor's factor would have to be inverted, so it stays with the divisor
        return [(0, left.name)] if isinstance(left, Ref) else None
    return [(port, operand.name) for port, operand in ((0, left), (1, right)) if isinstance(operand, Ref)]


# A factor is a positive number, so `relu(a x) = a relu(x)`, and minus infinity does not change. Operations that are not
# listed count as non-linear: factors stay in front of them.
def _keeps_scale(step: Step, name: str) -> bool:
    """Return whether the step writes only zeros or -Inf, equal at every scale."""
    if name == "masked_fill":
        return argument(step, 2) in (0, float("-inf"))
    if name in ("pad", "constant_pad_nd"):
        return not (argument(step, 3) if name == "pad" else argument(step, 2))
    return False


def _named(ports: list[tuple[Any, Any]]) -> list[tuple[Any, str]] | None:
    """Return the names of values at ports, or None if one is no tensor."""
    return [(port, value.name) for port, value in ports] if all(isinstance(value, Ref) for _, value in ports) else None
