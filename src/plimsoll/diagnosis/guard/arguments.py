"""Arguments of a guard, checked."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import torch

from plimsoll.diagnosis.finding import Action, Severity
from plimsoll.diagnosis.guard.actions.base import GuardAction, Training
from plimsoll.diagnosis.guard.actions.modules import Clamp, ToBF16
from plimsoll.diagnosis.guard.actions.run import Rollback, Skip, Stop, reporting
from plimsoll.diagnosis.guard.actions.scales import LayerScale, LowerScale, RaiseScale
from plimsoll.diagnosis.guard.checkpoints import CheckpointStore, Stateful, check_parts
from plimsoll.diagnosis.guard.records import ACTIONS
from plimsoll.errors import ArgumentError
from plimsoll.watch import Watch

_KINDS: tuple[type[GuardAction], ...] = (LowerScale, RaiseScale, LayerScale, ToBF16, Clamp, Skip, Rollback)


def check_arguments(
    watch: object,
    actions: Sequence[str],
    on_finding: object,
    every: object,
    cpu_share: object,
    severity: object,
    kept: object,
) -> tuple[Action, ...]:
    """The actions that are allowed; raises `ArgumentError` for what makes no sense."""
    if not isinstance(watch, Watch):
        raise ArgumentError(
            f"Guard: expected a watch; got {type(watch).__name__}. Give what pl.watch(...) returned, or loop.watch."
        )
    if watch.closed:
        raise ArgumentError("Guard: expected an open watch; got one that is closed. Call pl.watch again.")
    names = [actions] if isinstance(actions, str) else list(actions)
    for name in names:
        if name not in ACTIONS:
            near = difflib.get_close_matches(str(name), ACTIONS, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(ACTIONS)}."
            raise ArgumentError(f"Guard: expected actions by their names; got {name!r}. {hint}")
    if on_finding is not None and not callable(on_finding):
        raise ArgumentError(f"Guard: expected on_finding as a function; got {on_finding!r}. Write on_finding=print.")
    for word, value in (("every", every), ("kept", kept)):
        if type(value) is not int or value < 1:
            raise ArgumentError(f"Guard: expected {word} as a whole number of 1 or more; got {value!r}. Use 50.")
    if isinstance(cpu_share, bool) or not isinstance(cpu_share, int | float) or not 0 < cpu_share <= 1:
        raise ArgumentError(f"Guard: expected cpu_share above 0 and up to 1; got {cpu_share!r}. Use 0.05.")
    if severity not in get_args(Severity):
        raise ArgumentError(f"Guard: expected severity to be info, warning or alarm; got {severity!r}. Use 'alarm'.")
    return cast("tuple[Action, ...]", tuple(dict.fromkeys(names)))


def training_of(
    watch: Watch, loop: Any, scaler: Any, checkpoint: "Mapping[str, Stateful] | None", kept: int
) -> Training:
    """Return the guard's training; raise `ArgumentError` where its parts conflict."""
    access = watch.beside
    if loop is not None:
        _check_loop(loop, scaler, access.model)
    elif scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(
            f"Guard: expected scaler as a torch.amp.GradScaler or one of plimsoll.scaling; got "
            f"{type(scaler).__name__}. Leave it out, and allow no action on scales."
        )
    check_parts(checkpoint)
    training = Training(access, loop, scaler)
    training.keeper = CheckpointStore(access, lambda: training.loop, lambda: training.scaler, checkpoint, kept)
    return training


def remedies_of(
    names: Sequence[Action],
    training: Training,
    report: "str | os.PathLike[str] | Callable[[Path], object] | None",
) -> dict[str, GuardAction]:
    """Return the allowed actions; raise `ArgumentError` for an impossible one."""
    if report is not None and "stop" not in names:
        raise ArgumentError("Guard: expected report= together with the action stop; got it without. Allow stop.")
    write = None if report is None else reporting(cast("Any", report))
    made: dict[str, GuardAction] = {kind.action: kind(training) for kind in _KINDS if kind.action in names}
    if "stop" in names:
        made["stop"] = Stop(training, write)
    for name, remedy in made.items():
        refusal = remedy.refusal()
        if refusal is not None:
            raise ArgumentError(f"Guard: expected actions that this training can have; got {name}: {refusal}.")
    return made


def _check_loop(loop: Any, scaler: object, model: object) -> None:
    from plimsoll.precision import Loop

    if not isinstance(loop, Loop) or loop.closed:
        raise ArgumentError(
            f"Guard: expected loop to be an open loop of pl.prepare(...); got {loop!r}. Leave it out if you write the "
            "loop yourself."
        )
    if scaler is not None:
        raise ArgumentError("Guard: expected loop= or scaler=; got both. Leave scaler= out: the loop has its own.")
    from plimsoll.watch.names import unwrapped

    if unwrapped(loop.model) is not model:
        raise ArgumentError("Guard: expected a loop and a watch of one model; got two models. Give loop.watch.")
