"""`watch`, which starts a watch, and `Watch`, the handle on it."""

import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import nn

from plimsoll import kernels
from plimsoll.checks import initialized, integer, items
from plimsoll.errors import ArgumentError
from plimsoll.kernels.device_value import DeviceValue, number, resolved
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.runs import RunWriter, Scalars, as_sink
from plimsoll.runs.writing.writer import checked_step
from plimsoll.tensor_collections import OF_MODULES
from plimsoll.watch import lifecycle
from plimsoll.watch.companion import WatchAccess
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.lifecycle import Closing, finish
from plimsoll.watch.names import Selection, class_of, clean, module_names, unwrapped
from plimsoll.watch.parameters.optimizer_tensors import Parameters, innermost
from plimsoll.watch.ranks.collector import reducing_writer
from plimsoll.watch.ranks.ranks import Ranks
from plimsoll.watch.session import WatchSession
from plimsoll.watch.settings import COLLECTIONS, FACTS, Settings, checked
from plimsoll.watch.shadow import shadow_step
from plimsoll.watch.steps.flight_recorder import Recorder
from plimsoll.watch.steps.model_structure import Structure
from plimsoll.watch.steps.nonfinite_origin import Origin
from plimsoll.watch.steps.step_boundary import Steps
from plimsoll.watch.steps.wiring.listener import Wiring
from plimsoll.watch.taps.cast_counts import Casts
from plimsoll.watch.taps.compiled_taps import inlined_only
from plimsoll.watch.taps.module_taps import ModuleHook, Taps


def watch(
    model: nn.Module,
    optimizer: "torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None" = None,
    *,
    run: "str | os.PathLike[str]",
    every: int = 10,
    collect: "Iterable[str] | Mapping[str, int]" = COLLECTIONS,
    include: "Iterable[str | type[nn.Module]] | None" = None,
    exclude: "Iterable[str | type[nn.Module]] | None" = None,
    scaler: Any = None,
    sinks: Sequence[Any] = (),
    warmup: int = 0,
    shadow_every: int | None = None,
    recorder: Iterable[str] = FACTS,
    recorder_steps: int = 50,
    ranks: Literal["each", "reduce"] = "each",
    start_step: int | None = None,
    max_tensors: int = 100_000,
    max_bytes: int = 1 << 30,
    queue_bytes: int = 64 << 20,
    block: Literal[16, 32] | None = None,
    resume: bool | None = None,
    quiet: bool | None = None,
    settings: Mapping[str, object] | None = None,
) -> "Watch":
    """Record a model's numbers during training, every `every` steps, into `run`.

    The steps are those of the optimizer. `run` is a folder. The training loop stays unchanged. A step ends with the
    optimizer's step or the scaler's update. Steps that a scaler skips are recorded too. Watching never waits for a
    device, never stops training, and does not change results. Exception: code that is compiled in 16 bits or for a GPU
    may round and sum in another order around measured tensors.

    The model owns its watch: it works until `Watch.close`, the end of its ``with`` block, or the end of the model. In a
    forked child it does nothing. A child that is to be recorded calls `watch` itself.

    Args:
        model: The model, wrapped or not.
        optimizer: One optimizer or several. Default: those that have the model's parameters when they first step.
        run: Folder of the run.
        every: Number of optimizer steps from one sample to the next. Default: 10.
        collect: Collections to record, or a mapping of each to an interval of its own. Default: all.
        include: Globs over module and parameter names, or module types. A module stands for all its content.
            Default: everything.
        exclude: The same, to be left out. Default: nothing.
        scaler: Needed only if your scaler is not a `torch.amp.GradScaler`. Default: every GradScaler is found.
        sinks: Further destinations of the run, as in `plimsoll.runs`. Default: none.
        warmup: Number of first steps that are sampled whole. Default: 0.
        shadow_every: Number of steps from one repetition of a batch in FP32 to the next. The repetition tells
            underflow from structural zeros. Default: none.
        recorder: Facts and collections that are kept of each of the last `recorder_steps` steps, and written when
            something breaks. A collection in it is measured at every step. `Watch.recorder_bytes` is its memory.
        recorder_steps: Number of steps that the recorder keeps. Default: 50.
        ranks: With several processes, ``"each"`` writes its part, or rank 0 writes for all (``"reduce"``). Default:
            ``"each"``.
        start_step: Number of the first step. The step of a restored checkpoint replaces the records of the run from
            there on. Default: 0, or the step after the last of the run in the folder.
        max_tensors: Largest number of tensors in one sample. Default: 100,000.
        max_bytes: Largest size of one sample. Default: 1 GiB.
        queue_bytes: Largest size of the samples that wait to be written. Default: 64 MiB.
        block: Also measure weights, gradients, activations and their gradients in blocks of 32 values (MX formats) or
            16 (NVFP4) along the last axis. `whatif` and `plan` need it for block formats. Default: no blocks.
        resume: Whether a run in the folder is continued. False refuses any run in the folder. Default: continue it if
            it is the same training, which means the same model, and an optimizer whose restored state counts steps.
            Refuse other runs. In a notebook they are kept under a numbered name.
        quiet: Whether the watch ends without printing the verdict on the run. Default: False, or True if the
            environment has ``PLIMSOLL_QUIET=1``.
        settings: Hyperparameters and other facts to store with the run, by name, next to class, rates and other numbers
            of the given optimizers. The live page shows them as columns of its list. Default: nothing more.

    Returns:
        The handle on the watch.

    Raises:
        ArgumentError: The model or an argument cannot be used.
        RunError: The folder cannot be written.
    """
    options = checked(
        every=every, collect=collect, include=include, exclude=exclude, warmup=warmup, shadow_every=shadow_every,
        recorder=recorder, recorder_steps=recorder_steps, ranks=ranks, max_tensors=max_tensors, max_bytes=max_bytes,
        queue_bytes=queue_bytes, block=block,
    )  # fmt: skip
    if start_step is not None:
        start_step = checked_step("watch", "start_step", start_step)
    made_sinks = [as_sink(sink) for sink in items("watch", "sinks", sinks)]
    _check_model(model)
    optimizers = _optimizers(optimizer)
    place = Ranks()
    place.look(model)
    shadow_step.check(options)
    root = unwrapped(model)
    names = module_names(root)
    selection = Selection(options, names, [clean(name) for name, _ in root.named_parameters()])
    lifecycle.close_earlier(root, run, place.rank)
    start_step = lifecycle.start_of(run, place.rank, root, optimizers, resume, start_step)
    stored = {**_facts(optimizers), **options.stored(settings)}
    writer = _writer(run, options, stored, place, start_step, made_sinks)
    taken = {name: module for name, module in names.items() if selection.takes(name)}
    quiet = os.environ.get("PLIMSOLL_QUIET") == "1" if quiet is None else quiet
    try:
        session = WatchSession(root, next(iter(names)), options, writer, place)
        session.step = writer.next_step if start_step is None else start_step
        watched = Watch(session, root, taken, selection, optimizers, scaler, quiet=quiet)
    except BaseException:
        writer.close()  # or the next watch of this folder would find a writer in this process
        raise
    lifecycle.begins(root, Path(writer.path), place.rank, cast("Any", watched)._end)  # noqa: SLF001
    return watched


class Watch:
    """Handle on a running watch, created by `watch`.

    As a context manager it closes at the end of the block, and records an exception that leaves the block.
    """

    def __init__(
        self,
        session: WatchSession,
        root: nn.Module,
        modules: Mapping[str, nn.Module],
        selection: Selection,
        optimizers: Sequence[Any],
        scaler: Any,
        *,
        quiet: bool = False,
    ) -> None:
        self._session = session
        parameters, recorder = Parameters(session, selection), Recorder(session)
        for optimizer in optimizers:
            parameters.adopt(optimizer)
        self._steps = Steps(session, parameters, recorder, optimizers=bool(optimizers))
        self._steps.casts = Casts(session, selection.takes)
        self._recorder = recorder
        _forget_compiled(session)
        # The registry of finalizers keeps what the watch needs alive for as long as the model is, and no longer.
        self._closing = closing = Closing(session, self._steps, quiet=quiet)
        self._end = weakref.finalize(root, closing)
        try:
            self._begin(root, modules, selection, optimizers, scaler, closing)
        except BaseException:
            finish(self._end)  # an interrupt, or what cannot be watched: nothing stays
            raise

    def _begin(
        self,
        root: nn.Module,
        modules: Mapping[str, nn.Module],
        selection: Selection,
        optimizers: Sequence[Any],
        scaler: Any,
        closing: Closing,
    ) -> None:
        session, parameters = self._session, self._steps.parameters
        begins = _RootBegins(self._steps)
        closing.handles.append(root.register_forward_pre_hook(begins, with_kwargs=True, prepend=True))
        tapped: Mapping[str, nn.Module] = modules if _wants_activations(session.settings) else {}
        self._steps.taps = taps = Taps(
            session, self._steps.begin, self._steps.begin_transformed, tapped, parameters.narrowed
        )
        taps.follow(tapped)
        self._steps.structure = Structure(session, parameters, selection, taps, tapped=bool(tapped))
        closing.handles.append(root.register_forward_hook(_RootEnds(self._steps), always_call=True))
        shadow_step.attach(session, root, self._steps.begin)
        _describe(session, root)
        session.plan(session.step)
        taps.attach(session.due.forward)
        torch_hooks.subscribe(self._steps, scaler)
        self._steps.wiring = Wiring(session, optimizers)
        taps.rows = self._steps.wiring.rows
        torch_hooks.subscribe(self._steps.wiring)
        self._steps.origin = origin = Origin(session, parameters, self._steps, root)
        taps.graph_names = origin.names
        torch_hooks.subscribe(origin)

    @property
    def path(self) -> os.PathLike[str]:
        """The run's folder."""
        return self._session.writer.path

    @property
    def step_index(self) -> int:
        """Number of the current step."""
        return self._session.step

    @property
    def closed(self) -> bool:
        """True if the watch is closed."""
        return not self._session.open

    @property
    def recorder_bytes(self) -> int:
        """Memory of the flight recorder's samples now."""
        return self._recorder.size_bytes()

    @property
    def beside(self) -> WatchAccess:
        """The part of the watch that companions such as `Guard` may use."""
        return WatchAccess(self._session, self._steps)

    def log(self, named: Mapping[str, Any] | None = None, /, **scalars: Any) -> None:
        """Record scalars of the current step. Does not wait for a device.

        With `epoch`, logged once an epoch or more often, the live page draws all scalars over epochs too.

        Args:
            named: Scalars by name, for names that are no Python names: ``log({"val/loss": 0.5})``. Default: none.
            scalars: Python numbers, or one-element tensors on any device.

        Raises:
            ArgumentError: A value is no number, a name is given twice, or the watch is closed.
        """
        from_mapping = _named_scalars(named)
        if twice := sorted({name for name, _ in from_mapping} & set(scalars)):
            raise ArgumentError(
                f"Watch.log: expected each name once; got {', '.join(twice)} twice. Leave it out of one of the two."
            )
        values = {name: _loggable(name, value) for name, value in (*from_mapping, *scalars.items())}
        if not self._is_open("log"):
            return
        step, now = self._session.step, time.time()
        if any(isinstance(value, DeviceValue) for value in values.values()):
            self._session.writer.submit(
                lambda: [Scalars(step=step, values=_all_resolved(values), time=now)], 100 * len(values), numbers=True
            )
        else:
            self._session.writer.write(Scalars(step=step, values=_all_resolved(values)))

    def request(self, steps: int = 1) -> None:
        """Sample the next steps whole, whatever the schedule is.

        Args:
            steps: Number of steps, at least 1. Default: 1.

        Raises:
            ArgumentError: `steps` is below 1, or the watch is closed.
        """
        many = integer("Watch.request", "steps", steps, low=1, remedy="Give how many to sample.")
        if self._is_open("request"):
            self._steps.request(many)

    def step(self) -> None:
        """End the current step, for loops without an optimizer or scaler."""
        if self._is_open("step"):
            self._steps.end_by_hand()

    def flush(self, timeout: float | None = 60.0) -> bool:
        """Write all records up to the last finished step; return whether it was in time.

        Args:
            timeout: Limit in seconds. None: no limit. Default: 60.
        """
        if not self._is_open("flush"):
            return True
        self._steps.settle_if_ended()
        self._recorder.send_facts()
        return self._session.writer.flush(timeout)

    def close(self) -> None:
        """End the watch: remove hooks, write the rest, print the verdict to stderr.

        Closing twice does nothing. After an interrupt, closing again continues. A first SIGINT or SIGTERM waits until
        the run is written, 5 seconds at most, and then has its usual effect. A second one does not wait.
        """
        finish(self._end)
        self._closing.report()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not self.closed:
                self._recorder.fire("exception", torch_hooks.exception_text(kind, error))
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"at step {self._session.step}"
        return f"<Watch: {self._session.writer.path}, {state}>"

    def _is_open(self, operation: str) -> bool:
        """Return True if calls have an effect: not in a forked child."""
        if self.closed and not self._session.left:
            raise ArgumentError(
                f"Watch.{operation}: expected an open watch; got one of {self._session.writer.path} that is closed. "
                "Call plimsoll.watch again: it continues the run."
            )
        return not self._session.left


class _RootBegins(ModuleHook):
    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            taps = self.steps.taps
            late = taps is not None and not taps.attached
            self.steps.forward_begins(module)
            if is_transformed():
                return
            if late and taps is not None and taps.attached:  # torch has listed the root's hooks before it called this
                taps.begin_root(module, args, kwargs)
            if (origin := self.steps.origin) is not None and torch.is_grad_enabled():
                origin.forward_begins(args, kwargs)
            if (session := self.steps.session).shadow is not None and session.live:
                session.shadow.forward_begins(module, args, kwargs)


class _RootEnds(ModuleHook):
    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not is_transformed():
            self.steps.forward_ends()
            if (origin := self.steps.origin) is not None and torch.is_grad_enabled():
                origin.forward_ends(output)
            if (shadow := self.steps.session.shadow) is not None:
                shadow.forward_ends(output)


inlined_only(_RootBegins.__call__, _RootEnds.__call__)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"watch: expected a torch.nn.Module; got {type(model).__name__}. Give the model first.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError(
            "watch: expected a module whose submodules call their hooks; got a ScriptModule, which runs without them. "
            "Watch the module that was scripted, or compile it with torch.compile."
        )
    inner = unwrapped(model)
    if inner.__dict__.get("_compiled_call_impl") is not None and type(inner).__module__.startswith("torch.nn."):
        raise ArgumentError(
            f"watch: expected a model that can be compiled together with hooks; got a {type(inner).__name__} "
            "compiled with its method compile(), which torch cannot do for modules of its own. Use "
            "torch.compile(model), or put it into a module of yours."
        )
    if isinstance(model, nn.DataParallel):
        raise ArgumentError(
            "watch: expected a model that runs in this process alone; got torch.nn.DataParallel, whose replicas on "
            "other devices run without its hooks. Use DistributedDataParallel, one process a device."
        )
    initialized("watch", model)


def _optimizers(given: Any) -> list[Any]:
    if given is None:
        return []
    optimizers: list[Any] = []
    alone = hasattr(given, "param_groups") or not isinstance(given, Iterable)
    several: list[Any] = [given] if alone else list(cast("Iterable[Any]", given))
    for optimizer in several:
        inner = innermost(optimizer)  # accelerate, Lightning and master weights put something around it
        if not isinstance(inner, torch.optim.Optimizer):
            raise ArgumentError(
                f"watch: expected a torch.optim.Optimizer or a list of them; got {type(optimizer).__name__}. "
                "For anything else leave it out and call Watch.step() where a step ends."
            )
        optimizers.append(inner)
    return list(dict.fromkeys(optimizers))  # given with what is around it, an optimizer is one


def _facts(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, object]:
    """Return each optimizer's class and numbers, by "optimizer", "optimizer1", ..."""

    def is_number(value: object) -> bool:
        return isinstance(value, int | float | tuple) and not isinstance(value, bool)

    return {
        f"optimizer{place or ''}": {
            "name": type(optimizer).__name__,
            **{name: value for name, value in optimizer.param_groups[0].items() if is_number(value)},
        }
        for place, optimizer in enumerate(optimizers)
    }


def _wants_activations(settings: Settings) -> bool:
    wanted = {*settings.intervals, *settings.recorded}
    return bool(wanted.intersection(OF_MODULES))


def _writer(
    run: "str | os.PathLike[str]",
    settings: Settings,
    stored: Mapping[str, object],
    place: Ranks,
    start_step: int | None,
    sinks: Sequence[Any],
) -> RunWriter:
    make = RunWriter if settings.ranks == "each" or place.world == 1 else reducing_writer
    return make(
        run,
        settings=stored,
        rank=place.rank,
        world_size=place.world,
        resume_from=start_step,
        queue_bytes=settings.queue_bytes,
        sinks=sinks if place.rank == 0 else [],  # one rank alone feeds them
    )


def _forget_compiled(session: WatchSession) -> None:
    """Have torch.compile compile again: code compiled before has no taps."""
    if torch_hooks.has_compiled():
        torch.compiler.reset()
        session.say("recompiled", "what was compiled before the watch began is compiled again, with its taps")


def _describe(session: WatchSession, root: nn.Module) -> None:
    """Writes what there is to know about the watch into the run's manifest."""
    tied: dict[int, list[str]] = {}
    for name, p in root.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(clean(name))
    kind = class_of(root)
    backends = {status.name: status.detail for status in kernels.report()}
    session.writer.write_manifest(
        model=f"{kind.__module__}.{kind.__qualname__}",
        root=session.name,
        parameters=sum(p.numel() for p in root.parameters()),
        fingerprint=lifecycle.fingerprint(root),
        tied={names[0]: names[1:] for names in tied.values() if len(names) > 1},
        backends=backends,
        ranks=session.ranks.as_json(),
        lost_after=None,  # a rank that was lost in a session before is back
    )


def _named_scalars(named: object) -> list[tuple[str, Any]]:
    """Return the items of a mapping of scalars by name."""
    if named is None:
        return []
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in cast("Mapping[Any, Any]", named)):
        raise ArgumentError(
            f"Watch.log: expected a mapping of names to numbers; got {named!r}. Write log(loss=0.5) or "
            'log({"val/loss": 0.5}).'
        )
    return list(cast("Mapping[str, Any]", named).items())


def _loggable(name: str, value: Any) -> "float | DeviceValue":
    try:
        return number(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"Watch.log: expected numbers, or tensors of one value; got {name}={value!r}. Reduce it first ({error})."
        ) from error


def _all_resolved(values: "Mapping[str, float | DeviceValue]") -> dict[str, float]:
    return {name: cast("float", resolved(value)) for name, value in values.items()}
