"""Operations of compiled code, from Inductor's graph after its last pass."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.emulate.dispatch import thread_frame
from plimsoll.receipts.recording.operations import (
    MULTIPLYING,
    Cause,
    Entry,
    Switches,
    factors_of_names,
    kind_of,
    product_arithmetic,
    sum_accumulator,
)
from plimsoll.receipts.recording.recorder import Forward, Recorder
from plimsoll.receipts.recording.values import dtype_name, narrower
from plimsoll.tracing.late_patches import when_imported
from plimsoll.tracing.operation_schema import Facts, facts_of
from plimsoll.tracing.tensors import tensors_in
from plimsoll.watch.call_site import Place, cause_of, look, path_of, place_of
from plimsoll.watch.hooks.torch_hooks import has_compiled
from plimsoll.watch.names import unwrapped

_C = cast("Any", torch)._C  # noqa: SLF001
_ATTENTION = "scaled_dot_product_attention"
_CASTS = ("prims.convert_element_type", "aten._to_copy")
# Private parts of torch, all of which are in torch 2.9 to 2.13: `CompiledFxGraph.__init__` and `__call__`
# (output_code), the scheduler's nodes with their `origins`, `joint_graph_passes` as compile_fx calls it, and
# `OutputGraph.call_user_compiler` of Dynamo, which every backend passes. Where a patched one is missing, compilation
# fails with its name. Where another part is missing, compiled code is recorded by its name.
_CONFIGURATION = (("torch._inductor.config", "fx_graph_cache"), ("torch._functorch.config", "enable_autograd_cache"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """An operation of a graph, without what its call adds."""

    facts: Facts
    operands: tuple[str, ...]
    values: tuple[str, ...]
    output: str
    accumulate: str | None
    partial: str | None
    path: str | None
    place: Place
    cause: Cause | None
    scripted: bool
    rounded: bool
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """The operations of one compiled graph."""

    operations: tuple[_Operation, ...]
    device: str
    autocast: bool  # whether it switches autocast on itself


class CompiledCode:
    """Recorder of compiled code's operations. It has all code compiled again."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs: dict[Any, _Graph] = {}
        self._undo: list[Callable[[], None]] = []
        self.backends: dict[str, int] = {}  # name -> regions
        self.failures: list[str] = []  # of reading a graph
        self.errors: dict[str, str] = {}  # backend -> why its compilation failed, so that code runs eagerly
        self._breaks_before: Counter[str] = Counter()
        self._autocast = False  # whether the code that is being compiled switches autocast on
        self._removed: list[_Operation] = []  # its casts that Inductor's first passes have removed

    def __enter__(self) -> "CompiledCode":
        reset()
        self._breaks_before = _counted_breaks()
        self._undo.append(when_imported("torch._inductor.output_code", self._patch_inductor))
        self._undo.append(when_imported("torch._inductor.compile_fx", self._patch_passes))
        self._undo.append(when_imported("torch._dynamo.output_graph", self._patch_dynamo))
        for module, setting in _CONFIGURATION:  # a graph from a cache has no scheduler that could be read
            self._undo.append(when_imported(module, functools.partial(self._set_off, setting)))
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()
        reset()

    def breaks(self) -> dict[str, int]:
        """Return the number of graph breaks so far, by their reasons."""
        return dict(_counted_breaks() - self._breaks_before)

    def _set_off(self, setting: str, module: ModuleType) -> None:
        before = getattr(module, setting)
        setattr(module, setting, False)
        self._undo.append(lambda: setattr(module, setting, before))

    def _replace(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        setattr(owner, name, wrapper(original))
        self._undo.append(lambda: setattr(owner, name, original))

    # -- Inductor ------------------------------------------------------------------------------------------------------

    def _patch_inductor(self, module: ModuleType) -> None:
        owner: Any = vars(module)["CompiledFxGraph"]
        self._replace(owner, "__init__", self._making)
        self._replace(owner, "__call__", self._calling)

    def _making(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(graph_self: Any, current_callable: Any, graph: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(graph_self, current_callable, graph, *args, **kwargs)
            try:
                made = _read(graph, autocast=self._autocast)
                self._graphs[graph_self.cache_key] = replace(made, operations=(*made.operations, *self._removed))
                self._removed = []
            except Exception as error:  # noqa: BLE001  (private parts of torch may have changed: the code runs on)
                self.failures.append(f"{type(error).__name__}: {error}")

        return __init__

    def _patch_passes(self, module: ModuleType) -> None:
        self._replace(module, "joint_graph_passes", self._joining)

    def _joining(self, original: Any) -> Any:
        @functools.wraps(original)
        def joint_graph_passes(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                trips = _round_trips(graph.graph)
            except Exception as error:  # noqa: BLE001  (as above)
                self.failures.append(f"{type(error).__name__}: {error}")
                trips = []
            result = original(graph, *args, **kwargs)
            left = set(graph.graph.nodes)
            self._removed += [cast for node, source, cast in trips if node not in left and source in left]
            return result

        return joint_graph_passes

    def _calling(self, original: Any) -> Any:
        @functools.wraps(original)
        def __call__(graph_self: Any, inputs: Any) -> Any:  # noqa: N807
            recorder = self._recorder
            if not recorder.recording or recorder.inside_compiled:
                return original(graph_self, inputs)
            graph = self._graphs.get(graph_self.cache_key)
            tensors = list(tensors_in(list(inputs)))  # the call empties the list
            before = self._enter()
            recorder.inside_compiled += 1
            try:
                result = original(graph_self, inputs)
            finally:
                recorder.inside_compiled -= 1
            if graph is None:
                self._add_opaque("Inductor", tensors, result, before)
            else:
                self._add(graph, before)
            self._note_results(result)
            return result

        return __call__

    def _enter(self) -> tuple[Place, bool, Any]:
        """Return compiled code's call site, if it is a backward, and its autograd node."""
        backward = _C._current_graph_task_id() != -1  # noqa: SLF001
        node = _C._current_autograd_node() if backward else None  # noqa: SLF001
        place = look(backward=backward)
        if backward:
            forward = self._recorder.forwards.of(node)
            if forward is not None and not place.recomputing:
                place = forward.place
        else:
            number = _C._autograd._get_sequence_nr() - 1  # noqa: SLF001
            self._recorder.forwards.note(Forward(place), number)
        if place.root is not None:
            self._recorder.roots.setdefault(id(place.root), place.root)
        return place, backward, node

    def _add(self, graph: _Graph, before: tuple[Place, bool, Any]) -> None:
        place, backward, node = before
        base = None if place.module is None else unwrapped(place.module)
        recomputing = backward and place.recomputing
        autocast = graph.autocast or (thread_frame.nesting() > 0 and (recomputing or not backward))
        phase = "optimizer" if self._recorder.stepping else "recomputation" if recomputing else "forward"
        for operation in graph.operations:
            where = operation.place if operation.place.file is not None else place
            entry = Entry(
                kind=kind_of(operation.facts) if operation.cause is None else "cast",
                operation=operation.facts.name, base=operation.facts.base,
                phase="backward" if backward and not recomputing else phase,
                place=where, module=base, path=operation.path, operands=operation.operands, values=operation.values,
                output=operation.output,
                accumulate=operation.accumulate, partial=operation.partial, cause=operation.cause, where="compiled",
                device=graph.device, part_of=_ATTENTION if _ATTENTION in where.text else "",
                node=None if node is None else node.name(), rounded=operation.rounded, autocast=autocast,
                scripted=operation.scripted,
            )  # fmt: skip
            self._recorder.entries.add(entry, bytes=operation.bytes)

    def _add_opaque(self, name: str, inputs: list[Tensor], result: Any, before: tuple[Place, bool, Any]) -> None:
        """Record opaque code by its name, with the dtypes that go in and come out."""
        place, backward, node = before
        outputs = [x for x in tensors_in(result) if x.is_floating_point()]
        operands = tuple(dict.fromkeys(dtype_name(x.dtype) for x in inputs if x.is_floating_point()))
        self._recorder.entries.add(Entry(
            kind="custom", operation=f"compiled by {name}", base="compiled",
            phase="backward" if backward else "forward",
            place=place, module=None if place.module is None else unwrapped(place.module), operands=operands,
            values=operands, output=dtype_name(outputs[0].dtype) if outputs else "", where="compiled",
            node=None if node is None else node.name(),
        ))  # fmt: skip

    def _note_results(self, result: Any) -> None:
        for x in tensors_in(result):
            self._recorder.memory.of(x, "other")

    # -- other backends ------------------------------------------------------------------------------------------------

    def _patch_dynamo(self, module: ModuleType) -> None:
        self._replace(vars(module)["OutputGraph"], "call_user_compiler", self._compiling)

    def _compiling(self, original: Any) -> Any:
        @functools.wraps(original)
        def call_user_compiler(output_graph: Any, gm: Any, example_inputs: Any) -> Any:
            graphs = len(self._graphs) + len(self.failures)
            name = _backend_name(output_graph.compiler_fn)
            self._autocast = any(map(_switches_autocast_on, gm.graph.nodes))
            self._removed = []
            try:
                compiled = original(output_graph, gm, example_inputs)
            except Exception as error:
                cause = getattr(error, "inner_exception", error)
                self.errors.setdefault(name, f"{type(cause).__name__}: {cause}".strip().split("\n", 1)[0])
                raise
            self.backends[name] = self.backends.get(name, 0) + 1
            if len(self._graphs) + len(self.failures) > graphs:
                return compiled
            return self._watched(compiled, name)

        return call_user_compiler

    def _watched(self, compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a backend's code, recorded by name if its operations cannot be seen."""

        @functools.wraps(compiled)
        def run(*args: Any) -> Any:
            recorder = self._recorder
            if not recorder.recording or recorder.inside_compiled:
                return compiled(*args)
            before, seen = self._enter(), recorder.entries.total
            result = compiled(*args)
            if recorder.entries.total == seen:
                self._add_opaque(name, list(tensors_in(list(args))), result, before)
            return result

        return run


def reset() -> None:
    """Make all compiled code compile again at its next call."""
    if has_compiled():  # resetting imports a lot
        cast("Any", torch)._dynamo.reset()  # noqa: SLF001


def _counted_breaks() -> Counter[str]:
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return Counter({str(reason): int(count) for reason, count in dict(counters.get("graph_break", {})).items()})


def _backend_name(compiler: Any) -> str:
    inner = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    return str(getattr(inner, "compiler_name", None) or getattr(inner, "__name__", None) or type(inner).__name__)


# -- the graph ---------------------------------------------------------------------------------------------------------


def _switches_autocast_on(node: Any) -> bool:
    enter = cast("Any", torch.amp).autocast_mode._enter_autocast  # noqa: SLF001
    return node.target is enter and bool(node.args[2])


def _read(graph: Any, *, autocast: bool) -> _Graph:
    kernels = list(_kernels(graph))
    config: Any = sys.modules.get("torch._inductor.config")
    keeps_rounding = bool(getattr(config, "emulate_precision_casts", False))
    device = next(iter(sorted(graph.device_types - {"cpu"})), "cpu")
    operations: list[_Operation] = []
    scripted: set[Any] = set()
    groups: dict[Any, list[Any]] = {}
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or not isinstance(_value(node), Tensor | tuple | list):
            continue
        if not hasattr(node.target, "_schema"):
            continue
        facts = facts_of(node.target)
        original = node.meta.get("original_aten")
        is_cast = _is_cast(node)
        if _is_scripted(node, scripted, is_cast=is_cast):
            scripted.add(node)
        if is_cast or kind_of(facts) in MULTIPLYING:
            rounded = keeps_rounding or not is_cast or _is_rounded(node, kernels)
            operations.append(_operation([node], facts, device, scripted, is_cast=is_cast, rounded=rounded))
        elif not facts.view and hasattr(original, "_schema"):
            key = (_name_of(original), node.meta.get("seq_nr"), path_of(node), node.meta.get("stack_trace"))
            groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        facts = facts_of(nodes[0].meta["original_aten"])
        if facts.view or facts.cast or any(kind_of(facts_of(n.target)) in MULTIPLYING for n in nodes):
            continue
        operation = _operation(nodes, facts, device, scripted, is_cast=False, rounded=True)
        if operation.output:
            operations.append(operation)
    return _Graph(operations=tuple(operations), device=device, autocast=autocast)


def _is_scripted(node: Any, scripted: set[Any], *, is_cast: bool) -> bool:
    """Return whether a cast of the program narrowed a node's values; `scripted`: the nodes before it."""
    own = _dtype(node)
    if own is None or not narrower(dtype_name(own), "fp32") or kind_of(facts_of(node.target)) in MULTIPLYING:
        return False
    asked = is_cast and cause_of(node, place_of(node)) == "script"
    return asked or any(n in scripted for n in node.all_input_nodes)


def _operation(
    nodes: list[Any], facts: Facts, device: str, scripted: set[Any], *, is_cast: bool, rounded: bool
) -> _Operation:
    """Return the operation of some nodes: one, or a decomposition's original."""
    inside = set(nodes)
    inputs = [n for node in nodes for n in node.all_input_nodes if n not in inside]
    if len(nodes) == 1 and not is_cast:
        arguments = dict(zip(facts.names, nodes[0].args, strict=False)) | dict(nodes[0].kwargs)
        inputs = [n for n in factors_of_names(facts, arguments) or inputs if n in inputs]
    floating = [n for n in dict.fromkeys(inputs) if _dtype(n) is not None]
    last = next((n for n in reversed(nodes) if any(user not in inside for user in n.users)), nodes[-1])
    output = _dtype(last)
    operands = tuple(dtype_name(cast("torch.dtype", _dtype(n))) for n in floating)
    values = tuple(_narrowest(n) for n in floating)
    # A cast of integers has no floating operand: a compiled Llama casts its positions to FP32.
    if is_cast and not floating:
        operands = values = tuple(dtype_name(x.dtype) for n in inputs for x in tensors_in(_value(n)))
    accumulate = partial = None
    if floating and kind_of(facts) in MULTIPLYING:
        first, size = cast("torch.dtype", _dtype(floating[0])), _size(floating)
        arithmetic = product_arithmetic(facts.base, first, torch.device(device), size, Switches.now())
        accumulate, partial = arithmetic.accumulate, arithmetic.partial
        rounded_to = arithmetic.multiplied
        if rounded_to is not None:
            values = tuple(rounded_to if narrower(rounded_to, value) else value for value in values)
    elif floating:
        accumulate = sum_accumulator(facts.base, cast("torch.dtype", _dtype(floating[0])), torch.device(device))
    place = place_of(last)
    moved = sum(_bytes(n) for n in (*dict.fromkeys(inputs), last)) if not is_cast or rounded else 0
    return _Operation(
        facts=facts,
        operands=operands,
        values=values,
        output="" if output is None else dtype_name(output),
        accumulate=accumulate,
        partial=partial,
        path=path_of(last),
        place=place,
        cause=cause_of(last, place) if is_cast else None,
        scripted=any(n in scripted for n in inputs),
        rounded=rounded,
        bytes=moved,
    )


def _kernels(graph: Any) -> Iterator[set[Any]]:
    """Yield, for each kernel, the graph's operations that it computes."""
    for node in graph.scheduler.nodes:
        parts: list[Any] = [part for part in node.get_nodes() if part.node is not None]
        yield set[Any]().union(*(part.node.origins for part in parts))


# The dispatcher sees nothing of a fused kernel. Inductor's own graph has each operation with its dtypes, its module and
# its line; its scheduler knows which of them became one kernel. Within a kernel 16-bit values are computed in FP32, and
# a cast down that is cast up again rounds nothing, unless `torch._inductor.config.emulate_precision_casts` is set.
def _is_rounded(node: Any, kernels: Iterable[set[Any]]) -> bool:
    """Return whether a cast rounds: not if it is cast up again in the same kernel."""
    before, after = _dtype(next(iter(node.all_input_nodes), None)), _dtype(node)
    if before is None or after is None or not narrower(dtype_name(after), dtype_name(before)):
        return True
    up = [user for user in node.users if _is_widening(user, after)]
    return not any(node in kernel and user in kernel for kernel in kernels for user in up)


# torch 2.9 removes a cast down and up again in its first passes, whatever `emulate_precision_casts` says.
def _round_trips(graph: Any) -> list[tuple[Any, Any, _Operation]]:
    """Return a forward's casts down and up again: the cast down, what it casts, and its operation if it is removed."""
    trips: list[tuple[Any, Any, _Operation]] = []
    for node in filter(_is_cast, graph.nodes):
        after, source = _dtype(node), node.all_input_nodes[0]
        if after is None or _dtype(source) is None or cause_of(node, place_of(node)) == "backward":
            continue
        if any(_is_widening(user, after) for user in node.users):
            operation = _operation([node], facts_of(node.target), "cpu", set(), is_cast=True, rounded=False)
            trips.append((node, source, operation))
    return trips


def _is_widening(node: Any, before: torch.dtype) -> bool:
    """Return whether a node is a widening cast of the program itself."""
    after = _dtype(node)
    return _is_cast(node) and after is not None and narrower(dtype_name(before), dtype_name(after))


def _is_cast(node: Any) -> bool:
    """Return whether a node is a cast of the program itself."""
    asked = _name_of(node.meta.get("original_aten")) in ("aten._to_copy", "prims.convert_element_type")
    return asked and hasattr(node.target, "_schema") and facts_of(node.target).name in _CASTS


def _narrowest(node: Any) -> str:
    """Return the format of a node's values, through the casts that widened them."""
    own = dtype_name(cast("torch.dtype", _dtype(node)))
    while node.op == "call_function" and hasattr(node.target, "_schema") and node.all_input_nodes:
        facts = facts_of(node.target)
        if not (facts.name in _CASTS or facts.view):
            break
        node = node.all_input_nodes[0]
        before = _dtype(node)
        if before is None:
            break
        if narrower(dtype_name(before), own):
            own = dtype_name(before)
    return own


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _dtype(node: Any) -> torch.dtype | None:
    """Return the floating dtype of a node's (first) tensor."""
    if node is None:
        return None
    tensor = next((x for x in tensors_in(_value(node)) if x.is_floating_point()), None)
    return None if tensor is None else tensor.dtype


def _bytes(node: Any) -> int:
    return sum(_number(x.numel()) * x.element_size() for x in tensors_in(_value(node)))


def _size(nodes: list[Any]) -> int:
    a, b = (next(tensors_in(_value(n))) for n in (nodes[0], nodes[-1]))
    return _number(a.numel()) * (_number(b.shape[-1]) if b.dim() > 1 else 1)


def _number(size: Any) -> int:
    """Return a size as a number; of a symbol the value that it was compiled with."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if hint is not None else int(size) if isinstance(size, int) else 0


def _name_of(operation: Any) -> str:
    return facts_of(operation).name if hasattr(operation, "_schema") else ""
