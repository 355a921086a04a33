"""Recipe of a captured program. `steps` describes the changes on the way."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from plimsoll.unit.analysis.analyzer import source_of
from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.changes import Factor, NodeChange, Scale
from plimsoll.unit.conversion.codegen.steps import (
    DEVICE_TYPE,
    NORMS,
    Here,
    Kind,
    Recipe,
    Ref,
    Source,
    Step,
    WhenTraining,
    is_whole_slice,
    mapped,
    refs_in,
)
from plimsoll.unit.conversion.converted_modules import named_modules

# Arguments in the schemas of operations that depend on whether the model trains.
_TRAINING_ARGUMENTS = ("train", "training", "use_input_stats")
_ASSERTIONS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.msg",
        "aten._assert_async.default",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
_GRAD_REGION = "wrap_with_set_grad_enabled"
_AUTOCAST_REGION = "wrap_with_autocast"


def recipe_of(captured: Captured, model: nn.Module, changes: Mapping[str, NodeChange]) -> Recipe:
    """Return the steps of a captured program, each with its change."""
    reader = _Reader(captured, model, changes)
    steps = list(reader.read(captured.graph.nodes, captured.program.graph_module, ()))
    outputs = tuple(reader.outputs)
    used = {name for step in steps for name in step.refs()} | set(refs_in(list(outputs)))
    steps = tuple(step for step in steps if step.name in used or step.target != "operator.getitem")
    needed = {*used, *(output.name for output in outputs if isinstance(output, Ref))}
    sources = {name: source for name, source in reader.sources.items() if source.kind == "input" or name in needed}
    return Recipe(sources=sources, steps=steps, outputs=outputs, shared=_shared(model))


class _Reader:
    """Reader of a program, with the values that replace overwritten ones."""

    def __init__(self, captured: Captured, model: nn.Module, changes: Mapping[str, NodeChange]) -> None:
        self._changes = changes
        self._signature = captured.program.graph_signature
        self._constants = captured.program.constants
        self._paths = _paths_of(model)
        self._model = model
        self.sources: dict[str, Source] = {}
        self.outputs: tuple[Any, ...] = ()
        self._renamed: dict[str, Any] = {}

    def read(self, nodes: Iterable[fx.Node], owner: nn.Module, regions: tuple[str, ...]) -> Iterator[Step]:
        """Yield the steps of nodes, and take their sources and outputs."""
        for node in nodes:
            if node.op == "placeholder":
                self._source(node)
            elif node.op == "output":
                self.outputs = tuple(self._values(node.args[0]))
            elif node.op == "call_function":
                yield from self._operation(node, owner, regions)

    def _source(self, node: fx.Node) -> None:
        kind, target = self._kind(node.name)
        paths = self._paths.get(id(_tensor_at(self._model, target)), (target,)) if target and kind != "constant" else ()
        if kind == "constant":
            paths = (str(target),)
        self.sources[node.name] = Source(name=node.name, kind=kind, paths=paths, sizes=_sizes(node))

    def _kind(self, name: str) -> tuple[Kind, str | None]:
        signature = self._signature
        if name in signature.inputs_to_parameters:
            return "parameter", signature.inputs_to_parameters[name]
        if name in signature.inputs_to_buffers:
            return "buffer", signature.inputs_to_buffers[name]
        if name in signature.inputs_to_lifted_tensor_constants:
            return "constant", signature.inputs_to_lifted_tensor_constants[name]
        return "input", None

    def _operation(self, node: fx.Node, owner: nn.Module, regions: tuple[str, ...]) -> Iterator[Step]:
        target = _target(node)
        if target in _ASSERTIONS:
            return
        if target in (_GRAD_REGION, _AUTOCAST_REGION):
            yield from self._region(node, target, owner, regions)
        elif is_whole_slice(node):
            self._renamed[node.name] = self._value(node.args[0])
        elif node.target is operator.getitem and isinstance(self._renamed.get(node.args[0].name), tuple):  # type: ignore[union-attr]
            self._renamed[node.name] = self._renamed[node.args[0].name][node.args[1]]  # type: ignore[union-attr, index]
        else:
            yield self._step(node, target, regions)

    def _region(self, node: fx.Node, target: str, owner: nn.Module, regions: tuple[str, ...]) -> Iterator[Step]:
        """Yield the operations of a `no_grad` or `autocast` block, marked with it."""
        if target == _GRAD_REGION:
            opened, (inner, *passed) = f"torch.set_grad_enabled({node.args[0]})", node.args[1:]
        else:
            _, dtype, enabled, cache = node.args[:4]  # the device is the model's at run time
            opened = f"torch.autocast({DEVICE_TYPE}, dtype={dtype}, enabled={enabled}, cache_enabled={cache})"
            inner, *passed = node.args[4:]
        body = getattr(owner, str(inner.target))  # type: ignore[union-attr]
        outer_outputs = self.outputs
        names = [inside.name for inside in body.graph.nodes if inside.op == "placeholder"]
        self._renamed |= {name: self._value(value) for name, value in zip(names, passed, strict=True)}
        operations = [inside for inside in body.graph.nodes if inside.op != "placeholder"]
        yield from self.read(operations, body, (*regions, opened))
        self._renamed[node.name] = self.outputs
        self.outputs = outer_outputs

    def _step(self, node: fx.Node, target: str, regions: tuple[str, ...]) -> Step:
        args = self._values(node.args)
        kwargs = self._values(dict(node.kwargs))
        args, kwargs = _following(node, args, kwargs)
        args = _with_epsilon(node, target, args, kwargs)
        change = self._change(node)  # before what the operation writes over has its name
        target = self._not_in_place(node, target)
        return Step(
            name=node.name,
            target=target,
            args=args,
            kwargs=kwargs,
            stack=_stack(node),
            regions=regions,
            change=change,
            sizes=_sizes(node),
            size=_size(node),
            place=source_of(node),
            floating=_floating(node.meta.get("val")),
        )

    def _change(self, node: fx.Node) -> NodeChange | None:
        """Return the change, with run-time factors of the operation's own tensors."""
        change = self._changes.get(node.name)
        if change is None:
            return None

        def near(factor: Factor) -> Factor:
            if factor.of is None:
                return factor
            own = _of_own(node, factor)
            return replace(own, of=self._renamed.get(str(own.of), Ref(str(own.of))).name)

        def both(scale: Scale) -> Scale:
            return Scale(forward=near(scale.forward), backward=near(scale.backward))

        inputs = {port: both(scale) for port, scale in change.inputs.items()}
        return replace(change, output=both(change.output), inputs=inputs)

    def _not_in_place(self, node: fx.Node, target: str) -> str:
        """Return the operation's form that does not write in place."""
        written = node.args[0] if node.args else None
        if (
            not _writes(node)
            or not isinstance(written, fx.Node)
            or self._is_state(written)
            or _has_views(node, written)
        ):
            return target
        space, name, overload = target.split(".")
        if not hasattr(getattr(torch.ops.aten, name[:-1], None), overload):
            return target
        self._renamed[written.name] = Ref(node.name)
        for old, new in self._renamed.items():
            if new == Ref(written.name):
                self._renamed[old] = Ref(node.name)
        return f"{space}.{name[:-1]}.{overload}"

    def _is_state(self, node: fx.Node) -> bool:
        source = self.sources.get(node.name)
        return source is not None and source.kind != "input"

    def _values(self, nest: Any) -> Any:
        return mapped(nest, self._value)

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        return self._renamed.get(leaf.name, Ref(leaf.name))


def _with_epsilon(node: fx.Node, target: str, args: Any, kwargs: Any) -> Any:
    """Return a norm's arguments up to epsilon: torch 2.9 exports no defaults."""
    norm = NORMS.get(target.split(".")[1] if "." in target else target)
    if norm is None:
        return args
    left_out: Any = cast("Any", node.target)._schema.arguments[len(args) : norm[2] + 1]  # noqa: SLF001
    if any(argument.name in kwargs for argument in left_out):
        return args
    return (*args, *(argument.default_value for argument in left_out))


def _following(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments, with training, dropout and device read at run time."""

    def device(leaf: Any) -> Any:
        return Here.DEVICE if isinstance(leaf, torch.device) and leaf.type != "meta" else leaf

    args, kwargs = mapped(args, device), mapped(kwargs, device)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return args, kwargs
    for position, argument in enumerate(schema.arguments):
        if argument.name == "reduction" and position >= len(args) and "reduction" not in kwargs:
            kwargs = {**kwargs, "reduction": argument.default_value}  # torch's Python bindings default to no reduction
        if argument.name in _TRAINING_ARGUMENTS and position < len(args) and args[position] is True:
            args = (*args[:position], Here.TRAINING, *args[position + 1 :])
        elif (
            argument.name == "dropout_p"
            and position < len(args)
            and isinstance(args[position], float)
            and args[position]
        ):
            args = (*args[:position], WhenTraining(args[position]), *args[position + 1 :])
        elif argument.name == "dropout_p" and kwargs.get("dropout_p"):
            kwargs = {**kwargs, "dropout_p": WhenTraining(kwargs["dropout_p"])}
    if str(node.target) == "aten.add_.Tensor" and args[1:] == (1,) and _sizes(node) == ():
        args = (args[0], Here.TRAINING)  # a count of batches: plus 1 while training, else plus 0
    return args, kwargs


def _of_own(node: fx.Node, factor: Factor) -> Factor:
    named = next(other for other in node.graph.nodes if other.name == factor.of)
    own = [*node.all_input_nodes, node]
    if named in own:
        return factor
    wanted = [(_sizes(named) or ())[dim] for dim in factor.dims]
    for tensor in own:
        sizes = list(_sizes(tensor) or ())
        if all(sizes.count(size) == wanted.count(size) for size in wanted):
            return replace(factor, of=tensor.name, dims=tuple(i for i, size in enumerate(sizes) if size in wanted))
    return factor


def _target(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return str(cast("object", target))
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", "")
    if isinstance(target, torch._ops.HigherOrderOperator):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return str(target.name())
    return f"{module.lstrip('_')}.{name}"


def _stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    calls: list[tuple[str, str]] = []
    for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
        name = path.split("@")[0]
        if name and not name.startswith("_empty_nn_module_stack"):
            calls.append((key, name))
    return tuple(calls)


def _sizes(node: fx.Node) -> tuple[str, ...] | None:
    value: Any = node.meta.get("val")
    return tuple(_text(size) for size in value.shape) if isinstance(value, Tensor) else None


def _size(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return _text(value) if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) else None


def _text(size: Any) -> str:
    return str(size.node.expr) if hasattr(size, "node") else str(size)


def _floating(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_floating(item) for item in cast("list[Any]", value))
    return isinstance(value, Tensor) and value.is_floating_point()


def _paths_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    paths: dict[int, tuple[str, ...]] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        paths[id(tensor)] = (*paths.get(id(tensor), ()), name)
    return paths


def _shared(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, module in named_modules(model):
        names[id(module)] = (*names.get(id(module), ()), name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _tensor_at(model: nn.Module, path: str | None) -> object:
    if path is None:
        return None
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name, None)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.endswith("_") and not schema.name.endswith("__") and schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    info = schema.returns[0].alias_info
    return info is not None and not info.is_write


def _has_views(node: fx.Node, written: fx.Node) -> bool:
    """Return whether another value that is still used shares the written memory."""
    if _is_view(written):
        return True
    later = set(_after(node))
    return any(
        _is_view(user) and any(use in later for use in user.users) for user in written.users if user not in later
    )


def _after(node: fx.Node) -> Iterator[fx.Node]:
    following = node.next
    while following.op != "root":
        yield following
        following = following.next
