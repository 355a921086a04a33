"""The head and the tail of a converted model's forward: the original's signature, and what it returned."""

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
_LARGEST = 2**31  # above it, what the compiler says of a size is no bound of the model's


class Structure:
    """How values are nested: torch's tree specification, in a form that pickles as an example of itself."""

    def __init__(self, example: Any) -> None:
        self.example = example
        self.spec = pytree.tree_structure(example)

    @classmethod
    def of(cls, spec: pytree.TreeSpec) -> "Structure":
        """The structure that a specification says."""
        return cls(pytree.tree_unflatten([0] * spec.num_leaves, spec))

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.example,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value among the example's: a tensor by its open and fixed sizes, or a constant.

    - `name`: the value in the program; None for a constant. `most`: the largest sizes, () where all are open.
    """

    name: str | None
    sizes: tuple[int | None, ...] = ()
    kind: str = ""
    constant: Any = None
    most: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of the forward.

    - `given`: the values in it, in order, with their structure; None where the example leaves it out.
    """

    name: str
    parameter: inspect.Parameter
    given: tuple[Given, ...] | None = None
    structure: Structure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a model is called, and what it returns: constants and the structure of the output."""

    arguments: tuple[Argument, ...]
    output: Structure


def signature_of(captured: Captured, forward: Callable[..., Any]) -> Signature:
    """The signature of the captured model, each argument with what the example gave for it."""
    given = iter(_given(captured))
    call: Any = captured.program.call_spec
    args_spec, kwargs_spec = _children(call.in_spec)
    positional = [(spec, _take(given, spec)) for spec in _children(args_spec)]
    names: list[str] = kwargs_spec.context or []
    named = {name: (spec, _take(given, spec)) for name, spec in zip(names, _children(kwargs_spec), strict=True)}
    arguments = tuple(_arguments(inspect.signature(forward).parameters, positional, named))
    return Signature(arguments=arguments, output=Structure.of(call.out_spec))


_Found = tuple[pytree.TreeSpec, tuple[Given, ...]]


def _arguments(
    parameters: Mapping[str, inspect.Parameter], positional: Sequence[_Found], named: dict[str, _Found]
) -> Iterator[Argument]:
    rest = list(positional)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            for i, (spec, given) in enumerate(rest):
                yield Argument(name=f"{name}[{i}]", parameter=parameter, given=given, structure=Structure.of(spec))
            rest = []
            yield Argument(name=name, parameter=parameter)
        elif parameter.kind is parameter.VAR_KEYWORD:
            for key, (spec, given) in named.items():
                yield Argument(name=key, parameter=parameter, given=given, structure=Structure.of(spec))
            named = {}
            yield Argument(name=name, parameter=parameter)
        elif rest and parameter.kind is not parameter.KEYWORD_ONLY:
            spec, given = rest.pop(0)
            yield Argument(name=name, parameter=parameter, given=given, structure=Structure.of(spec))
        elif name in named:
            spec, given = named.pop(name)
            yield Argument(name=name, parameter=parameter, given=given, structure=Structure.of(spec))
        else:
            yield Argument(name=name, parameter=parameter)


def _given(captured: Captured) -> Iterator[Given]:
    nodes = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    ranges = cast("Mapping[Any, Any]", captured.program.range_constraints)
    for one in captured.program.graph_signature.input_specs:
        if one.kind is not torch.export.graph_signature.InputKind.USER_INPUT:
            continue
        value = nodes[one.arg.name].meta.get("val") if one.arg.name in nodes else None
        if isinstance(value, Tensor):
            sizes = tuple(fixed_size(size) for size in value.shape)
            yield Given(name=one.arg.name, sizes=sizes, kind=kind_of(value.dtype), most=_most(value, ranges))
        elif isinstance(value, torch.SymInt):
            yield Given(name=one.arg.name, kind="number")
        else:
            yield Given(name=None, constant=getattr(one.arg, "value", value))


def _most(value: Tensor, ranges: Mapping[Any, Any]) -> tuple[int | None, ...]:
    """The upper ends of the open sizes' ranges; () where none has one."""
    found: list[int | None] = []
    for size in value.shape:
        known = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) and fixed_size(size) is None else None
        upper = None if known is None or not known.upper.is_finite or known.upper > _LARGEST else int(known.upper)
        found.append(upper)
    return tuple(found) if any(one is not None for one in found) else ()


def _take(given: Iterator[Given], spec: pytree.TreeSpec) -> tuple[Given, ...]:
    return tuple(next(given) for _ in range(spec.num_leaves))


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures within one; torch 2.9 has another name for them, which later ones have deprecated."""
    either = cast("Any", spec)
    return list(either.children() if hasattr(either, "children") else either.children_specs)


@dataclass(slots=True)
class Head:
    """The text of a signature and of what takes its values apart; `objects` are what the text names."""

    parameters: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])
    objects: dict[str, Any] = field(default_factory=dict[str, Any])


def head_of(signature: Signature, named: Callable[[str, str], str]) -> Head:
    """The head; `named(value, wanted)` gives each value of the program the name that it has from here on."""
    head = Head()
    starred = False
    for argument in signature.arguments:
        kind = argument.parameter.kind
        own = argument.name == argument.parameter.name
        if own:
            starred = _declare(head, argument, starred)
        if kind is inspect.Parameter.VAR_POSITIONAL and own:
            count = sum(one.parameter is argument.parameter for one in signature.arguments) - 1
            head.lines.append(f"_inputs.constant('the number of {argument.name}', len({argument.name}), {count})")
        elif kind is inspect.Parameter.VAR_KEYWORD and own:
            keys = sorted(
                one.name for one in signature.arguments if one.parameter is argument.parameter and one is not argument
            )
            head.lines.append(f"_inputs.constant('the further arguments', sorted({argument.name}), {keys!r})")
        else:
            text = argument.name
            if kind is inspect.Parameter.VAR_KEYWORD:
                text = f"{argument.parameter.name}[{argument.name!r}]"
            _take_apart(head, argument, text, named)
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


def _take_apart(head: Head, argument: Argument, text: str, named: Callable[[str, str], str]) -> None:
    if argument.given is None:
        default = _written(head, "default_" + argument.name, argument.parameter.default)
        head.lines.append(f"_inputs.constant({argument.name!r}, {text}, {default})")
    elif len(argument.given) == 1 and argument.structure is not None and argument.structure.spec.is_leaf():
        _one(head, argument.given[0], argument.name, text, named)
    else:
        values = f"values_{len(head.lines)}"
        spec = _written(head, f"spec_{argument.name.replace('[', '_').rstrip(']')}", argument.structure)
        head.lines.append(f"{values} = _inputs.leaves({argument.name!r}, {text}, {spec})")
        for i, one in enumerate(argument.given):
            _one(head, one, f"{argument.name}[{i}]", f"{values}[{i}]", named)


def _one(head: Head, given: Given, name: str, text: str, named: Callable[[str, str], str]) -> None:
    if given.name is None:
        wanted = _written(head, f"wanted_{len(head.lines)}", given.constant)
        head.lines.append(f"_inputs.constant({name!r}, {text}, {wanted})")
        return
    local = named(given.name, text)
    if given.kind == "number":
        head.lines.append(f"{local} = {text}")
    else:
        most = f", {given.most!r}" if given.most else ""
        head.lines.append(f"{local} = _inputs.tensor({name!r}, {text}, {given.sizes!r}, {given.kind!r}{most})")


def _written(head: Head, name: str, value: object) -> str:
    if isinstance(value, _SIMPLE) and value == value:  # noqa: PLR0124  (NaN cannot be written)
        return repr(value)
    head.objects[name] = value
    return name


def output_text(output: Structure, values: Sequence[str], objects: dict[str, Any]) -> str:
    """The returned structure as Python text, from its values as text."""
    spec = output.spec
    if spec.is_leaf():
        return values[0]
    if spec.type in (tuple, list, dict) and all(child.is_leaf() for child in _children(spec)):
        if spec.type is dict:
            return "{" + ", ".join(f"{key!r}: {value}" for key, value in zip(spec.context, values, strict=True)) + "}"
        return f"({''.join(value + ', ' for value in values)})" if spec.type is tuple else f"[{', '.join(values)}]"
    objects["output"] = output
    return f"_inputs.built([{', '.join(values)}], output)"


# What follows is called by the code of converted models, under `_inputs`. It runs under torch.compile, so it only
# compares. A size that was open in the capture is None.


def tensor(name: str, value: Any, sizes: tuple[int | None, ...], kind: str, most: tuple[int | None, ...] = ()) -> Any:
    """The value, if it is a tensor of these sizes and of the example's kind: "floating", "integer", "boolean".

    `most`: the largest size of each dimension that the model's code allows; None: any.
    """
    if not isinstance(value, Tensor):
        raise UnsupportedTensorError(
            f"converted model: expected {name} to be a tensor, as in the example; got {type(value).__name__}. Convert "
            "the model with an example that is called as this."
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
                "model has no more room there: give a shorter one."
            )
    if kind_of(value.dtype) != kind:
        raise UnsupportedTensorError(
            f"converted model: expected {name} to be {kind}, as in the example; got {value.dtype}. Give such a tensor."
        )
    return value


def constant(name: str, value: Any, wanted: Any) -> Any:
    """The value, if it is the one that the capture had: what is no tensor decided what was captured."""
    if isinstance(value, Tensor) or (value is not wanted and value != wanted):
        got = f"a tensor of sizes {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ArgumentError(
            f"converted model: expected {name}={wanted!r}, as in the example; got {got}. Convert the model with an "
            f"example that gives {name} so."
        )
    return value


def leaves(name: str, value: Any, structure: Structure) -> list[Any]:
    """The values in a structure, if it is the example's."""
    found, came = pytree.tree_flatten(value)
    if came != structure.spec:
        raise ArgumentError(
            f"converted model: expected {name} of the example's structure, {structure.spec}; got {came}. Convert the "
            "model with an example of this one."
        )
    return found


def kind_of(dtype: torch.dtype) -> str:
    """What values of the dtype are."""
    if dtype.is_floating_point:
        return "floating"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype is torch.bool else "integer"


def built(values: list[Any], structure: Structure) -> Any:
    """The values in the structure of an output."""
    return pytree.tree_unflatten(values, structure.spec)
