"""Head and tail of a converted model's forward: signature and output."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import fixed_size

_SIMPLE = (int, float, str, bool, type(None))
_NONE = inspect.Parameter.empty
_LARGEST = 2**31  # above it, a bound of torch.export is its own default and not the model's


class Structure:
    """Nesting of values: torch's tree specification, pickled as an example of itself."""

    def __init__(self, example: Any) -> None:
        self.example = example
        self.spec = pytree.tree_structure(example)

    @classmethod
    def of(cls, spec: pytree.TreeSpec) -> "Structure":
        """Return the structure of a specification."""
        return cls(pytree.tree_unflatten([0] * spec.num_leaves, spec))

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.example,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleValue:
    """Value of the example: a tensor, a number or a constant."""

    name: str | None  # name in the program, or None for a constant
    sizes: tuple[int | None, ...] = ()  # sizes of a tensor, None for open ones
    kind: str = ""  # kind of a tensor's values ("floating", "integer", ...), or "number"
    constant: Any = None
    most: tuple[int | None, ...] = ()  # largest sizes that the model's code allows, or () if all are open


# Name in pickles of version 0.1.
Given = ExampleValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """Argument of the forward, with the example's values in it."""

    name: str  # name, with an index or a key for arguments of `*args` and `**kwargs`
    parameter: inspect.Parameter  # parameter of the original forward
    values: tuple[ExampleValue, ...] | None = None  # values in it, in order, or None if the example omits it
    structure: Structure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Arguments of a model, and the structure of its output."""

    arguments: tuple[Argument, ...]
    output: Structure


def signature_of(captured: Captured, forward: Callable[..., Any]) -> Signature:
    """Return the signature of the captured model, with the example's values."""
    values = _example_values(captured)
    call: Any = captured.program.call_spec
    args_spec, kwargs_spec = _children(call.in_spec)
    positional = [(spec, _take(values, spec)) for spec in _children(args_spec)]
    names: list[str] = kwargs_spec.context or []
    named = {name: (spec, _take(values, spec)) for name, spec in zip(names, _children(kwargs_spec), strict=True)}
    arguments = tuple(_arguments(inspect.signature(forward).parameters, positional, named))
    return Signature(arguments=arguments, output=Structure.of(call.out_spec))


_Passed = tuple[pytree.TreeSpec, tuple[ExampleValue, ...]]


def _arguments(
    parameters: Mapping[str, inspect.Parameter], positional: Sequence[_Passed], named: dict[str, _Passed]
) -> Iterator[Argument]:
    def argument(name: str, parameter: inspect.Parameter, passed: _Passed) -> Argument:
        return Argument(name=name, parameter=parameter, values=passed[1], structure=Structure.of(passed[0]))

    rest = list(positional)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from (argument(f"{name}[{i}]", parameter, passed) for i, passed in enumerate(rest))
            rest = []
            yield Argument(name=name, parameter=parameter)
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from (argument(key, parameter, passed) for key, passed in named.items())
            named = {}
            yield Argument(name=name, parameter=parameter)
        elif rest and parameter.kind is not parameter.KEYWORD_ONLY:
            yield argument(name, parameter, rest.pop(0))
        elif name in named:
            yield argument(name, parameter, named.pop(name))
        else:
            yield Argument(name=name, parameter=parameter)


def _example_values(captured: Captured) -> Iterator[ExampleValue]:
    nodes = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    ranges = cast("Mapping[Any, Any]", captured.program.range_constraints)
    for spec in captured.program.graph_signature.input_specs:
        if spec.kind is not torch.export.graph_signature.InputKind.USER_INPUT:
            continue
        name = spec.arg.name
        value = nodes[name].meta.get("val") if name in nodes else None
        if isinstance(value, Tensor):
            sizes = tuple(fixed_size(size) for size in value.shape)
            yield ExampleValue(name=name, sizes=sizes, kind=kind_of(value.dtype), most=_most(value, ranges))
        elif isinstance(value, torch.SymInt):
            yield ExampleValue(name=name, kind="number")
        else:
            yield ExampleValue(name=None, constant=getattr(spec.arg, "value", value))


def _most(value: Tensor, ranges: Mapping[Any, Any]) -> tuple[int | None, ...]:
    """Return the upper ends of the open sizes' ranges, or () if there is none."""
    ends: list[int | None] = []
    for size in value.shape:
        known = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) and fixed_size(size) is None else None
        upper = None if known is None or not known.upper.is_finite or known.upper > _LARGEST else int(known.upper)
        ends.append(upper)
    return tuple(ends) if any(end is not None for end in ends) else ()


def _take(values: Iterator[ExampleValue], spec: pytree.TreeSpec) -> tuple[ExampleValue, ...]:
    return tuple(next(values) for _ in range(spec.num_leaves))


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    either = cast("Any", spec)
    # Torch 2.9 has only `children_specs`, which later versions deprecate.
    return list(either.children() if hasattr(either, "children") else either.children_specs)


@dataclass(slots=True)
class Head:
    """Text of a signature, with its unpacking lines and the objects it names."""

    parameters: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])
    objects: dict[str, Any] = field(default_factory=dict[str, Any])


def head_of(signature: Signature, named: Callable[[str, str], str]) -> Head:
    """Return the head. `named(value, wanted)` chooses the local name of each value."""
    head = Head()
    starred = False
    for argument in signature.arguments:
        kind = argument.parameter.kind
        own = argument.name == argument.parameter.name
        if own:
            starred = _declare(head, argument, starred)
        if kind is inspect.Parameter.VAR_POSITIONAL and own:
            count = sum(other.parameter is argument.parameter for other in signature.arguments) - 1
            head.lines.append(f"_inputs.constant('the number of {argument.name}', len({argument.name}), {count})")
        elif kind is inspect.Parameter.VAR_KEYWORD and own:
            same = (other for other in signature.arguments if other.parameter is argument.parameter)
            keys = sorted(other.name for other in same if other is not argument)
            head.lines.append(f"_inputs.constant('the further arguments', sorted({argument.name}), {keys!r})")
        else:
            text = argument.name
            if kind is inspect.Parameter.VAR_KEYWORD:
                text = f"{argument.parameter.name}[{argument.name!r}]"
            _unpack(head, argument, text, named)
    return head


def _declare(head: Head, argument: Argument, starred: bool) -> bool:
    parameter = argument.parameter
    if parameter.kind is parameter.VAR_POSITIONAL:
        head.parameters.append(f"*{parameter.name}")
        return True
    if parameter.kind is parameter.VAR_KEYWORD:
        head.parameters.append(f"**{parameter.name}")
        return starred
    if parameter.kind is parameter.KEYWORD_ONLY and not starred:
        head.parameters.append("*")
        starred = True
    default = "" if parameter.default is _NONE else f"={_written(head, 'default_' + parameter.name, parameter.default)}"
    head.parameters.append(parameter.name + default)
    return starred


def _unpack(head: Head, argument: Argument, text: str, named: Callable[[str, str], str]) -> None:
    if argument.values is None:
        default = _written(head, "default_" + argument.name, argument.parameter.default)
        head.lines.append(f"_inputs.constant({argument.name!r}, {text}, {default})")
    elif len(argument.values) == 1 and argument.structure is not None and argument.structure.spec.is_leaf():
        _unpack_value(head, argument.values[0], argument.name, text, named)
    else:
        values = f"values_{len(head.lines)}"
        spec = _written(head, f"spec_{argument.name.replace('[', '_').rstrip(']')}", argument.structure)
        head.lines.append(f"{values} = _inputs.leaves({argument.name!r}, {text}, {spec})")
        for i, value in enumerate(argument.values):
            _unpack_value(head, value, f"{argument.name}[{i}]", f"{values}[{i}]", named)


def _unpack_value(head: Head, value: ExampleValue, name: str, text: str, named: Callable[[str, str], str]) -> None:
    if value.name is None:
        wanted = _written(head, f"wanted_{len(head.lines)}", value.constant)
        head.lines.append(f"_inputs.constant({name!r}, {text}, {wanted})")
        return
    local = named(value.name, text)
    if value.kind == "number":
        head.lines.append(f"{local} = {text}")
    else:
        most = f", {value.most!r}" if value.most else ""
        head.lines.append(f"{local} = _inputs.tensor({name!r}, {text}, {value.sizes!r}, {value.kind!r}{most})")


def _written(head: Head, name: str, value: object) -> str:
    if isinstance(value, _SIMPLE) and value == value:  # noqa: PLR0124  (NaN cannot be written)
        return repr(value)
    head.objects[name] = value
    return name


def output_text(output: Structure, values: Sequence[str], objects: dict[str, Any]) -> str:
    """Return the output's structure as Python text, from its values as text."""
    spec = output.spec
    if spec.is_leaf():
        return values[0]
    if spec.type in (tuple, list, dict) and all(child.is_leaf() for child in _children(spec)):
        if spec.type is dict:
            return "{" + ", ".join(f"{key!r}: {value}" for key, value in zip(spec.context, values, strict=True)) + "}"
        return f"({''.join(value + ', ' for value in values)})" if spec.type is tuple else f"[{', '.join(values)}]"
    objects["output"] = output
    return f"_inputs.built([{', '.join(values)}], output)"


# The code of converted models calls the functions below as `_inputs`. They run under torch.compile, so they only
# compare. A size that was open in the capture is None.


def tensor(name: str, value: Any, sizes: tuple[int | None, ...], kind: str, most: tuple[int | None, ...] = ()) -> Any:
    """Return the tensor, or raise an error for other sizes or kinds of values.

    `most` has the largest size of each dimension that the model's code allows, None for any.
    """
    if not isinstance(value, Tensor):
        raise UnsupportedTensorError(
            f"converted model: expected {name} to be a tensor, as in the example; got {type(value).__name__}. Convert "
            "the model with an example of this call."
        )
    if value.dim() != len(sizes) or any(size is not None and size != value.shape[i] for i, size in enumerate(sizes)):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ArgumentError(
            f"converted model: expected {name} of sizes ({wanted}); got {tuple(value.shape)}. The model's own code "
            "fixes these sizes: give such a tensor, or convert it with an example of other sizes."
        )
    for i, size in enumerate(most):
        if size is not None and value.shape[i] > size:
            raise ArgumentError(
                f"converted model: expected {name} with at most {size} in dimension {i}; got {tuple(value.shape)}. The "
                "model's code allows no more: give a shorter one."
            )
    if kind_of(value.dtype) != kind:
        raise UnsupportedTensorError(
            f"converted model: expected {name} to be {kind}, as in the example; got {value.dtype}. Give such a tensor."
        )
    return value


def constant(name: str, value: Any, wanted: Any) -> Any:
    """Return the value, or raise an error unless it is that of the capture."""
    # Values that are no tensors decided what was captured.
    if isinstance(value, Tensor) or (value is not wanted and value != wanted):
        got = f"a tensor of sizes {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ArgumentError(
            f"converted model: expected {name}={wanted!r}, as in the example; got {got}. Convert the model with an "
            f"example that gives {name} so."
        )
    return value


def leaves(name: str, value: Any, structure: Structure) -> list[Any]:
    """Return the values in a structure, or raise an error unless it is the example's."""
    values, spec = pytree.tree_flatten(value)
    if spec != structure.spec:
        raise ArgumentError(
            f"converted model: expected {name} of the example's structure, {structure.spec}; got {spec}. Convert the "
            "model with an example of this structure."
        )
    return values


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of a dtype's values."""
    if dtype.is_floating_point:
        return "floating"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype is torch.bool else "integer"


def built(values: list[Any], structure: Structure) -> Any:
    """Return the values in the structure of an output."""
    return pytree.tree_unflatten(values, structure.spec)
