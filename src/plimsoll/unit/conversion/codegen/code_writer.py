"""Code of a converted module: its part of the graph as a Python function.

Code is text. A reader sees it (`Part.code`), it is pickled, and torch.compile traces it. A value has the name of its
operation, counted from the start in each module, so that all blocks of a deep model have the same code. A value is
deleted after its last use, as a custom forward overwrites its variables.
"""

import functools
import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from plimsoll.unit.changes import Factor, Port, Scale
from plimsoll.unit.conversion.codegen.steps import (
    DEVICE_TYPE,
    Here,
    Recipe,
    Ref,
    Sizes,
    Step,
    WhenTraining,
    is_number,
    refs_in,
    size_text,
    tensors_in,
)
from plimsoll.unit.conversion.converted_modules import Converted, Folded, Part

# -- tree of the calls in a recipe -------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """Call of a module."""

    path: str  # name of the module, "" for the model
    key: str = ""  # key of the call in the captured graph
    # Its own steps and the inner calls, in order.
    items: "list[Step | Call]" = field(default_factory=list["Step | Call"])
    inputs: list[str] = field(default_factory=list[str])  # values that it takes, in the order of their first use
    outputs: list[str] = field(default_factory=list[str])  # values that it returns, in the order of their computation

    def steps(self) -> Iterator[Step]:
        """Yield every step, with those of inner calls."""
        for item in self.items:
            if isinstance(item, Step):
                yield item
            else:
                yield from item.steps()

    def own_steps(self) -> Iterator[Step]:
        """Yield the steps without those of inner calls."""
        return (item for item in self.items if isinstance(item, Step))

    def calls(self) -> "Iterator[Call]":
        """Yield the direct inner calls."""
        return (item for item in self.items if isinstance(item, Call))


def tree_of(recipe: Recipe) -> Call:
    """Return the call of the model, with all calls inside."""
    root = _grouped([step for step in recipe.steps if not is_number(step)], recipe.shared)
    _Borders(recipe).fill(root)
    root.inputs = []
    root.outputs = [output.name for output in recipe.outputs if isinstance(output, Ref)]
    return root


# The steps of one call are consecutive, so a call is an interval of steps, and calls nest. Numbers that are computed
# from sizes belong to no call. Each call computes the numbers that it needs from its own tensors.
def _grouped(steps: Sequence[Step], shared: Mapping[str, tuple[str, ...]]) -> Call:
    root = Call(path="")
    opened = [root]
    for step in steps:
        stack = _nested(step, shared)
        depth = 0
        while depth < len(stack) and depth + 1 < len(opened) and opened[depth + 1].key == stack[depth][0]:
            depth += 1
        del opened[depth + 1 :]
        for key, path in stack[depth:]:
            call = Call(path=path, key=key)
            opened[-1].items.append(call)
            opened.append(call)
        opened[-1].items.append(step)
    return root


def _nested(step: Step, shared: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Return the calls around a step, each within the one before."""
    stack: list[tuple[str, str]] = []
    for key, path in step.stack:
        inside = stack[-1][1] + "." if stack else ""
        # A module that is called from outside of its parent has no call of its own: its steps are the caller's.
        named = next((name for name in shared.get(path, (path,)) if name.startswith(inside)), None)
        if named is not None:
            stack.append((key, named))
    return stack


class _Borders:
    """Inputs and outputs of each call."""

    def __init__(self, recipe: Recipe) -> None:
        self._sources = recipe.sources
        self._numbers = {step.name: step for step in recipe.steps if is_number(step)}
        self.sizes = Sizes(recipe)
        self._last_use: dict[str, int] = {}
        self._position = {step.name: i for i, step in enumerate(recipe.steps)}
        for i, step in enumerate(recipe.steps):
            for name in step.refs():
                self._last_use[name] = i
        for name in refs_in(list(recipe.outputs)):
            self._last_use[name] = len(recipe.steps)

    def fill(self, call: Call) -> tuple[int, int]:
        """Set inputs and outputs of a call and inner ones. Return its first and last step."""
        inner = [self.fill(inner_call) for inner_call in call.calls()]
        own = [self._position[step.name] for step in call.own_steps()]
        first = min([*own, *(start for start, _ in inner)])
        last = max([*own, *(end for _, end in inner)])
        made = {step.name for step in call.steps()}
        call.inputs = self._inputs(call, made)
        call.outputs = [step.name for step in call.steps() if self._last_use.get(step.name, -1) > last]
        return first, last

    def _inputs(self, call: Call, made: set[str]) -> list[str]:
        needed: dict[str, None] = {}
        for item in call.items:
            for name in item.refs() if isinstance(item, Step) else item.inputs:
                if name not in made and name not in self._numbers and not self.has(call.path, name):
                    needed[name] = None
        at_hand = list(needed)
        for item in call.items:  # a number that follows from no tensor at hand is an input too
            for name in item.refs() if isinstance(item, Step) else item.inputs:
                if name in self._numbers and self.sizes.expression(name, at_hand) is None:
                    needed[name] = None
            at_hand += [item.name] if isinstance(item, Step) else item.outputs
        return list(needed)

    def has(self, path: str, name: str) -> bool:
        """Return whether a value is a tensor of a module, or of one inside it."""
        source = self._sources.get(name)
        if source is None or source.kind == "input":
            return False
        return source.kind == "constant" or any(own_path(path, tensor) is not None for tensor in source.paths)


def own_path(module: str, tensor: str) -> str | None:
    """Return the name of a tensor as seen from a module, or None for another module's.

    >>> own_path("block.attention", "block.attention.out.weight"), own_path("block", "head.weight")
    ('out.weight', None)
    """
    if not module:
        return tensor
    return tensor[len(module) + 1 :] if tensor.startswith(module + ".") else None


# -- code --------------------------------------------------------------------------------------------------------------

# Names that a value must not take: those that the text uses, and Python's.
_USED = "self torch operator math scaled size_factor _inputs call args len sorted next"
_RESERVED = frozenset({*_USED.split(), *keyword.kwlist})


class Writer:
    """Writer of one call's body. `local` has the name of each value in it."""

    def __init__(self, recipe: Recipe, call: Call, versions: Mapping[Call, int]) -> None:
        self._recipe, self._call, self._versions = recipe, call, versions
        self._sizes = Sizes(recipe)
        self._taken: set[str] = set(_RESERVED)
        self._at_hand: list[str] = []
        self._lines: list[tuple[str, tuple[str, ...], set[str]]] = []  # text, contexts around it, values that it uses
        self.local: dict[str, str] = {}

    def named(self, value: str, wanted: str | None = None) -> str:
        """Choose the local name of a value, and return it."""
        stem = re.sub(r"(_default|_tensor)?(_\d+)*$", "", wanted or value) or "value"
        stem = stem if stem.isidentifier() and not stem.startswith("__") else "value"
        name, count = stem, 1
        while name in self._taken:
            name, count = f"{stem}_{count}", count + 1
        self._taken.add(name)
        self.local[value] = name
        self._at_hand.append(value)
        return name

    def reserve(self, names: Iterable[str]) -> None:
        """Exclude names from those of values."""
        self._taken |= set(names)

    def body(self, returned: Sequence[str] = ()) -> list[str]:
        """Return the lines of all steps and calls. Values of `returned` are not deleted."""
        for item in self._call.items:
            if isinstance(item, Step):
                self._step(item)
            else:
                self._inner(item)
        return self._finished({self.local[name] for name in returned if name in self.local})

    def value(self, nest: Any, used: set[str]) -> str:
        """Return an argument as text, and add the local values that it needs to `used`."""
        if isinstance(nest, Ref):
            return self._ref(nest.name, used)
        if nest is Here.TRAINING:
            return "self.training"
        if nest is Here.DEVICE:
            return f"{self._anchor(used)}.device"
        if isinstance(nest, WhenTraining):
            return f"{nest.value!r} if self.training else 0.0"
        if isinstance(nest, (list, tuple)):
            return f"[{', '.join(self.value(item, used) for item in nest)}]"  # pyright: ignore[reportUnknownVariableType]
        return constant_text(nest)

    def _ref(self, name: str, used: set[str]) -> str:
        if name in self.local:
            used.add(self.local[name])
            return self.local[name]
        if self._sizes.is_number(name):
            size = self._sizes.expression(name, self._at_hand)
            used |= {self.local[tensor] for tensor in tensors_in(size)}
            return size_text(size, self.local)
        parameter = self._recipe.sources[name].kind == "parameter"
        return attribute_text(self._own(name), "_parameters" if parameter else "_buffers")

    def _own(self, name: str) -> str:
        source = self._recipe.sources[name]
        if source.kind == "constant":
            return constant_name(source.paths[0])
        paths = [path for path in (own_path(self._call.path, tensor) for tensor in source.paths) if path is not None]
        return min(paths, key=lambda path: path.count("."))

    def _anchor(self, used: set[str]) -> str:
        """Return a tensor whose device is the module's."""
        sources = self._recipe.sources
        for name in self._at_hand:
            step_sizes = self._sizes.of(name)
            if step_sizes is not None and (name not in sources or sources[name].kind == "input"):
                used.add(self.local[name])
                return self.local[name]
        return "next(self.parameters())"

    def _step(self, step: Step) -> None:
        used: set[str] = set()
        change = step.change
        inputs: Mapping[Port, Scale] = {} if change is None else change.inputs
        args = [self._argument(value, i, inputs, used) for i, value in enumerate(step.args)]
        kwargs = {key: self._argument(value, key, inputs, used) for key, value in step.kwargs.items()}
        text = call_text(step.target, args, kwargs)
        # A factor that depends on the result's sizes needs a second line, after the result has its name.
        own = change is not None and step.name in {change.output.forward.of, change.output.backward.of}
        if change is None or not own:
            text = self._scaled(text, change.output if change else None, used)
            self._line(f"{self.named(step.name)} = {text}", step.regions, used)
            return
        name = self.named(step.name)
        self._line(f"{name} = {text}", step.regions, used)
        self._line(f"{name} = {self._scaled(name, change.output, used)}", step.regions, used | {name})

    def _argument(self, nest: Any, port: Port, inputs: Mapping[Port, Scale], used: set[str]) -> str:
        if isinstance(nest, (list, tuple)) and isinstance(port, int):
            inside = [self._argument(item, (port, i), inputs, used) for i, item in enumerate(nest)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return f"[{', '.join(inside)}]"
        return self._scaled(self.value(nest, used), inputs.get(port), used)

    def _inner(self, call: Call) -> None:
        used: set[str] = set()
        arguments = [self.value(Ref(name), used) for name in call.inputs]
        version = self._versions.get(call, 0)
        if version:
            arguments.append(f"call={version}")
        path = own_path(self._call.path, call.path) or call.path
        text = f"{attribute_text(path)}({', '.join(arguments)})"
        names = [self.named(name) for name in call.outputs]
        self._line(f"{', '.join(names)} = {text}" if names else text, (), used)

    def _scaled(self, text: str, scale: Scale | None, used: set[str]) -> str:
        if scale is None or (scale.forward.is_one and scale.backward.is_one):
            return text
        forward, backward = self._factor(scale.forward, used), self._factor(scale.backward, used)
        if forward == backward:
            return f"{text} * {forward}"
        if scale.forward.of is not None or scale.backward.of is not None:
            # None stands for 1: a compiler that compared a number of open sizes with 1 would specialize to them.
            alpha, beta = ("None" if f.is_one else t for f, t in ((scale.forward, forward), (scale.backward, backward)))
            return f"sized({text}, {alpha}, {beta})"
        return f"scaled({text}, {forward}, {backward})"

    def _factor(self, factor: Factor, used: set[str]) -> str:
        if factor.of is None:
            return repr(float(factor.value))
        tensor = self._ref(factor.of, used)
        return f"size_factor({tensor}, {factor.dims!r}, {factor.power!r}, {factor.value!r})"

    def _line(self, text: str, regions: tuple[str, ...], used: set[str]) -> None:
        if any(DEVICE_TYPE in region for region in regions):
            regions = tuple(region.replace(DEVICE_TYPE, f"{self._anchor(used)}.device.type") for region in regions)
        self._lines.append((text, regions, used))

    def _finished(self, returned: set[str]) -> list[str]:
        """Return the lines within contexts, each deleting the values that it uses last."""
        last: dict[str, int] = {}
        for i, (text, _, used) in enumerate(self._lines):
            made = text.split(" = ")[0].split(", ") if " = " in text else []
            last |= dict.fromkeys([*used, *(name for name in made if name.isidentifier())], i)
        lines: list[str] = []
        around: tuple[str, ...] = ()
        for i, (text, regions, _) in enumerate(self._lines):
            if regions != around:
                lines += [f"{'    ' * depth}with {region}:" for depth, region in enumerate(regions)]
                around = regions
            gone = [name for name, at in last.items() if at == i and name not in returned]
            ended = f"; del {', '.join(gone)}" if gone else ""
            lines.append("    " * len(regions) + text + ended)
        return lines


def attribute_text(path: str, holder: str = "_modules") -> str:
    """Return the text for a tensor or a module below `self`, by its dotted name.

    `holder`: where its owner keeps it.

    >>> attribute_text("layers.0.weight", "_parameters"), attribute_text("code.class", "_parameters")
    ("self.layers._modules['0'].weight", "self._modules['code']._parameters['class']")
    """
    text, names = "self", path.split(".")
    for i, name in enumerate(names):
        kept = holder if i == len(names) - 1 else "_modules"
        text += f".{kept}[{name!r}]" if _hidden(name) else f".{name}"
    return text


def _hidden(name: str) -> bool:
    """Return whether `self.name` is no Python, or means something else."""
    return not name.isidentifier() or keyword.iskeyword(name) or name in _PART_NAMES


# With those of every module, and with attributes that only instances have.
_PART_NAMES = frozenset({name for kind in (Part, Converted, Folded) for name in (*dir(kind), *kind.__annotations__)})


# Python functions of torch, not bindings, that take the operator's arguments as they are.
_SAME = {
    "aten.split.Tensor": "torch.split",
    "aten.split_with_sizes.default": "torch.split",
    "aten.einsum.default": "torch.einsum",
}
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
_METHODS = frozenset(
    """
    view expand contiguous clone reshape to type_as repeat unfold masked_fill new_zeros new_ones new_full expand_as
    view_as reshape_as
    """.split()
)
_OTHERS = frozenset({"aten.to.dtype_layout", "aten.to.prim_Device", "aten.to.prim_dtype", "aten.to.prim_other"})


def call_text(target: str, args: list[str], kwargs: dict[str, str]) -> str:
    """Return the call of an operation with arguments that are text already.

    >>> call_text("aten.gelu.default", ["x"], {"approximate": "'tanh'"})
    "torch._C._nn.gelu(x, approximate='tanh')"
    >>> call_text("aten.view.default", ["x", "[4]"], {})
    'x.view([4])'
    """
    special = _SPECIAL.get(target)
    if special is not None and not kwargs:
        written = special(args)
        if written is not None:
            return written
    named = [f"{name}={value}" for name, value in kwargs.items()]
    function = function_text(target)
    if function.startswith("."):
        return f"{args[0]}{function}({', '.join([*args[1:], *named])})"
    return f"{function}({', '.join([*args, *named])})"


@functools.cache
def function_text(target: str) -> str:
    """Return an operation's function. A leading dot means a method."""
    if not target.startswith("aten."):
        return target if target.startswith(("torch.", "operator.", "math.")) else f"torch.ops.{target}"
    name = target.split(".")[1]
    if target in _SAME:
        return _SAME[target]
    if name in _METHODS and target not in _OTHERS:
        return f".{name}"
    own = getattr(_C._VariableFunctions, name, None)  # noqa: SLF001
    # Not a Python function of that name, whose arguments differ.
    if own is not None and own is getattr(torch, name, None):
        return f"torch.{name}"
    return f"torch._C._nn.{name}" if hasattr(_C._nn, name) else f"torch.ops.{target}"  # noqa: SLF001


def constant_name(path: str) -> str:
    """Return the name of the buffer that keeps a constant, whose path begins with the module that makes it.

    >>> constant_name("blocks.0.lifted_tensor_0")
    'blocks_0_lifted_tensor_0'
    """
    return path.replace(".", "_")


def constant_text(value: object) -> str:
    """Return a constant of the graph as Python text.

    >>> constant_text(torch.float16), constant_text(float("-inf")), constant_text(torch.contiguous_format)
    ('torch.float16', "float('-inf')", 'torch.contiguous_format')
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


def _slice(args: list[str]) -> str | None:
    dim, start, end, step = (*args[1:], *("0", "None", "None", "1")[len(args) - 1 :])
    if not dim.isdigit():
        return None
    end = "" if end in ("None", "9223372036854775807") else end
    start = "" if start in ("None", "0") else start
    within = f"{start}:{end}" + (f":{step}" if step != "1" else "")
    return f"{args[0]}[{':, ' * int(dim)}{within}]"


def _index(args: list[str]) -> str | None:
    inside = args[1].strip("[]")
    return None if "(" in inside or "[" in inside else f"{args[0]}[{inside.replace('None', ':')},]"


_SPECIAL: dict[str, Callable[[list[str]], str | None]] = {
    "aten.slice.Tensor": _slice,
    "aten.index.Tensor": _index,
    "operator.getitem": lambda args: f"{args[0]}[{args[1]}]",
    "aten.lift_fresh_copy.default": lambda args: f"{args[0]}.clone()",
}
