"""Search for a script's model at its first training step, to watch it from there.

Optimizers are noted as they are made. While one of them has parameters that nothing watches, `torch.nn.Module.__call__`
is replaced: the outermost call of a module that has them, with gradients enabled, finds the model, and the watch is set
up before that call goes on, so that it is recorded too. (A global forward hook would come too late for it: torch has
collected a call's hooks by then. And torch.compile warns of global hooks.) Then `__call__` is torch's own again.
"""

import functools
import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer

from plimsoll.checks import lazy_names
from plimsoll.runs.storage import location
from plimsoll.watch import lifecycle
from plimsoll.watch.handle import watch
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import backward_running, leaves_of
from plimsoll.watch.names import class_of, unwrapped
from plimsoll.watch.parameters.optimizer_tensors import innermost, parameters_of
from plimsoll.watch.parameters.updates import Probe
from plimsoll.watch.ranks.ranks import Ranks
from plimsoll.watch.session import WatchSession
from plimsoll.watch.steps.step_boundary import Steps

_PATIENCE_STEPS = 2  # steps of an optimizer after which a model that is never called is looked for
_PATIENCE_BACKWARDS = 32  # that move no weights, after which a script is taken to train nothing
_Need = tuple[Optimizer, set[int]]  # an optimizer, and by id those of its parameters that nothing watches


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model that is watched from now on."""

    model: str  # its class
    parameters: int
    optimizers: tuple[str, ...]  # none where the script changes the weights itself
    path: Path
    missed_steps: int
    recompiled: bool
    precision: str | None = None  # as `Arithmetic.begin` says it


class Arithmetic(Protocol):
    """Interface of a change to the computation of a found model."""

    def begin(self, model: nn.Module, called: nn.Module | None, optimizers: Sequence[Optimizer]) -> str:
        """Begin with a model found in its module `called`; return what it computes in.

        The call of `called` waits.
        """
        ...

    def on_refusal(self, report: Callable[[str], None]) -> None:
        """Calls `report` with one line if that no longer holds."""
        ...


class Finder:
    """Watches each model that is trained in this process.

    - `folder`: the run's folder, asked for when the first model is found. One model's run is the folder itself; runs of
      several are in folders below it, but the first is the folder itself where it was taken for the only one.
    - `arguments`: those of `plimsoll.watch`.
    - `on_found`: called with each model found. `say`: called with the reason why one is not watched.
    - `arithmetic`: its `begin` is called with each model before the call goes on, watched or not.
    - `free`: makes another folder of one that is taken, which holds a run that this training does not continue.
      `resume`: continues it in any case.
    """

    def __init__(
        self,
        folder: Callable[[], Path],
        arguments: Mapping[str, Any],
        *,
        on_found: Callable[[Found], None],
        say: Callable[[str], None],
        arithmetic: Arithmetic | None = None,
        free: Callable[[Path, bool], Path] = lambda folder, _: folder,
        resume: bool = False,
    ) -> None:
        self._free, self._resume = free, resume
        self._choose, self._arguments, self._on_found, self._say = folder, arguments, on_found, say
        self._arithmetic = arithmetic
        self._complained = False
        self._place: Path | None = None  # the folder of the script
        self._recorded = False
        self._runs: list[str] = []  # the runs in it, by the names of their folders
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._settled: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._watches: list[tuple[Steps, int]] = []  # each with the number of its first step
        self._fleeting: set[type] = set()  # of modules that were gone before their first step
        self._vacant = False  # the script's folder holds the run of one of these, without a step
        self._made: list[str] = []  # kinds of optimizers
        self._backwards = 0  # without an optimizer
        self._moving: tuple[weakref.ref[nn.Module], Probe] | None = None  # what a backward has reached last
        self._names: list[str] = []  # of models
        self._calls = _Calls(self._consider)

    def note(self, optimizer: Optimizer) -> None:
        """Looks for the model of an optimizer from now on."""
        if optimizer in self._steps:
            return
        self._steps[optimizer] = 0
        self._made.append(type(optimizer).__name__)
        for steps, ids in self._watched():
            if _ids(optimizer) <= ids:
                steps.parameters.adopt(optimizer)
                self._settled.add(optimizer)
                return
        # A hook of the optimizer's own: within a global one, torch forbids what a watch does, adding global ones.
        self._hooks[optimizer] = optimizer.register_step_post_hook(self._stepped)
        self._calls.seek()

    @property
    def has_found(self) -> bool:
        """True if a model was found."""
        return bool(self._watches)

    # A script that makes no optimizer is found by its backwards: where the weights that one reached have moved by
    # the next one, the smallest module that has them is the model, watched from that backward on.
    def note_backward(self, roots: Sequence[torch.Tensor]) -> bool:
        """Note a backward of a script without optimizers; return True if it is enough."""
        if backward_running() != -1:  # a checkpoint's, within another
            return False
        self._backwards += 1
        model = None if self._moving is None or not self._moving[1].is_moved() else self._moving[0]()
        if model is not None:
            self._contain(lambda: self._start(model, [], called=None))
            return True
        leaves = leaves_of(list(roots))
        modules = _live_modules()
        need = leaves.keys() & _housed(modules)
        model = _smallest(modules, need) if need else None
        if model is not None:
            self._moving = weakref.ref(model), Probe((leaves[key] for key in need), wait=True)
        return self._backwards >= _PATIENCE_BACKWARDS

    @property
    def place(self) -> Path | None:
        """The folder of the script, once something is recorded into it."""
        return self._place if self._recorded else None

    def verdict(self) -> str | None:
        """Why no training step was seen; None if one was, or the user knows why not."""
        ended = (steps.session.step > first or cast("Any", steps)._ended for steps, first in self._watches)  # noqa: SLF001
        if self._complained or any(ended):
            return None
        if self._watches:
            return f"{', '.join(dict.fromkeys(self._names))} was called, but no optimizer has stepped"
        made = ", ".join(dict.fromkeys(self._made))
        return f"{made} was made, but no module with its parameters was called with gradients enabled"

    def _consider(self, module: nn.Module) -> None:
        """A module is called, by no other."""
        if torch.is_grad_enabled():
            self._contain(self._find, module)

    def _find(self, module: nn.Module) -> None:
        if lazy_names(module):  # its first call makes its parameters: the next one is watched
            return
        ids, needs = _ids_of(module), self._needs()
        mine = [need for _, need in needs if need & ids]
        if mine and class_of(unwrapped(module)) in self._fleeting:
            inside = self._lasting([(inner, _ids_of(inner)) for inner in module.modules()])
            module = next((m for need in mine if (m := _smallest(inside, need & ids)) is not None), module)
            ids = _ids_of(module)
        if mine:
            self._start(_whole(module, ids, mine), needs, called=module)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer not in self._settled:
            self._steps[optimizer] += 1
            if self._steps[optimizer] >= _PATIENCE_STEPS:
                self._contain(self._search, optimizer)

    def _search(self, optimizer: Optimizer) -> None:
        """Finds the model by its parameters: no call of it was seen."""
        needs, modules = self._needs(), self._lasting(_live_modules())
        need = next((need for other, need in needs if other is optimizer), set[int]())
        housed = need & _housed(modules)
        model = _smallest(modules, housed) if housed else None
        if model is not None:
            self._start(model, needs, called=None)
        elif need:
            whose = "several modules, not all of them called" if housed else "no module"
            self._complain(f"{type(optimizer).__name__} steps parameters of {whose}: they are not watched")
        self._settled.add(optimizer)

    # A solver may wrap its function in a module that it makes for each call (torchdiffeq does). That one has all the
    # parameters and is the outermost, and is gone when the optimizer steps: what is inside it is looked for then.
    def _gone(self, kind: type, steps: Steps, first: int, path: Path, refs: "list[weakref.ref[Optimizer]]") -> None:
        """A watched module was collected: look again if no step of it has ended."""
        optimizers = [optimizer for ref in refs if (optimizer := ref()) is not None]
        if steps.next_step > first or not optimizers:
            return
        self._fleeting.add(kind)
        self._vacant = path == self._place
        for optimizer in optimizers:
            self._settled.discard(optimizer)
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_post_hook(self._stepped)
        self._calls.seek()

    def _lasting(self, modules: list[tuple[nn.Module, set[int]]]) -> list[tuple[nn.Module, set[int]]]:
        """Return those of some modules that are not made for one call."""
        return [(module, ids) for module, ids in modules if class_of(module) not in self._fleeting]

    def _watched(self) -> Iterator[tuple[Steps, set[int]]]:
        """Each watch, with its model's parameters."""
        for steps, _ in self._watches:
            model = steps.session.model()
            if model is not None and steps.session.open:
                yield steps, _ids_of(model)

    def _needs(self) -> list[_Need]:
        """The optimizers that are looked at still, with what nothing watches of theirs."""
        watched = set[int]().union(*(ids for _, ids in self._watched()))
        needs = [(o, _ids(o) - watched) for o in list(self._steps) if o not in self._settled]
        return [(optimizer, need) for optimizer, need in needs if need]

    def _contain(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
            if not self._needs():
                self._calls.rest()
        except Exception as error:  # noqa: BLE001  (P2: whatever fails in watching must not stop training)
            self._settled.update(list(self._steps))
            self._calls.rest()
            self._complain("the model", error)

    def _complain(self, what: str, error: Exception | None = None) -> None:
        self._complained = True
        name = type(error).__name__
        self._say(f"{what} cannot be watched; the script continues unwatched ({name}: {error})" if error else what)

    def _start(self, model: nn.Module, needs: list[_Need], *, called: nn.Module | None) -> None:
        """Watches the model; `called` is the module whose call waits."""
        ids, root = _ids_of(model), unwrapped(model)
        mine = [optimizer for optimizer, need in needs if need & ids]
        done = [optimizer for optimizer, need in needs if need <= ids]
        rest = set[int]().union(*(need - ids for _, need in needs))
        shared = bool(rest) and not rest.isdisjoint(_housed(_live_modules()))  # not an optimizer's alone
        try:
            result = self._watch(model, root, mine, shared=shared, calling=called is not None)
        except Exception as error:  # noqa: BLE001  (P2; and a model that cannot be watched is not tried again)
            done, result = mine, None
            self._complain(type(root).__name__, error)
        # After the watch, whose taps then see what the model itself gives.
        precision = None if self._arithmetic is None else self._arithmetic.begin(model, called, mine)
        if result is not None:
            if self._arithmetic is not None:
                session = self._watches[-1][0].session
                session.writer.write_manifest(precision=precision)
                self._arithmetic.on_refusal(functools.partial(_note_refusal, session))
            self._on_found(replace(result, precision=precision))
        self._settled.update(done)
        for optimizer in done if called is not None else ():  # not inside the hook itself
            self._hooks.pop(optimizer).remove()

    def _watch(
        self, model: nn.Module, root: nn.Module, mine: list[Optimizer], *, shared: bool, calling: bool
    ) -> Found | None:
        own = [other for other in torch_hooks.listeners() if isinstance(other, Steps) and other.session.model() is root]
        if own:
            self._watches.append((own[0], own[0].session.step))
            self._complain(f"the script watches {type(root).__name__} itself: it is left to that")
            return None
        stepping = list(dict.fromkeys(map(innermost, mine)))  # master weights and the optimizer inside are one
        result = Found(
            model=class_of(root).__name__,
            parameters=sum(p.numel() for p in root.parameters()),
            optimizers=tuple(dict.fromkeys(type(optimizer).__name__ for optimizer in stepping)),
            path=self._path(model, self._name(model, root), mine, shared=shared),
            missed_steps=max((self._steps[optimizer] for optimizer in mine), default=1),
            recompiled=torch_hooks.has_compiled(),
        )
        handle = watch(model, stepping, run=result.path, resume=self._resume or None, **self._arguments)
        steps: Steps = cast("Any", handle)._steps  # noqa: SLF001  (this room's own)
        self._watches.append((steps, handle.step_index))
        refs = [weakref.ref(optimizer) for optimizer in mine]
        end = weakref.finalize(root, self._gone, class_of(root), steps, handle.step_index, result.path, refs)
        end.atexit = False
        self._list(steps.session.ranks.rank)
        for optimizer in stepping if calling else ():
            if _is_stepping(optimizer):  # the forward runs in its closure
                steps.optimizer_begins(optimizer)
        return result

    def _path(self, model: nn.Module, name: str, mine: list[Optimizer], *, shared: bool) -> Path:
        if self._place is not None and self._vacant:
            self._vacant = False
            return self._place
        if self._place is not None:
            self._runs.append(name)
            return self._place / name
        place, inside = self._choose(), name if shared else location.ITSELF
        if not self._resume:
            rank = Ranks().rank
            earlier = lifecycle.earlier_run(place / inside, rank, model, mine)
            self._resume = earlier is not None and earlier.fits
            place = self._free(place, not self._resume and lifecycle.is_taken(place, earlier, rank))
        self._place, self._runs = place, [inside]
        return place / inside if shared else place

    def _list(self, rank: int) -> None:
        """List the runs of a script's models in its folder, to answer for all at once."""
        self._recorded = True
        if self._place is not None and self._runs != [location.ITSELF] and rank == 0:
            location.write_script(self._place, self._runs)

    def _name(self, model: nn.Module, root: nn.Module) -> str:
        """Return a model's folder name: its class, or the script's name for torch's own."""
        kind = class_of(root)
        plain = kind.__module__.startswith("torch.")
        variable = _variable(model, root) or _attribute(root) if plain else None
        self._names.append(variable or kind.__name__)
        count = self._names.count(self._names[-1])
        return self._names[-1] if count == 1 else f"{self._names[-1]}-{count}"


class _Calls:
    """The outermost calls of modules, while they are sought."""

    def __init__(self, heed: Callable[[nn.Module], None]) -> None:
        self._heed, self._original = heed, nn.Module.__call__
        self._ours = self._wrapper(self._original)
        self._seeking = False

    def seek(self) -> None:
        """Start to intercept calls."""
        self._seeking = True
        self._put(self._original, self._ours)

    def rest(self) -> None:
        """Stop to intercept calls, and restore torch."""
        self._seeking = False
        self._put(self._ours, self._original)

    def _put(self, there: Any, instead: Any) -> None:
        if nn.Module.__call__ is there:  # not while someone else has wrapped it
            nn.Module.__call__ = instead

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._put(self._ours, original)  # inner calls are none of ours, and compiled ones must not see a wrapper
            if not self._seeking:
                return original(module, *args, **kwargs)
            try:
                self._heed(module)
                return original(module, *args, **kwargs)
            finally:
                if self._seeking:
                    self._put(original, self._ours)

        return __call__


def _note_refusal(session: WatchSession, line: str) -> None:
    """The run says when its model's arithmetic became another."""
    if session.open:
        session.say("precision", line)
        session.writer.write_manifest(precision="the script's own precision")


# An optimizer that `prepare` or `MasterWeights` was given has the masters in its groups, and modules have the weights.
def _ids(optimizer: Optimizer) -> set[int]:
    """The parameters of modules that an optimizer steps, itself or through masters."""
    return {id(p) for p in parameters_of(innermost(optimizer))}


def _ids_of(module: nn.Module) -> set[int]:
    return {id(p) for p in module.parameters()}


def _live_modules() -> list[tuple[nn.Module, set[int]]]:
    """Every module that there is, with its parameters."""
    modules = [cast("nn.Module", x) for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    return [(module, _ids_of(module)) for module in modules if "_modules" in module.__dict__]


def _housed(modules: list[tuple[nn.Module, set[int]]]) -> set[int]:
    return set[int]().union(*(has for _, has in modules))


# Where that module has only a part of an optimizer's parameters, the smallest module that has them all is the model (a
# LightningModule whose `training_step` calls its parts); where there is none (an encoder and a decoder), each part is
# watched when it is called. What is never called as a module is looked for after an optimizer's second step.
def _whole(module: nn.Module, ids: set[int], needs: list[set[int]]) -> nn.Module:
    """Return the module if it has all that an optimizer steps, or else one that has.

    The module itself if none has.
    """
    if any(need <= ids for need in needs):
        return module
    modules = _live_modules()
    housed = _housed(modules)
    if any(need & housed <= ids for need in needs):
        return module
    return _smallest(modules, needs[0] & housed) or module


def _smallest(modules: list[tuple[nn.Module, set[int]]], need: set[int]) -> nn.Module | None:
    """Return the outermost smallest module with these parameters; None without one."""
    fit = [(len(has), -sum(1 for _ in module.modules()), module) for module, has in modules if need <= has]
    return min(fit, key=lambda each: each[:2])[2] if fit else None


def _is_stepping(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's step is running: it was given a closure."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(f.f_code.co_name in {"step", "wrapper"} and f.f_locals.get("self") is optimizer for f in frames)


def _variable(model: nn.Module, root: nn.Module) -> str | None:
    """Return the script's variable for a model, global or in a running function."""
    main = vars(sys.modules["__main__"])
    for names in (main, *(frame.f_locals for frame, _ in traceback.walk_stack(None) if frame.f_globals is main)):
        for name, value in list(names.items()):
            if (value is model or value is root) and not name.startswith("_") and name != "self":
                return name
    return None


def _attribute(root: nn.Module) -> str | None:
    """Return the attribute by which the parent module has this one."""
    names = (name for module, _ in _live_modules() for name, child in module.named_children() if child is root)
    return next((name for name in names if not name.isdecimal()), None)
