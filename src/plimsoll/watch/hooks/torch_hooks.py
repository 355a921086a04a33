"""Hooks and patches of torch that report a training's events, and their removal.

Attention is patched in `taps.module_taps`, and a shadow step patches what it repeats. These are installed with the
first listener and removed with the last:

- global optimizer hooks (public in torch): an optimizer steps;
- `torch.autograd.backward`, through which every ``loss.backward()`` goes: the loss, and that a backward begins;
- `scale`, `step` and `update` of `torch.amp.GradScaler`, of the classes given to `add_scaler_class`, and of the class
  of any other scaler that a watch was given;
- the norm of gradients that `torch.nn.utils.clip_grad_norm_` takes;
- `step` of `torch.optim.lr_scheduler.ReduceLROnPlateau`: the metric, and whether a rate was lowered;
- construction of any other `torch.optim.lr_scheduler.LRScheduler`;
- `replay` of `torch.cuda.CUDAGraph`: what was captured with taps in it runs again;
- `skip_nnmodule_hook_guards` of torch's compiler is off: with it, a model with taps would run a graph that was
  compiled for another of its class without;
- `scale_grads` of a pipeline's stages, once torch.distributed.pipelining is imported: its number of micro-batches;
- `sys.excepthook` and SIGTERM's handler: the flight recorder is written before the process ends. Both go on to what was
  there before.
"""

import contextlib
import functools
import importlib
import math
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from types import FrameType, TracebackType
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.runs.writing import signal_deferral

_SIGNAL_SECONDS = 5.0  # what the recorder may take of a dying process's time

# Numbers of hooks that were put in front of those of a watch, and stay there when the watch attaches its own again.
in_front: set[int] = set()


class TrainingEvents:
    """Base class of listeners to a training's events. No method may raise."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""

    def norm_taken(self, norm: Any, tensors: int) -> None:
        """The norm of so many gradients was taken, to clip them."""

    def graph_replays(self) -> None:
        """A CUDA graph, which may hold whole steps, is about to run again."""

    def backward_ends(self) -> None:
        """A backward has returned. One that raises an error sends nothing."""

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""

    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned; it may have skipped the optimizer's."""

    def scaler_update_begins(self, scaler: Any) -> None:
        """A scaler is about to change its scale."""

    def scaler_update_ends(self, scaler: Any) -> None:
        """A scaler has changed its scale."""

    def plateau_steps(self, scheduler: Any, metric: Any, lowered: bool) -> None:
        """A `ReduceLROnPlateau` has taken a metric, and may have lowered a rate."""

    def schedule_made(self, scheduler: Any) -> None:
        """A schedule of learning rates was made, and has set the first rates."""

    def gradients_divided(self, stage: Any, microbatches: int) -> None:
        """A pipeline's stage has divided its gradients by the number of microbatches."""

    def trial(self, stage: Any, begins: bool) -> None:
        """Note that a pipeline's stage begins or ends a trial of its shapes: no step."""

    def process_ends(self, reason: str, message: str, seconds: float) -> None:
        """The process ends by an exception or a signal; there are so many seconds left."""


# Callbacks that return an extra factor of a tensor's gradient, beside the loss scale. Higher packages add theirs.
gradient_factor_providers: list[Callable[[Any], float]] = []

# Callbacks that return the formats to which this thread's operations round their results, by collection.
emulated: list[Callable[[], Mapping[str, str]]] = []

# Callbacks that return the dtype to which this thread casts the operands of products, None where it does not.
casting: list[Callable[[], torch.dtype | None]] = []

_listeners: list["weakref.ref[TrainingEvents]"] = []
_set_aside: list["weakref.ref[TrainingEvents]"] = []  # those that are not notified, see `exclusive`
_undo: list[Callable[[], None]] = []
_patched: dict[type, list[Callable[[], None]]] = {}
_scaler_classes: list[type] = [torch.amp.GradScaler]
_lock = threading.RLock()


class _Given(threading.local):
    seeds: Any = None


_given = _Given()


def seeds() -> list[Any]:
    """Return the gradients given to the backward that begins on this thread.

    There is one for each of its tensors, and none at all if torch makes them.
    """
    current = _given.seeds
    listed: list[Any] = [] if current is None else [current] if isinstance(current, torch.Tensor) else list(current)
    return listed if any(seed is not None for seed in listed) else []


def factor_of(x: Any) -> float:
    """Return the factor of a tensor's gradient beyond the loss scale."""
    factor = 1.0
    for carried in gradient_factor_providers:
        factor *= carried(x)
    return factor


def listeners() -> list[TrainingEvents]:
    """Return the active listeners."""
    return [listener for listener in (ref() for ref in _listeners) if listener is not None]


def subscribe(listener: TrainingEvents, scaler: object = None) -> None:
    """Notify the listener of all events from now on."""
    with _lock:
        # The listener first: with none listed, a dead listener that is collected meanwhile would undo all patches.
        _listeners.append(weakref.ref(listener, _gone))
        if not _undo:
            _install()
        if scaler is not None:
            _patch_scaler(type(scaler))
        look_for_pipelines()


def unsubscribe(listener: TrainingEvents) -> None:
    """Stop notifying a listener. Without listeners torch is restored."""
    with _lock:
        _listeners[:] = [ref for ref in _listeners if ref() is not None and ref() is not listener]
        if not _listeners:
            _uninstall()


@contextlib.contextmanager
def exclusive(listener: TrainingEvents) -> Generator[None]:
    """Context in which the listeners that were there before are not notified, for a trial of the training."""
    global _set_aside  # noqa: PLW0603  (the list of listeners is one for all)
    with _lock:
        before, _set_aside = _set_aside, [*_set_aside, *_listeners]
    subscribe(listener)
    try:
        yield
    finally:
        with _lock:
            _set_aside = before
        unsubscribe(listener)


def _gone(_: object) -> None:
    with _lock:
        _listeners[:] = [ref for ref in _listeners if ref() is not None]
        if not _listeners:
            _uninstall()


def _install() -> None:
    _undo.append(register_optimizer_step_pre_hook(_optimizer_begins).remove)
    _undo.append(register_optimizer_step_post_hook(_optimizer_ends).remove)
    _patch_backward()
    _patch_norm()
    _wrap(ReduceLROnPlateau, "step", _taking_metric(ReduceLROnPlateau.step), _undo)
    _wrap(LRScheduler, "__init__", _being_made(LRScheduler.__init__), _undo)
    _patch_excepthook()
    _patch_compiler()
    if torch.cuda.is_available():
        _wrap(torch.cuda.CUDAGraph, "replay", _replaying(torch.cuda.CUDAGraph.replay), _undo)
    if threading.current_thread() is threading.main_thread():
        _patch_signal(signal.SIGTERM)
    for kind in _scaler_classes:
        _patch_scaler(kind)


# A child that trained its parent's watched model measured it with threads of torch's that no child has, and hung.
def _after_fork() -> None:
    """In a child torch is as it was: watches are their process's alone."""
    global _lock  # noqa: PLW0603  (one that another thread held at the fork is held for ever)
    _lock = threading.RLock()
    _listeners.clear()
    _uninstall()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _uninstall() -> None:
    # All are called before they are forgotten: each can be called again, after an interruption.
    for undo in reversed([*_undo, *(undo_of_owner for of_owner in _patched.values() for undo_of_owner in of_owner)]):
        undo()
    _undo.clear()
    _patched.clear()


def _optimizer_begins(optimizer: Any, *_: Any) -> None:
    _notify("optimizer_begins", optimizer)


def _optimizer_ends(optimizer: Any, *_: Any) -> None:
    _notify("optimizer_ends", optimizer)


def _notify(event: str, *facts: object) -> None:
    if is_transformed():  # what runs there is a function's own, and its tensors have no data
        return
    for ref in tuple(_listeners):
        listener = ref()
        if listener is not None and not any(ref is other for other in _set_aside):
            getattr(listener, event)(*facts)


def _patch_backward() -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        _given.seeds = args[0] if args else kwargs.get("grad_tensors")
        try:
            _notify("backward_begins", tensors)
        finally:
            _given.seeds = None
        original(tensors, *args, **kwargs)
        _notify("backward_ends")

    _put(torch.autograd, "backward", backward, original, _undo)


def _patch_norm() -> None:
    # The function inside `clip_grad_norm_`, since scripts import that one by name. torch has it from 2.6 on.
    owner = sys.modules.get("torch.nn.utils.clip_grad")
    original: Any = getattr(owner, "_get_total_norm", None)
    if original is None:
        return

    @functools.wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(tensors, *args, **kwargs)
        _notify("norm_taken", norm, len(cast("list[object]", tensors)) if isinstance(tensors, list | tuple) else 1)
        return norm

    _put(owner, "_get_total_norm", get_total_norm, original, _undo)


def _taking_metric(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _rates_of(self)
        result = original(self, *args, **kwargs)
        lowered = any(now < was for was, now in zip(before, _rates_of(self), strict=False))
        _notify("plateau_steps", self, args[0] if args else kwargs.get("metrics"), lowered)
        return result

    return step


def _being_made(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  (the name of what it wraps)
        original(self, *args, **kwargs)
        _notify("schedule_made", self)

    return __init__


def _rates_of(scheduler: Any) -> list[float]:
    """Return the rates of the schedule's optimizer, NaN for those on another device, which would be waited for."""
    groups: list[dict[str, Any]] = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    rates: list[Any] = [group.get("lr") for group in groups]
    return [float(rate) if _is_near(rate) else math.nan for rate in rates]


def _is_near(rate: Any) -> bool:
    is_number = isinstance(rate, torch.Tensor) and rate.device.type == "cpu" and rate.numel() == 1
    return is_number or isinstance(rate, int | float)


def _patch_compiler() -> None:
    config: Any = importlib.import_module("torch._dynamo.config")
    before = getattr(config, "skip_nnmodule_hook_guards", None)
    if before is not None:
        _undo.append(lambda: setattr(config, "skip_nnmodule_hook_guards", before))
        config.skip_nnmodule_hook_guards = False


def _replaying(original: Any) -> Any:
    @functools.wraps(original)
    def replay(self: Any) -> None:
        _notify("graph_replays")
        return original(self)

    return replay


def _patch_scaler(kind: type) -> None:
    """Wrap the methods of a scaler's class and of its bases."""
    for owner in kind.__mro__:
        if owner in _patched or owner is object:
            continue
        undo = _patched[owner] = []
        for name, wrapper in (("scale", _scaling), ("step", _stepping), ("update", _updating)):
            if name in owner.__dict__:
                _wrap(owner, name, wrapper(owner.__dict__[name]), undo)


def add_scaler_class(kind: type) -> None:
    """Report the calls of a class of loss scalers; a package above adds its own."""
    with _lock:
        _scaler_classes.append(kind)
        if _undo:  # a watch is active already
            _patch_scaler(kind)


def look_for_pipelines() -> None:
    """Wrap the trial runs and the division of gradients of pipelines, if any."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    trials = ("_prepare_forward_infra", "_prepare_backward_infra")
    for kind, wrappers in (
        ("_PipelineStageBase", {"scale_grads": _dividing}),
        ("PipelineStage", dict.fromkeys(trials, _trying)),
        ("_PipelineStage", dict.fromkeys(trials, _trying)),
    ):
        owner = getattr(pipelining, kind, None)
        if owner is not None and owner not in _patched:
            undo = _patched[owner] = []
            for name, wrapper in wrappers.items():
                if name in owner.__dict__:
                    _wrap(owner, name, wrapper(owner.__dict__[name]), undo)


def _dividing(original: Any) -> Any:
    """Once a step, when the backwards of all micro-batches are done."""

    @functools.wraps(original)
    def scale_grads(self: Any, grad_scale_factor: int) -> Any:
        _notify("gradients_divided", self, grad_scale_factor)
        return original(self, grad_scale_factor)

    return scale_grads


def _trying(original: Any) -> Any:
    """A stage runs forward and backward once on made-up values, to learn the shapes."""

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        _notify("trial", self, True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _notify("trial", self, False)

    return prepare


def _wrap(owner: Any, name: str, wrapper: Any, undo: list[Callable[[], None]]) -> None:
    _put(owner, name, wrapper, owner.__dict__[name], undo)


def _put(owner: Any, name: str, ours: object, original: object, undo: list[Callable[[], None]]) -> None:
    """Replace an attribute, with the undo kept first in case of an interruption."""
    undo.append(lambda: _restore(owner, name, ours, original))
    setattr(owner, name, ours)


def _acts(scaler: Any) -> bool:
    """Return True if the scaler scales.

    One with `enabled=False` only passes on, and its scale of 1 says nothing of the step.
    """
    enabled = getattr(scaler, "is_enabled", None)
    return not callable(enabled) or bool(enabled())


class _Calls(threading.local):
    """Methods of scalers that run on this thread."""

    def __init__(self) -> None:
        self.running: set[tuple[int, str]] = set()


_calls = _Calls()


# A class whose method calls that of its base is wrapped as both, and one call is one event.
@contextlib.contextmanager
def _outermost(scaler: Any, method: str) -> Generator[bool]:
    """Context of a scaler's call: True if it is to be reported."""
    key = id(scaler), method
    if key in _calls.running or not _acts(scaler):
        yield False
        return
    _calls.running.add(key)
    try:
        yield True
    finally:
        _calls.running.discard(key)


def _scaling(original: Any) -> Any:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with _outermost(self, "scale") as reported:
            scaled = original(self, outputs, *args, **kwargs)
        if reported:
            _notify("loss_scaled", self, outputs, scaled)
        return scaled

    return scale


def _stepping(original: Any) -> Any:
    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with _outermost(self, "step") as reported:
            result = original(self, optimizer, *args, **kwargs)
        if reported:
            _notify("scaler_step_ends", self, optimizer)
        return result

    return step


def _updating(original: Any) -> Any:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _outermost(self, "update") as reported:
            if reported:
                _notify("scaler_update_begins", self)
            result = original(self, *args, **kwargs)
        if reported:
            _notify("scaler_update_ends", self)
        return result

    return update


def _patch_excepthook() -> None:
    original = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            _notify("process_ends", "exception", exception_text(kind, error), _SIGNAL_SECONDS)
        finally:
            original(kind, error, trace)

    _put(sys, "excepthook", excepthook, original, _undo)


def exception_text(kind: type[BaseException], error: BaseException | None) -> str:
    """Return an exception's kind and text, whatever its own text does."""
    try:
        return f"{kind.__name__}: {error}"
    except Exception as another:  # noqa: BLE001  (a text that cannot be made must not hide the exception)
        return f"{kind.__name__}: its text cannot be shown ({type(another).__name__})"


def _patch_signal(number: signal.Signals) -> None:
    previous, process, received_before = signal.getsignal(number), os.getpid(), False
    if previous is signal.SIG_IGN or previous is None:
        return

    def handle(received: int, frame: FrameType | None) -> None:
        nonlocal received_before
        # The second one does not wait. A forked child has no run; most of them are workers that are being ended.
        waits, received_before = not received_before and os.getpid() == process, True
        try:
            if waits:
                _notify_of_signal(signal.Signals(received).name)
        finally:
            if callable(previous):
                received_before = False  # the script goes on, if its own handler wants that
                previous(received, frame)
            else:
                signal.signal(received, signal.SIG_DFL)
                os.kill(os.getpid(), received)

    _undo.append(lambda: signal_deferral.restore(number, handle, previous))
    signal.signal(number, handle)


def _notify_of_signal(name: str) -> None:
    """Notify of a signal on another thread, since this one may hold the log's lock.

    It is given a few seconds.
    """
    work = threading.Thread(target=_notify, args=("process_ends", "signal", name, _SIGNAL_SECONDS), daemon=True)
    try:
        work.start()
    except RuntimeError:  # the interpreter is ending, which closes the run
        return
    work.join(_SIGNAL_SECONDS)


def replaced(owner: Any, name: str, ours: object) -> Callable[[], None]:
    """Replace an attribute that a class or module itself has; return the undo function."""
    original = owner.__dict__[name]
    setattr(owner, name, ours)
    return lambda: _restore(owner, name, ours, original)


def _restore(owner: Any, name: str, ours: object, original: object) -> None:
    """Put the original back, unless ours was wrapped since: then ours stays, idle."""
    if owner.__dict__.get(name) is ours:
        setattr(owner, name, original)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def has_compiled() -> bool:
    """Return True if torch.compile has compiled something in this process, or torch does not show it any more."""
    module = sys.modules.get("torch._dynamo.convert_frame")  # importing it takes seconds
    return module is not None and bool(getattr(module, "FRAME_COUNTER", 1))


def has_compiler() -> bool:
    """Return True if torch.compile was called in this process: it has compiled something, or soon will."""
    return "torch._inductor.compiler_bisector" in sys.modules or has_compiled()


# -- `torch.func` transforms -------------------------------------------------------------------------------------------

# Inside `vmap`, `grad`, `vjp`, `jvp` and what is made of them every tensor is a wrapper of the transform, without data
# of its own, and so is every new one, also one that no code of the transform ever sees. Such a tensor is of no use once
# the transform has returned: a bank of rows that was made there spoiled the whole sample.


# torch has it in no public place; all versions from 2.9 on have it here.
@contextlib.contextmanager
def outside_transforms() -> Generator[None]:
    """Context in which operations run as if no transform was around them."""
    inner: Any = importlib.import_module("torch._functorch.pyfunctorch")
    with inner.temporarily_clear_interpreter_stack():
        yield
