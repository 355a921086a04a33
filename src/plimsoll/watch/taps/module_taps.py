"""Taps on modules: activations in the forward, their gradients in the backward.

A tap is two hooks on a module, one before its forward (inputs, which the module may change in place) and one after it.
Only steps that are due have them: torch calls a module without hooks by a shorter way. Compiled code keeps its taps and
asks one flag, since hooks that come and go would have it compiled again. Eager code on a CPU measures at once, in the
hook: the values are in the cache then, and nothing has to be kept alive. On a GPU tensors wait (`tap_queue`). One that
two taps see (one module's output, the next one's input) is recognised by identity and version, and measured once.
"""

import contextlib
import functools
import itertools
import math
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll import row_layout
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.watch.hooks import autograd_graph, torch_hooks
from plimsoll.watch.names import tensors_among, tensors_in
from plimsoll.watch.sample import Rows, Sample
from plimsoll.watch.session import WatchSession, contained, contained_reader
from plimsoll.watch.taps.compiled_taps import CompiledTaps, inlined_only, is_capturing
from plimsoll.watch.thread_casts import as_written

_PLAIN = (Tensor, nn.Parameter)


class _Sight:
    """A tensor seen in this forward, with the rows for its values and its gradient."""

    __slots__ = ("folds", "gradients", "ref", "row", "rows", "version")

    def __init__(self, x: Tensor, version: int) -> None:
        self.ref, self.version = weakref.ref(x), version
        self.rows: Rows | None = None
        self.row = self.folds = -1
        self.gradients: list[str] | None = None


class NamesInGraphs(Protocol):
    """Names of modules' inputs and outputs in autograd graphs, which taps add to."""

    def add_inputs(self, module: str, inputs: list[tuple[str, Tensor]]) -> None:
        """A module is called."""
        ...

    def add_outputs(self, module: str, outputs: list[tuple[str, Tensor]]) -> None:
        """A module has returned."""
        ...


class RowsOfBatches(Protocol):
    """Rows of what a module that no other one has called takes and gives, in a sampled step."""

    def begins(self, inputs: list[tuple[str, Tensor]]) -> None:
        """It is called."""
        ...

    def ends(self, name: str, outputs: list[tuple[str, Tensor]]) -> None:
        """It has returned."""
        ...


class Taps:
    """All taps of one watch."""

    def __init__(
        self,
        session: WatchSession,
        begin: Callable[[], None],
        begin_transformed: Callable[[], None],
        modules: Mapping[str, nn.Module],
        narrowed: dict[str, torch.dtype],
    ) -> None:
        self.session, self._begin, self._narrowed = session, begin, narrowed
        self._begin_transformed = begin_transformed
        self.compiled = CompiledTaps(session, _devices(modules), len(modules))
        self.attached = True
        self.graph_names: NamesInGraphs | None = None
        self.rows: RowsOfBatches | None = None
        self.saw_eval_forward = False
        self.takes_eval_forward = False
        self._sights: dict[int, _Sight] = {}
        self._hooked: Counter[str] = Counter()  # gradients to come, by name, of this step's forwards
        self._without_graph: Counter[str] = Counter()  # and tensors that a recomputation may give a graph
        self._leaf_handles: list[Any] = []
        self._handles: dict[str, tuple[weakref.ref[nn.Module], list[tuple[Any, _Tap]]]] = {}  # by module
        self._earlier: dict[int, list[int]] = {}  # of a tap that is not attached: the hooks in front of it
        self._inside: defaultdict[int, list[str]] = defaultdict(list)  # modules whose forward runs, by thread
        if modules:
            listen_to_attention(self)

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Taps these modules: those that it has tapped already, and new ones; no others."""
        for name, (ref, handles) in list(self._handles.items()):
            if ref() is None or ref() is not modules.get(name):
                for handle, _ in handles:
                    handle.remove()
                del self._handles[name]
        for name, module in modules.items():
            if name not in self._handles:
                handles: list[tuple[Any, _Tap]] = []
                self._handles[name] = weakref.ref(module), handles  # first: an interrupt may come between the two
                before, after = _Before(self, name), _After(self, name)
                handles.append((module.register_forward_pre_hook(before, with_kwargs=True), before))
                handles.append((module.register_forward_hook(after), after))
        self._put(self.attached)

    def attach(self, due: bool) -> None:
        """Attach the taps, or remove those that are not due; compiled code keeps its own."""
        if due is not self.attached and (due or not self.compiled.in_use):
            self.attached = due
            self._put(due)

    def _put(self, attached: bool) -> None:
        # The handles stay valid: torch removes by number what is there. Registering again takes ten times as long.
        for _, handles in self._handles.values():
            for handle, tap in handles:
                hooks = handle.hooks_dict_ref()
                if hooks is None:  # the module is gone
                    continue
                if attached:
                    hooks[handle.id] = tap
                    if len(hooks) > 1:
                        self._put_back(hooks, handle.id)
                elif handle.id in hooks:
                    self._earlier[handle.id] = list(itertools.takewhile(lambda key, own=handle.id: key != own, hooks))
                    del hooks[handle.id]

    def _put_back(self, hooks: Any, own: int) -> None:
        """Move a tap from the end to its place: behind the hooks that it came after."""
        # A hook that was registered later, and changes the output, must not change what is recorded of the module.
        keys = [key for key in hooks if key != own and key not in torch_hooks.in_front]
        earlier = set(self._earlier.pop(own, keys))
        start = max((place + 1 for place, key in enumerate(keys) if key in earlier), default=0)
        for key in keys[start:]:
            hooks.move_to_end(key)

    def begin_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the root's first tap, which was attached when its forward had begun."""
        if self.session.name in self._handles:
            for _, tap in self._handles[self.session.name][1]:
                if isinstance(tap, _Before):
                    tap(module, args, kwargs)

    def detach(self) -> None:
        """Removes every hook."""
        end_listening(self)
        self.follow({})
        self.forget()

    def come_last(self) -> None:
        """Move the taps behind later hooks, such as those that make DTensors and undo it."""
        for handle in (handle for _, handles in self._handles.values() for handle, _ in handles):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks.move_to_end(handle.id)

    def forget(self) -> None:
        """Forget what this step has seen. Its backward is over."""
        self._sights.clear()
        self._hooked.clear()
        self._without_graph.clear()
        self._inside.clear()
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    @property
    def inside(self) -> list[str]:
        """The modules whose forward runs on this thread, innermost last."""
        return self._inside[threading.get_ident()]

    @contained_reader("activations", "activation_gradients")
    def see(self, tap: "_Tap", found: list[tuple[str, Tensor]]) -> None:
        """Records the tensors that a module takes or gives."""
        session = self.session
        if is_transformed():
            self._pass()
            return
        if WatchSession.repeating:
            if session.shadow is not None:
                session.shadow.meet(tap.name, tap.role, found)
            return
        if session.muted or self._is_evaluated_elsewhere():
            return
        recomputing = autograd_graph.backward_running() != -1
        if recomputing:
            self._begin()  # a checkpoint whose first forward was under no_grad: nothing else has begun the step
        elif not session.live:
            if not self._is_training_forward():
                return
            self._begin()  # the root's own hook has not opened the step: a part of the model is called by itself
        if session.due.forward:
            for path, x in found:
                self._see_one(tap.prefix + path, x, recomputing)

    def _compares_rows(self) -> bool:
        """Return whether this is a forward of a sampled step, and no recomputation, trial or evaluation."""
        session = self.session
        if not session.due.activations or session.muted or WatchSession.repeating or not torch.is_grad_enabled():
            return False
        if is_transformed() or is_capturing() or autograd_graph.backward_running() != -1:
            return False
        return session.live or self._is_training_forward()

    def _is_evaluated_elsewhere(self) -> bool:
        """Return True in an evaluation on a thread of its own, in the middle of another's training forward."""
        session = self.session
        return session.live and not torch.is_grad_enabled() and session.live_thread != threading.get_ident()

    def _pass(self) -> None:
        """A module is called inside a `torch.func` transform: its tensors have no values that could be read."""
        session = self.session
        if not (WatchSession.repeating or session.muted) and (session.live or self._is_training_forward()):
            self._begin_transformed()

    @contained
    def attends(self, query: Tensor, key: Tensor, rest: dict[str, Any]) -> None:
        """Records the largest scores of an attention within the module that runs."""
        session = self.session
        if (
            WatchSession.repeating
            or session.muted
            or not session.due.activations
            or not self.inside
            or not session.live
        ):
            return
        if autograd_graph.backward_running() != -1 or not all(type(x) in _PLAIN for x in (query, key)):
            return
        if is_transformed():
            return
        scores = largest_scores(query, key, rest)
        if scores is not None and session.has_room():
            name, masked = f"{self.inside[-1]}:{SCORES}", not scores.is_cpu and rest.get("attn_mask") is not None
            rows, row = session.measure(scores, "activations", "" if masked else name)
            if masked:
                leave_out_masked(rows.row(row))
            rows.enter(row, session.series_of("activations", name, scores))

    @contained
    def module_begins(self, tap: "_Tap", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        tensors = tensors_among(args, kwargs)
        self.see(tap, tensors)
        if not tensors and args:
            tap.say_complex(args[0])
        if self.graph_names is not None and not is_transformed():
            self.graph_names.add_inputs(tap.name, tensors)
        if self.rows is not None and not self.inside and self._compares_rows():
            self.rows.begins(tensors)

    @contained
    def module_ends(self, tap: "_Tap", module: nn.Module, output: Any) -> None:
        """A module has returned."""
        tensors = tensors_in(output)
        self.see(tap, tensors)
        if not tensors:
            tap.say_complex(output)
        if self.graph_names is not None and not is_transformed():
            self.graph_names.add_outputs(tap.name, tensors)
        if self.rows is not None and not self.inside and self._compares_rows():
            self.rows.ends(tap.name, tensors)
        if tensors and tensors[0][1].dtype in SIXTEEN_BIT:
            self.narrow(tap.name, module, tensors[0][1].dtype)

    @contained
    def narrow(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        """Note that the module's output is in 16 bits: gradients of its FP32 parameters come through that dtype."""
        for key, p in module.named_parameters(recurse=False):
            full = key if name == self.session.name else f"{name}.{key}"
            if p.dtype == torch.float32 and self._narrowed.get(full) is not dtype:
                self._narrowed[full] = dtype

    def _is_training_forward(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        model = self.session.model()
        if model is None or model.training or self.takes_eval_forward:
            return True
        self.saw_eval_forward = True
        return False

    # Forwards that run inside a backward are recomputations of activation checkpointing: their activations were counted
    # the first time. Their gradients are read all the same, since under re-entrant checkpointing only the second
    # forward has any.
    def _see_one(self, name: str, x: Tensor, recomputing: bool) -> None:
        session = self.session
        if x.is_cuda and is_capturing():
            self.compiled.capture(name, x)
            return
        version = 0 if x.is_inference() else x._version  # noqa: SLF001  (public in all but name)
        sight = self._sights.get(id(x))
        if sight is None or sight.ref() is not x or sight.version != version:
            sight = self._sights[id(x)] = _Sight(x, version)
        if session.due.activations and not recomputing:
            self._record(sight, name, x)
        if session.due.activation_gradients and self._brings_gradient(name, x, recomputing):
            if sight.gradients is None:
                self._hook(sight, name, x)
            else:
                sight.gradients.append(name)
        if session.shadow is not None:
            session.shadow.see(name, x, recomputing)

    # Where checkpointing is not re-entrant, the graph of the first forward goes on and its hooks are called. Where it
    # is, the recomputation's own tensors have the gradients, but for the checkpoint's inputs, which have them already.
    def _brings_gradient(self, name: str, x: Tensor, recomputing: bool) -> bool:
        """Count a tensor; return True if its gradient is to be recorded under this name."""
        if not recomputing:
            counts = self._hooked if x.requires_grad else self._without_graph
            counts[name] += 1
            return x.requires_grad
        if not x.requires_grad or (self._hooked[name] and not self._without_graph[name]):
            return False
        self._without_graph[name] -= 1
        return True

    def _record(self, sight: _Sight, name: str, x: Tensor) -> None:
        session = self.session
        if session.ranks.mesh is not None:
            x = autograd_graph.dtensor_behind(x)
        rows = sight.rows
        if rows is None or sight.folds != rows.folds:  # else its row was added to that of other names
            plain = session.readable(x, "activations", name)
            if plain is None or not session.has_room():
                return
            rows, sight.row = session.measure(plain, "activations", name)
            sight.rows, sight.folds = rows, rows.folds
        rows.enter(sight.row, session.series_of("activations", name, x))

    def _hook(self, sight: _Sight, name: str, x: Tensor) -> None:
        sight.gradients = [name]
        sample = self.session.sample
        assert sample is not None
        factor = torch_hooks.factor_of(x) if torch_hooks.gradient_factor_providers else 1.0
        take = functools.partial(self.gradient, sample, sight.gradients, factor)
        handle: Any = cast("Any", x).register_hook(
            take if self.session.ranks.mesh is None else autograd_graph.gradient_reader(x, take)
        )
        if x.is_leaf:  # a leaf outlives the step, and would keep the hook
            self._leaf_handles.append(handle)

    @contained_reader("activation_gradients")
    def gradient(self, sample: Sample, names: list[str], factor: float, g: Tensor | None) -> None:
        """Records an activation gradient under all the names of its tensor."""
        session = self.session
        if session.sample is not sample or not session.due.activation_gradients:
            return  # a graph that was kept beyond its step
        if g is None:
            return  # nothing used the tensor, one of several results of its operation
        plain = session.readable(g, "activation_gradients", names[0])
        if plain is None or not session.has_room():
            return
        if not session.ranks.alone:
            factor *= session.ranks.factor
            if session.ranks.divisor > 1:
                plain = plain / session.ranks.divisor
        rows, row = session.measure(plain, "activation_gradients", names[0])
        for name in names:
            rows.enter(row, session.series_of("activation_gradients", name, g), scaled=True, factor=factor)


# Hooks stay out of checkpoints: when a watched module is pickled or deep-copied, the copy holds a do-nothing callable
# of the standard library in a hook's place.
class ModuleHook:
    """A hook on a module, which copies and pickles of the module do not have."""

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing, returns None

    def __deepcopy__(self, memo: object) -> object:
        return contextlib.nullcontext().__exit__


class _Tap(ModuleHook):
    """One of a module's two taps."""

    role = ""

    def __init__(self, taps: Taps, name: str) -> None:
        self.taps, self.due, self.name = taps, taps.session.due, name
        self.prefix = f"{name}:{self.role}"

    def say_complex(self, x: object) -> None:
        """Record once that a complex tensor is left out."""
        session = self.taps.session
        if isinstance(x, Tensor) and x.is_complex() and session.live and session.due.activations and not session.muted:
            session.readable(x, "activations", self.prefix)  # which records what it cannot read


class _Before(_Tap):
    role = "input"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.due.forward:
            return None
        if torch.compiler.is_compiling():
            return self.taps.compiled.inputs(self.name, args, kwargs)
        self.taps.module_begins(self, args, kwargs)  # first: it may begin a step, which forgets the modules inside
        self.taps.inside.append(self.name)
        return None


class _After(_Tap):
    role = "output"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.due.forward:
            return None
        if torch.compiler.is_compiling():
            return self.taps.compiled.outputs(self.name, output)
        inside = self.taps.inside
        if self.name in inside:  # above it are modules that have raised, and whose error was caught
            while inside.pop() != self.name:
                pass
        self.taps.module_ends(self, module, output)
        return None


inlined_only(_Before.__call__, _After.__call__)


def _devices(modules: Mapping[str, nn.Module]) -> set[torch.device]:
    """The devices that the modules' tensors are on, and the CPU."""
    devices = {p.device for module in modules.values() for p in module.parameters(recurse=False)} | {
        torch.device("cpu")
    }
    return {device for device in devices if device.type != "meta"}


# -- the largest attention score of each head, where fused attention hides its scores ----------------------------------

# Every call of `scaled_dot_product_attention` in an eager forward is seen. Where activations are due, the scores of a
# few rows are computed once more from queries and keys: Q K^T by the call's scale, masked as it is. What is recorded is
# the largest score of each head and sample, as activations of the module that calls, under "MODULE:scores". The
# attention itself stays the kernel that it is. Calls in compiled code are not seen.

SCORES = "scores"  # of a module, as "input" and "output" are
_ROWS = 32  # queries of each head and sample that are looked at, evenly spread


class Listener(Protocol):
    """Taps of attention; none of a step in which they are not `attached`."""

    attached: bool

    def attends(self, query: Tensor, key: Tensor, rest: dict[str, Any]) -> None:
        """Attention is about to be computed."""
        ...


_listeners: "tuple[weakref.ref[Listener], ...]" = ()  # replaced as a whole: attention on other threads reads it
_installed: Any = None  # our function: the one that notifies, of several that others have wrapped in between
_lock = threading.Lock()
_NAMES = ("value", "attn_mask", "dropout_p", "is_causal")


def listen_to_attention(listener: Listener) -> None:
    """Call a listener at every attention from now on."""
    global _listeners, _installed  # noqa: PLW0603  (torch's function is one for all)
    with _lock:
        _listeners = (*_others(listener), weakref.ref(listener))
        if functional.scaled_dot_product_attention is not _installed:
            _installed = functional.scaled_dot_product_attention = _observed(functional.scaled_dot_product_attention)


def end_listening(listener: Listener) -> None:
    """Remove a listener; with the last one torch is restored, unless wrapped since."""
    global _listeners, _installed  # noqa: PLW0603  (likewise)
    with _lock:
        _listeners = _others(listener)
        if _listeners:
            return
        if functional.scaled_dot_product_attention is _installed:
            functional.scaled_dot_product_attention = _installed.plimsoll_original
        _installed = None


def _others(listener: Listener) -> "tuple[weakref.ref[Listener], ...]":
    return tuple(ref for ref in _listeners if ref() not in (None, listener))


def _observed(original: Callable[..., Tensor]) -> Any:
    @functools.wraps(original)
    def scaled_dot_product_attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling() and scaled_dot_product_attention is _installed:
            # Most steps are not due, and a step may call attention a hundred times.
            for listener in [each for ref in _listeners if (each := ref()) is not None and each.attached]:
                listener.attends(query, key, {**dict(zip(_NAMES, args, strict=False)), **kwargs})
        return original(query, key, *args, **kwargs)

    scaled_dot_product_attention.plimsoll_original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


@torch.no_grad()
def largest_scores(query: Tensor, key: Tensor, rest: dict[str, Any]) -> Tensor | None:
    """Return the largest score by head and sample, in float32; None without scores.

    On a CPU heads that a mask hides whole are left out; elsewhere they have -Inf.

    Args:
        query: (..., L, E).
        key: (..., S, E); fewer heads than the query's with `enable_gqa`.
        rest: The call's other arguments by name: attn_mask, is_causal, scale, enable_gqa.
    """
    rows = query.shape[-2]
    if not rows or not key.shape[-2] or not query.numel():
        return None
    chosen = torch.linspace(0, rows - 1, min(_ROWS, rows), device=query.device).round().long()
    q, k = query.detach()[..., chosen, :].float(), key.detach().float()
    if rest.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scale = rest.get("scale")
    with as_written(q.device.type):
        scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        largest = _masked(scores, chosen, rest, rows).amax((-2, -1)).reshape(-1)
        # On a GPU it would wait for their number. NaN stays: it is what is looked for.
        return largest[largest != -math.inf] if largest.is_cpu else largest


def leave_out_masked(row: Tensor) -> None:
    """Take -Inf out of a row of largest scores: those of heads that a mask hides whole."""
    row[row_layout.COUNT] -= row[row_layout.NEG_INFS]
    row[row_layout.NEG_INFS] = 0
    row[row_layout.NARROW :] = 0  # the others' neighbours are not next to them in memory


def _masked(scores: Tensor, chosen: Tensor, rest: dict[str, Any], rows: int) -> Tensor:
    mask = rest.get("attn_mask")
    if rest.get("is_causal"):
        return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) > chosen[:, None], -math.inf)
    if not isinstance(mask, Tensor):
        return scores
    mask = mask.detach()[..., chosen, :] if mask.shape[-2] == rows else mask.detach()
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
