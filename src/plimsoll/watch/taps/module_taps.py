"""Taps on modules: activations when a module is called, activation gradients when the backward comes to them.

A tap is two hooks on a module, one before its forward (inputs, which the module may change in place) and one after it.
When nothing is due a hook asks one flag and returns. Eager code measures at once, in the hook: the values are in the
cache then, and nothing has to be kept alive. A tensor that two taps see (one module's output, the next one's input) is
recognised by identity and version, and measured once.

Forwards that run inside a backward are recomputations of activation checkpointing: their activations were counted the
first time. Their gradients are read all the same, since under re-entrant checkpointing only the second forward has any.

Hooks stay out of checkpoints: when a watched module is pickled or deep-copied, the copy holds a do-nothing callable of
the standard library in a hook's place.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.watch.hooks import dtensors, torch_hooks
from plimsoll.watch.names import tensors_among, tensors_in
from plimsoll.watch.sample import Rows, Sample
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.taps import attention_scores
from plimsoll.watch.taps.compiled_taps import CompiledTaps, inlined_only, is_capturing

# Which backward runs on this thread, -1 for none: torch tells it nowhere else.
_backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001
_PLAIN = (Tensor, nn.Parameter)


class _Sight:
    """A tensor that was seen in this forward: where its values and its gradient are recorded."""

    __slots__ = ("folds", "gradients", "ref", "row", "rows", "version")

    def __init__(self, x: Tensor, version: int) -> None:
        self.ref, self.version = weakref.ref(x), version
        self.rows: Rows | None = None
        self.row = self.folds = -1
        self.gradients: list[str] | None = None


class Taps:
    """All taps of one watch."""

    def __init__(
        self,
        core: WatchSession,
        begin: Callable[[], None],
        modules: Mapping[str, nn.Module],
        narrowed: dict[str, torch.dtype],
    ) -> None:
        self.core, self._begin, self._narrowed = core, begin, narrowed
        self.compiled = CompiledTaps(core, _devices(modules), len(modules))
        self.trace: Callable[[str, Any], None] = _pass_by
        self.saw_eval_forward = False
        self.takes_eval_forward = False
        self._sights: dict[int, _Sight] = {}
        self._leaf_handles: list[Any] = []
        self._handles: dict[str, tuple[weakref.ref[nn.Module], list[Any]]] = {}  # by module
        self.inside: list[str] = []  # modules whose forward runs, innermost last
        if modules:
            attention_scores.listen(self)

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Taps these modules: those that it has tapped already, and new ones; no others."""
        for name, (ref, handles) in list(self._handles.items()):
            if ref() is None or ref() is not modules.get(name):
                for handle in handles:
                    handle.remove()
                del self._handles[name]
        for name, module in modules.items():
            if name not in self._handles:
                handles: list[Any] = []
                self._handles[name] = weakref.ref(module), handles  # first: an interrupt may come between the two
                handles.append(module.register_forward_pre_hook(_Before(self, name), with_kwargs=True))
                handles.append(module.register_forward_hook(_After(self, name), with_kwargs=True))

    def detach(self) -> None:
        """Removes every hook."""
        attention_scores.end(self)
        self.follow({})
        self.forget()

    def come_last(self) -> None:
        """Move the taps behind later hooks, such as those that make a module's tensors DTensors and plain again."""
        for handle in (handle for _, handles in self._handles.values() for handle in handles):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hooks.move_to_end(handle.id)

    def forget(self) -> None:
        """The forward is over: what was seen in it is not the next one's."""
        self._sights.clear()
        self.inside.clear()
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    @contained
    def see(self, tap: "_Tap", found: list[tuple[str, Tensor]]) -> None:
        """Records the tensors that a module takes or gives."""
        core = self.core
        if WatchSession.repeating:
            if core.shadow is not None:
                core.shadow.meet(tap.name, tap.role, found)
            return
        recomputing = _backward_running() != -1
        if core.muted:
            return
        if recomputing:
            self._begin()  # of a checkpoint whose first forward was under no_grad nobody else has told
        else:
            if not self._is_training_forward():
                return
            if not core.live:  # the root's own hook has not opened the step: a part of the model is called by itself
                self._begin()
        if not core.due.forward:
            return
        for path, x in found:
            self._see_one(tap.prefix + path, x, recomputing)

    @contained
    def attends(self, query: Tensor, key: Tensor, rest: dict[str, Any]) -> None:
        """Records the largest scores of an attention within the module that runs."""
        core = self.core
        if WatchSession.repeating or core.muted or not core.due.activations or not self.inside or not core.live:
            return
        if _backward_running() != -1 or not all(type(x) in _PLAIN for x in (query, key)):
            return
        scores = attention_scores.largest_scores(query, key, rest)
        if scores is not None and core.has_room():
            rows, row = core.measure(scores)
            rows.enter(row, core.series_of("activations", f"{self.inside[-1]}:{attention_scores.SIDE}", scores))

    @contained
    def narrow(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        """Notes that autocast ran the module in 16 bits: its parameters' gradients come through that dtype."""
        for key, p in module.named_parameters(recurse=False):
            if p.dtype == torch.float32:
                self._narrowed[key if name == self.core.name else f"{name}.{key}"] = dtype

    def _is_training_forward(self) -> bool:
        if self.core.live:
            return True
        if not torch.is_grad_enabled():
            return False
        model = self.core.model()
        if model is None or model.training or self.takes_eval_forward:
            return True
        self.saw_eval_forward = True
        return False

    def _see_one(self, name: str, x: Tensor, recomputing: bool) -> None:
        core = self.core
        if x.is_cuda and is_capturing():
            self.compiled.capture(name, x)
            return
        version = 0 if x.is_inference() else x._version  # noqa: SLF001  (public in all but name)
        sight = self._sights.get(id(x))
        if sight is None or sight.ref() is not x or sight.version != version:
            sight = _Sight(x, version)
            self._sights[id(x)] = sight
        if core.due.activations and not recomputing:
            self._record(sight, name, x)
        if core.due.activation_gradients and x.requires_grad:
            self._hook(sight, name, x)
        if core.shadow is not None:
            core.shadow.see(name, x, recomputing)

    def _record(self, sight: _Sight, name: str, x: Tensor) -> None:
        core = self.core
        if core.ranks.mesh is not None:
            x = dtensors.behind(x)
        if sight.rows is None or sight.folds != sight.rows.folds:  # else its row was added to that of other names
            plain = core.readable(x, "activations", name)
            if plain is None or not core.has_room():
                return
            sight.rows, sight.row = core.measure(plain)
            sight.folds = sight.rows.folds
        sight.rows.enter(sight.row, core.series_of("activations", name, x))

    def _hook(self, sight: _Sight, name: str, x: Tensor) -> None:
        if sight.gradients is not None:
            sight.gradients.append(name)
            return
        sight.gradients = [name]
        sample = self.core.sample
        assert sample is not None
        factor = torch_hooks.factor_of(x) if torch_hooks.gradient_factor_providers else 1.0
        take = functools.partial(self.gradient, sample, sight.gradients, factor)
        handle: Any = cast("Any", x).register_hook(take if self.core.ranks.mesh is None else dtensors.reading(x, take))
        if x.is_leaf:  # a leaf outlives the step, and would keep the hook
            self._leaf_handles.append(handle)

    @contained
    def gradient(self, sample: Sample, names: list[str], factor: float, g: Tensor) -> None:
        """Records an activation gradient under all the names of its tensor."""
        core = self.core
        if core.sample is not sample or not core.due.activation_gradients:
            return  # a graph that was kept beyond its step
        plain = core.readable(g, "activation_gradients", names[0])
        if plain is None or not core.has_room():
            return
        if not core.ranks.alone:
            factor *= core.ranks.factor
            if core.ranks.divisor > 1:
                plain = plain / core.ranks.divisor
        rows, row = core.measure(plain)
        for name in names:
            rows.enter(row, core.series_of("activation_gradients", name, g), scaled=True, factor=factor)


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
        self.taps, self.due, self.name = taps, taps.core.due, name
        self.prefix = f"{name}:{self.role}"


class _Before(_Tap):
    role = "input"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.due.forward:
            return None
        if torch.compiler.is_compiling():
            return self.taps.compiled.inputs(self.name, args, kwargs)
        self.taps.inside.append(self.name)
        self.taps.see(self, tensors_among(args, kwargs))
        return None


class _After(_Tap):
    role = "output"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.due.forward:
            if self.due.traced and not torch.compiler.is_compiling():
                self.taps.trace(self.name, output)
            return None
        if torch.compiler.is_compiling():
            return self.taps.compiled.outputs(self.name, output)
        found = tensors_in(output)
        if self.taps.inside and self.taps.inside[-1] == self.name:
            self.taps.inside.pop()
        self.taps.see(self, found)
        if found and (dtype := found[0][1].dtype) in SIXTEEN_BIT:
            self.taps.narrow(self.name, module, dtype)
        return None


inlined_only(_Before.__call__, _After.__call__)


def _pass_by(name: str, output: Any) -> None:
    """Ignore an output: the default of a tap without a trace."""


def _devices(modules: Mapping[str, nn.Module]) -> set[torch.device]:
    """The devices that the modules' tensors are on, and the CPU."""
    found = {p.device for module in modules.values() for p in module.parameters(recurse=False)} | {torch.device("cpu")}
    return {device for device in found if device.type != "meta"}
