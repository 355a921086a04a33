"""Recorder of a step: a dispatch mode that notes what operations computed in.

It computes nothing and changes nothing. Operations are seen below autograd and autocast, so that the casts of autocast
are operations like others. Wrappers of tensors (DTensor, quantized weights) are let through, and what they do inside is
recorded. Code of torch.compile is compiled as ever; `compiled_code` adds its operations.
"""

import contextlib
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.emulate import recipe
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.formats import Format
from plimsoll.receipts.recording.operations import (
    MULTIPLYING,
    Cause,
    Entries,
    Entry,
    Kind,
    Phase,
    Switches,
    factors,
    kind_of,
    product_arithmetic,
    sum_accumulator,
)
from plimsoll.receipts.recording.values import Held, Memory, dtype_name, holds, is_code, narrower, size_bytes, spec_name
from plimsoll.tracing.operation_schema import Facts, bound, facts_of
from plimsoll.tracing.state_snapshot import Before
from plimsoll.tracing.tensors import tensors_in
from plimsoll.watch.call_site import ForwardIndex, Place, cause_of, innermost, look, path_of, place_of

_C = cast("Any", torch)._C  # noqa: SLF001
_CAST_CALLS = frozenset(
    ("to", "float", "half", "bfloat16", "double", "type", "type_as", "copy_", "_to_copy", "convert_element_type")
)
_OURS = (str(Path(__file__).parents[2]) + os.sep,)
_EMULATE, _FP8 = (f"{_OURS[0]}{package}{os.sep}" for package in ("emulate", "fp8"))
_LISTS, _RECIPE, _OPERATIONS = f"{_EMULATE}casting.py", f"{_EMULATE}recipe.py", f"{_EMULATE}operations{os.sep}"
_OBSERVERS = (__file__,)
_GATHERING = frozenset(("embedding", "index_select", "gather", "index"))  # they read only what they return
_OPERATOR = cast("Any", torch)._ops.OpOverload  # noqa: SLF001
_SILENT = frozenset(("detach", "lift_fresh", "alias", "wait_tensor", "_wrap_tensor_autograd", "barrier"))
_PLAIN = ("torch._subclasses.functional_tensor",)


class Forward(NamedTuple):
    """A forward operation, remembered for its backward."""

    place: Place
    emulated: bool = False
    internal: bool = False  # a cast that an emulation makes around an operation of its own
    callee: str = ""  # the function of torch that was called


class Observation:
    """An operation's inputs and, after it has run, its results."""

    def __init__(self, recorder: "Recorder", facts: Facts, given: Mapping[str, Any]) -> None:
        self._recorder, self._facts, self._given = recorder, facts, given
        self._kind: Kind = kind_of(facts)
        self._backward = _C._current_graph_task_id() != -1  # noqa: SLF001
        self._node: Any = _C._current_autograd_node() if self._backward else None  # noqa: SLF001
        self._forward = recorder.forwards.of(self._node) if self._backward else None
        self._place = look(backward=self._backward)
        if self._place.root is not None:
            recorder.roots.setdefault(id(self._place.root), self._place.root)
        self._inputs = list(tensors_in(dict(given)))
        self._held = {id(x): recorder.memory.of(x) for x in self._inputs}
        self._values = {id(x): self._values_of(x) for x in self._inputs}
        self._scripted = any(held is not None and held.scripted for held in self._held.values())
        self._caller = innermost(_OBSERVERS) if self._kind == "cast" else innermost(_OURS)
        self._emulated = self._is_emulated()
        self._internal = self._is_internal()
        self._differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in self._inputs)
        for x in self._inputs:
            if self._is_written(x):
                recorder.about_to_write(x)
        if not self._backward:
            number = _C._autograd._get_sequence_nr() - 1  # noqa: SLF001  (of the node that was just made for it)
            made = Forward(self._place, self._emulated, self._internal, self._caller.callee)
            recorder.forwards.note(made, number)

    def end(self, result: Any) -> None:
        """Record the operation with its result."""
        outputs = self._outputs(result)
        if self._facts.view and any(x is y for x in outputs for y in self._inputs):
            return  # `to` the dtype that a tensor has
        floating = [x for x in outputs if x.is_floating_point() or x.is_complex()]
        entry = None
        if floating and not self._recorder.muted:
            new_entry = self._found(floating)
            entry = (
                self._recorder.entries.add(new_entry, bytes=self._bytes(outputs)) if not self._internal else new_entry
            )
        self._note_results(floating, entry)

    def end_sum(self, accumulator: str) -> None:
        """Record it as a product that an emulation has added up in a format of its own."""
        operands = list(self._inputs)
        entry = self._entry(operands, dtype_name(operands[0].dtype))
        entry.accumulate, entry.where = accumulator, "emulated"
        if self._recorder.recording and self._recorder.muted == 0:
            self._recorder.entries.add(entry)

    # -- before --------------------------------------------------------------------------------------------------------

    def _values_of(self, x: Tensor) -> str:
        """Return the format of a tensor's values, which may be narrower than its dtype."""
        known, own = self._held[id(x)], dtype_name(x.dtype)
        return own if known is None or not holds(own, known.values) else known.values

    def _is_emulated(self) -> bool:
        if self._backward:
            return self._forward is not None and self._forward.emulated
        frame = thread_frame.current()
        if frame is None or not frame.rules or self._caller.file == _LISTS:  # lists only cast
            return False
        return thread_frame.local.bypassed

    def _is_internal(self) -> bool:
        """Return True for a cast that an emulation makes around its own operation: it is none of the step's."""
        if self._kind != "cast":
            return False
        if self._backward and self._forward is not None and self._forward.internal:
            return True
        return self._caller.file.startswith((_OPERATIONS, _FP8)) and self._facts.name.startswith("aten.")

    # -- the entry -----------------------------------------------------------------------------------------------------

    def _found(self, outputs: list[Tensor]) -> Entry:
        if self._kind == "cast":
            return self._cast(outputs)
        operands = factors(self._facts, self._given)
        entry = self._entry(operands, dtype_name(outputs[0].dtype))
        entry.mixed = len({x.dtype for x in operands if x.dim() and x.is_floating_point()}) > 1
        if self._kind in MULTIPLYING and operands:
            self._multiply(entry, operands)
        elif self._kind in ("reduction", "embedding", "exact") and operands:
            entry.accumulate = sum_accumulator(self._facts.base, operands[0].dtype, operands[0].device)
        elif self._kind == "collective" and "reduce" in self._facts.base:
            entry.accumulate = entry.output  # each hop rounds to the tensor's dtype
            entry.of_parameters = self._reduces_parameters()
        return entry

    def _multiply(self, entry: Entry, operands: list[Tensor]) -> None:
        """Note in which formats a product is multiplied and added up."""
        a, b = operands[0], operands[-1]
        size = a.numel() * (b.shape[-1] if b.dim() > 1 else 1)
        fast = bool(self._given.get("use_fast_accum", False))
        arithmetic = product_arithmetic(self._facts.base, a.dtype, a.device, size, Switches.now(), fast=fast)
        entry.accumulate, entry.partial = arithmetic.accumulate, arithmetic.partial
        rounded = arithmetic.multiplied
        if rounded is not None:
            entry.values = tuple(rounded if narrower(rounded, value) else value for value in entry.values)
        if any(is_code(value) and x.element_size() > 1 for value, x in zip(entry.values, operands, strict=True)):
            entry.where = "emulated"

    def _cast(self, outputs: list[Tensor]) -> Entry:
        source = self._source(outputs)
        before, after = dtype_name(source.dtype), self._rounds_to() or dtype_name(outputs[0].dtype)
        if self._internal:
            known = self._held.get(id(source))
            made = None if known is None else known.producer
            if made is not None and made.where == "emulated":
                if narrower(after, before):
                    made.output = after
                return made
        if before == after:
            self._kind = "exact"
        entry = self._entry([source], after)
        if self._kind == "cast":
            entry.cause = self._cause(after, source.device.type)
            entry.weight = entry.cause == "autocast" and source.is_leaf and source.requires_grad
            entry.where = "emulated" if entry.cause == "emulation" else "eager"
            known = self._held.get(id(source))
            made = None if known is None else known.producer
            entry.after_cast = made is not None and made.kind == "cast" and made.cause == "script"
        return entry

    def _source(self, outputs: list[Tensor]) -> Tensor:
        source = self._given.get("src", self._given.get("self", self._given.get("x")))
        tensor = next(tensors_in(source), None)
        return outputs[0] if tensor is None else tensor

    def _rounds_to(self) -> str | None:
        """Return the format that a Plimsoll cast rounds to; None for a cast to a dtype."""
        if not self._facts.name.startswith("plimsoll."):
            return None
        spec, dtype = self._given.get("spec"), self._given.get("dtype")
        if spec is not None:
            return spec_name(list(spec))
        return dtype_name(dtype) if isinstance(dtype, torch.dtype) else None

    def _cause(self, after: str, device: str) -> Cause:
        caller, node = self._caller, self._place.node
        if node is not None and "original_aten" in node.meta:
            return cause_of(node, place_of(node))
        if caller.file == _LISTS:
            return "autocast"
        if self._emulated or caller.file == _RECIPE:
            return "emulation"
        if self._node is not None and "ToCopyBackward" in self._node.name():
            return "backward"
        if caller.owner == "plimsoll":
            return "level"
        if caller.callee in _CAST_CALLS:
            return "script" if caller.owner == "user" else "torch"
        listed = after == "fp32" or after == dtype_name(torch.get_autocast_dtype(device))
        return "autocast" if listed and self._is_autocasting() else "operation"

    def _is_autocasting(self) -> bool:
        """Return True if torch's autocast is active, or was around recomputed code."""
        return thread_frame.nesting() > 0 and (not self._backward or self._place.recomputing)

    def _entry(self, operands: list[Tensor], output: str) -> Entry:
        place, path = self._attributed(), None
        if place.node is not None:
            traced, path = place_of(place.node), path_of(place.node)
            place.file, place.line, place.function = traced.file, traced.line, traced.function
        first = next(iter((*operands, *self._inputs)), None)
        made = self._forward
        callee = self._caller.callee if not self._backward else "" if made is None else made.callee
        return Entry(
            kind=self._kind,
            operation=self._facts.name,
            base=self._facts.base,
            phase=self._phase(),
            place=place,
            module=place.module,
            path=path,
            part_of=callee,
            operands=tuple(dtype_name(x.dtype) for x in operands),
            values=tuple(self._values[id(x)] for x in operands),
            output=output,
            where="emulated" if self._emulated else "eager",
            node=None if self._node is None else self._node.name(),
            autocast=self._is_autocasting(),
            scripted=self._scripted,
            device="cpu" if first is None else first.device.type,
        )

    def _attributed(self) -> Place:
        """Return the call site; in a backward usually that of the forward operation."""
        place = self._place
        if self._backward and self._forward is not None:
            there = self._forward.place
            if place.file is None:
                place.file, place.line, place.function = there.file, there.line, there.function
            if place.module is None and not place.recomputing:
                place.module, place.root = there.module, there.root
            if place.node is None:
                place.node = there.node
        return place

    def _phase(self) -> Phase:
        recorder = self._recorder
        if self._backward:
            return "recomputation" if self._place.recomputing else "backward"
        inside = self._place.module is not None
        if recorder.stepping and not self._differentiates and not (inside and torch.is_grad_enabled()):
            return "optimizer"  # and no forward that a closure of the optimizer runs
        if inside or self._differentiates:
            recorder.after_backward = False
        return "optimizer" if recorder.after_backward else "forward"

    def _reduces_parameters(self) -> bool:
        """Return whether a collective sums gradients of parameters, not of activations."""
        if self._place.sharding or (self._node is not None and "AccumulateGrad" in self._node.name()):
            return True
        return (self._backward and self._node is None) or self._recorder.after_backward

    # -- results -------------------------------------------------------------------------------------------------------

    def _outputs(self, result: Any) -> list[Tensor]:
        tensors = {id(x): x for x in tensors_in(result)}
        for name in self._facts.written:
            tensors |= {id(x): x for x in tensors_in(self._given.get(name))}
        if self._facts.collective:  # its schema does not say what it writes
            tensors |= {id(x): x for x in self._inputs}
        return list(tensors.values())

    def _bytes(self, outputs: list[Tensor]) -> int:
        written = sum(map(size_bytes, outputs))
        if self._facts.base in _GATHERING:
            return 2 * written
        ignored = {id(x) for name in self._facts.discarded for x in tensors_in(self._given.get(name))}
        read = sum(size_bytes(x) for x in self._inputs if id(x) not in ignored)
        return 0 if self._facts.uninitialised else read + written

    def _note_results(self, outputs: list[Tensor], entry: Entry | None) -> None:
        """Note which values the results have, and what has made them."""
        source = {self._values[id(x)] for x in self._inputs if x.is_floating_point() and not self._is_written(x)}
        for x in outputs:
            known = self._recorder.memory.of(x, "other")
            if known is None:
                continue
            own = dtype_name(x.dtype)
            low = narrower(own, "fp32")
            known.producer, known.values, known.cast_of = entry, own, None
            known.scripted = low and self._scripted and self._kind not in MULTIPLYING
            if self._kind == "cast" and entry is not None:
                rounded, before = self._rounds_to() or own, self._values[id(self._source(outputs))]
                known.values = rounded if narrower(rounded, before) else before
                known.scripted = low and (entry.cause == "script" or self._scripted)
                self._note_weight(known, outputs, entry)
            elif self._kind == "exact" and len(source) == 1 and holds(own, next(iter(source))):
                known.values = next(iter(source))
        if entry is not None and not self._backward and self._kind != "cast":
            self._count_uses(entry)

    def _is_written(self, x: Tensor) -> bool:
        return any(x is y for name in self._facts.written for y in tensors_in(self._given.get(name)))

    def _note_weight(self, held: Held, outputs: list[Tensor], entry: Entry) -> None:
        """Note memory that holds a weight's cast by autocast, kept for the next use."""
        if entry.weight:
            held.cast_of, held.uses = self._recorder.memory.key(self._source(outputs)), 0

    def _count_uses(self, entry: Entry) -> None:
        for weight in {id(h): h for h in self._held.values() if h is not None and h.cast_of is not None}.values():
            weight.uses += 1
            if weight.uses > 1:
                entry.cache_hits += 1


def _uncompiled(method: Any) -> Any:
    """Return a mode's method that is never compiled, as torch itself has it from 2.10 on."""
    own = hasattr(TorchDispatchMode, "_should_skip_dynamo")
    return method if own else cast("Any", torch)._disable_dynamo(method)  # noqa: SLF001


class Recorder(TorchDispatchMode):
    """Records the operations inside its context while `recording` is set."""

    supports_higher_order_operators = True

    def __init__(self, before: Before | None = None) -> None:
        super().__init__()
        self._before = before
        self.entries, self.memory = Entries(), Memory()
        self.forwards: ForwardIndex[Forward] = ForwardIndex()
        self.roots: dict[int, Any] = {}  # the outermost modules that ran
        self.recording = True
        self.muted = 0  # parts of an operation that is recorded as a whole
        self.stepping = 0  # optimizers that are in their step
        self.after_backward = False
        self.inside_compiled = 0
        self.fake = False  # the step itself runs on fake tensors
        self._process = os.getpid()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is compiled and run as without the mode."""
        return True

    def __enter__(self) -> "Recorder":
        recipe.around_sums.append(self._around_sum)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        recipe.around_sums.remove(self._around_sum)

    def restart(self) -> None:
        """Forget the operations so far, but not the facts on memory and autograd."""
        self.entries.clear()
        self.memory.restart()

    def about_to_write(self, x: Tensor) -> None:
        """Keep memory from before the step that an operation is about to change."""
        known = self.memory.of(x)
        if self._before is not None and (known is None or known.role != "other"):
            self._before.about_to_write(x)

    @_uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_elsewhere() or not isinstance(func, _OPERATOR):  # operators of higher order have no schema
            return func(*args, **kwargs)
        if FakeTensor in types:
            if not self.fake:  # DTensor asks for the shape of a result
                return func(*args, **kwargs)
            types = ()
        if any(map(_wraps, types)):
            return NotImplemented
        facts = facts_of(func)
        view = facts.view and not facts.cast  # `to` gives its argument, or a copy in another dtype
        if view or facts.base in _SILENT or facts.name.startswith(("profiler.", "prim.")):
            return func(*args, **kwargs)
        with _C.DisableTorchFunction():
            observation = Observation(self, facts, bound(facts, args, kwargs))
        result = func(*args, **kwargs)
        with _C.DisableTorchFunction():
            observation.end(result)
        return result

    def _is_elsewhere(self) -> bool:
        """Return True if the call belongs to a compiler, to compiled code or to another process."""
        if not self.recording or self.inside_compiled or self._process != os.getpid():
            return True
        return cast("Any", torch)._guards.TracingContext.try_get() is not None  # noqa: SLF001

    @contextlib.contextmanager
    def _around_sum(self, accumulator: Format, a: Tensor, b: Tensor) -> Generator[None]:
        """Record an emulated product with an accumulator of its own as one product."""
        facts = facts_of(torch.ops.aten.mm.default)
        whole = None if self._is_elsewhere() else Observation(self, facts, {"self": a, "mat2": b})
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1
        if whole is not None:
            whole.end_sum(accumulator.name)


def _wraps(kind: type) -> bool:
    """Return whether tensors of a class wrap others and handle operations themselves."""
    return kind not in (Tensor, torch.nn.Parameter) and not kind.__module__.startswith(_PLAIN)
