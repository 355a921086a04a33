"""`Guard`: the rules of `diagnose` during training, and what they advise, done."""

import difflib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast, get_args

import torch

from plimsoll.diagnosis.finding import SEVERITIES, Action, Finding, Severity
from plimsoll.diagnosis.guard.actions.base import GuardAction, Rollback, Skip, Stop, Training, reporting
from plimsoll.diagnosis.guard.actions.numerics import Clamp, LayerScale, LowerScale, RaiseScale, ToBF16
from plimsoll.diagnosis.guard.checkpoints import CheckpointStore, Restore, Stateful, check_parts
from plimsoll.diagnosis.guard.decisions import ActionChooser, BackgroundChecker
from plimsoll.diagnosis.guard.records import ACTIONS, Act, Limits, Look, Order, Outcome
from plimsoll.diagnosis.guard.step_boundary import Boundary, HookedBoundary, LoopBoundary, ranks_of
from plimsoll.diagnosis.rules.base import Rule
from plimsoll.diagnosis.run_rules import rules_named, with_thresholds
from plimsoll.errors import ArgumentError, GuardStop
from plimsoll.watch import Watch

# -- arguments, checked ------------------------------------------------------------------------------------------------

_KINDS: tuple[type[GuardAction], ...] = (LowerScale, RaiseScale, LayerScale, ToBF16, Clamp, Skip, Rollback)

T = TypeVar("T")


def check_arguments(
    watch: object,
    actions: Sequence[str],
    on_finding: object,
    every: object,
    cpu_share: object,
    severity: object,
    kept: object,
    limits: object,
) -> tuple[Action, ...]:
    """The actions that are allowed; raises `ArgumentError` for what makes no sense."""
    if not isinstance(watch, Watch):
        raise ArgumentError(
            f"Guard: expected a watch; got {type(watch).__name__}. Give what pl.watch(...) returned, or loop.watch."
        )
    if watch.closed:
        raise ArgumentError("Guard: expected an open watch; got one that is closed. Call pl.watch again.")
    names = _action_names(actions)
    if on_finding is not None and not callable(on_finding):
        raise ArgumentError(f"Guard: expected on_finding as a function; got {on_finding!r}. Write on_finding=print.")
    for word, value, usual in (("every", every, 50), ("kept", kept, 3)):
        if type(value) is not int or value < 1:
            raise ArgumentError(f"Guard: expected {word} as a whole number of 1 or more; got {value!r}. Use {usual}.")
    if isinstance(cpu_share, bool) or not isinstance(cpu_share, int | float) or not 0 < cpu_share <= 1:
        raise ArgumentError(f"Guard: expected cpu_share above 0 and up to 1; got {cpu_share!r}. Use 0.05.")
    if severity not in get_args(Severity):
        raise ArgumentError(f"Guard: expected severity to be info, warning or alarm; got {severity!r}. Use 'alarm'.")
    if limits is not None and not isinstance(limits, Limits):
        raise ArgumentError(f"Guard: expected limits as Limits(...); got {limits!r}. Leave it out for the usual ones.")
    return names


def _action_names(actions: object) -> tuple[Action, ...]:
    several = isinstance(actions, Iterable) and not isinstance(actions, str)
    names: list[object] = list(cast("Iterable[object]", actions)) if several else [actions]
    for name in names:
        if name not in ACTIONS:
            near = difflib.get_close_matches(str(name), ACTIONS, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(ACTIONS)}."
            raise ArgumentError(f"Guard: expected actions by their names; got {name!r}. {hint}")
    return tuple(dict.fromkeys(cast("list[Action]", names)))


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
    write = None if report is None else reporting(report)
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


# -- the guard ---------------------------------------------------------------------------------------------------------

_KEPT_LOOKS = 32
_FLUSH_SECONDS = 30.0


class Guard:
    """Guard of a watched training: checks it by the rules of `diagnose`, and acts.

    Looking happens in the background, on what the watch has written; acting on the thread that trains, between two
    steps. Every act is an event of the run, of kind "guard", and in `acts`. By default nothing is done:
    ``dry_run=True`` only says and records what would be. A dry guard changes no bit of the training.

    - `actions`: what it may do, by name; each finding brings its own of them, see `Finding.actions`:

      - "raise_scale", "lower_scale": the loss scale of a DynamicScaler or `torch.amp.GradScaler`, by powers of two.
      - "layer_scale": layers of a `LayerScaler` get a scale from their gradients of now.
      - "to_bf16": the modules named, or the whole run, compute in BF16.
      - "clamp": what the modules named return is held to FP16's largest value.
      - "skip": the next step changes nothing.
      - "rollback": the last checkpoint that was saved before the finding, with `checkpoint`, is restored.
      - "stop": the training ends with `GuardStop`, after the run is flushed and `report` is written.
    - `on_finding`: called between steps when a rule first finds something in a collection, and again when its severity
      rises.
    - `loop`: what `plimsoll.prepare` gave. `scaler`: that of a hand-written loop.
    - `every`: steps between looks. `cpu_share`: the share of one core that they may take in the mean; a look that is
      due too early for that, or while another is under way, is left out.
    - `severity`: the least that is acted on. `limits`: how often; see `Limits`.
    - `checkpoint`: what to save and put back, by name, where that is not the loop, or model, optimizers and scaler.
      `kept`: how many checkpoints are held.
    - `rules`, `thresholds`: as for `diagnose`.
    - `report`: for "stop": where to write the HTML report, or a function that is given the run's folder.

    With several ranks each makes its guard, and all act at the same step: every `every` steps they meet in one small
    broadcast. `on_finding` is called on rank 0 then. The guard ends with `close`, its ``with`` block, or its watch.

    Raises `ArgumentError` for an action that this training cannot have, with the reason.
    """

    def __init__(
        self,
        watch: Watch,
        actions: Sequence[str] = (),
        on_finding: Callable[[Finding], object] | None = None,
        *,
        loop: Any = None,
        scaler: Any = None,
        dry_run: bool = True,
        every: int = 50,
        cpu_share: float = 0.05,
        severity: Severity = "warning",
        limits: Limits | None = None,
        checkpoint: Mapping[str, Stateful] | None = None,
        kept: int = 3,
        rules: "Sequence[str | Rule] | None" = None,
        thresholds: Mapping[str, float] | None = None,
        report: "str | os.PathLike[str] | Callable[[Path], object] | None" = None,
    ) -> None:
        names = check_arguments(watch, actions, on_finding, every, cpu_share, severity, kept, limits)
        applied = with_thresholds(rules_named(rules), thresholds or {})
        self._training = training_of(watch, loop, scaler, checkpoint, kept)
        self._remedies = remedies_of(names, self._training, report)
        self._access = self._training.access
        self._on_finding, self._dry_run, self._every = on_finding, bool(dry_run), every
        self._chooser = ActionChooser(
            names, limits or Limits(), self._access.next_step, severity, dry_run=self._dry_run
        )
        self._ranks = ranks_of(self._access.path, self._access.rank, self._access.world)
        self._checker = BackgroundChecker(
            self._access.path, applied, share=cpu_share, gather=self._gather,
            failed=lambda error: self._access.failed("the guard's look", error),
        )  # fmt: skip
        self._acts: list[Act] = []
        self._looks: deque[Look] = deque(maxlen=_KEPT_LOOKS)
        self._asked: Look | None = None  # by hand, to be acted on at the next boundary
        self._meets = False  # at the next boundary all ranks have something to agree on
        self._told: dict[tuple[str, str | None], int] = {}
        self._helpless: set[tuple[str, str]] = set()
        self._busy = self._closed = False
        self._boundary: Boundary
        made = HookedBoundary(self._access, self._between) if loop is None else LoopBoundary(loop, self._between)
        self._boundary = made
        self._forget = self._access.at_close(self.close)

    # -- what it has ---------------------------------------------------------------------------------------------------

    @property
    def acts(self) -> tuple[Act, ...]:
        """All that it has done, failed to do, or in a dry run would have done."""
        return tuple(self._acts)

    @property
    def looks(self) -> tuple[Look, ...]:
        """The last looks: up to which step, and what was found."""
        return tuple(self._looks)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the latest look."""
        return self._looks[-1].findings if self._looks else ()

    @property
    def dry_run(self) -> bool:
        """True if the guard only reports its actions."""
        return self._dry_run

    @property
    def checkpoints(self) -> list[int]:
        """The steps whose beginnings it could put back."""
        return self._training.keeper.steps

    @property
    def closed(self) -> bool:
        """True if the guard has ended."""
        return self._closed

    # -- what a user calls ---------------------------------------------------------------------------------------------

    def look(self) -> tuple[Finding, ...]:
        """Check all finished steps now, in the foreground; act at the next step's end.

        Call it between two steps; with several ranks on all of them. On ranks other than 0 it finds nothing.
        """
        self._check_open("look")
        self._access.settle()
        self._access.hand_over()
        self._meets = True  # first: all ranks wait for each other at the next step's end, whatever fails here
        new_look = self._asked = self._checker.now(self._access.step - 1)
        if new_look is None and self._ranks.decides:
            self._access.record(
                "guard", "a check was skipped: not all records were on disk in time", {"action": "none"}
            )
        return () if new_look is None else new_look.findings

    def checkpoint(self, state: "Mapping[str, Any] | Restore | None" = None) -> bool:
        """Save a checkpoint of now for "rollback"; return False if weights are not finite.

        That is an event, too. Call it between two steps, as often as you can bear to lose what lies between. Without
        `state` it copies what there is to the host's memory. `state` may be what `Loop.state_dict` gave, or a mapping
        like `checkpoint=` with a state for each name; or a function that restores, called without arguments, for
        checkpoints kept elsewhere. The random generators are saved in any case. It waits for the device.
        """
        self._check_open("checkpoint")
        broken = self._training.keeper.save(state)
        if broken is not None:
            self._access.record("guard", f"no checkpoint was saved: {broken}", {"action": "none"}, warn=True)
        return broken is None

    def close(self) -> None:
        """End the guard and remove its hooks. Closing again does what is left."""
        self._closed = True
        self._boundary.remove()
        for remedy in self._remedies.values():
            remedy.undo()
        self._checker.close()
        self._forget()

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "dry run" if self._dry_run else "acting"
        return f"<Guard: {', '.join(self._remedies) or 'no actions'}, {state}, {len(self._acts)} acts>"

    # -- between steps -------------------------------------------------------------------------------------------------

    def _between(self) -> None:
        """Act between two steps, with all errors contained but `GuardStop`."""
        if self._busy or self._closed:
            return
        self._busy = True
        try:
            self._go_on()
        except GuardStop:
            raise
        except Exception as error:  # noqa: BLE001  (P2: a guard's mistake must not end the training)
            self._access.failed("Guard", error)
        finally:
            self._busy = False

    # Ranks that agree wait for each other: an error of one must not keep it from coming.
    def _go_on(self) -> None:
        for remedy in self._remedies.values():
            self._contained(remedy.between)
        step = self._access.step
        due = step > 1 and (step - 1) % self._every == 0
        if not self._ranks.several or due or self._meets:
            order = self._ranks.agree(self._contained(lambda: self._decision(step)))
            self._meets = False
            if order is not None:
                self._act(order, step)
        if due:
            self._access.hand_over()
            self._checker.ask(step - 1)

    def _contained(self, call: Callable[[], T]) -> T | None:
        """Return what a call returns; None if it raises, which is recorded. `GuardStop` goes on."""
        try:
            return call()
        except GuardStop:
            raise
        except Exception as error:  # noqa: BLE001  (P2: a guard's mistake must not end the training)
            self._access.failed("Guard", error)
            return None

    def _decision(self, step: int) -> Order | None:
        """Return the order for the last look since the previous step, if any."""
        look, self._asked = self._asked or self._checker.take(), None
        if look is None:
            return None
        self._looks.append(look)
        self._tell(look)
        order, helpless = self._chooser.choose(look, step, functools.partial(self._propose, look))
        for rule, why in helpless.items():
            if (rule, why) not in self._helpless:
                self._helpless.add((rule, why))
                self._access.record("guard", f"no action for {rule}: {why}", {"action": "none", "rule": rule})
        return order

    def _tell(self, look: Look) -> None:
        for finding in look.findings:
            key, gravity = (finding.rule, finding.collection), SEVERITIES.index(finding.severity)
            if self._told.get(key, -1) < gravity:
                self._told[key] = gravity
                if self._on_finding is not None:
                    try:
                        self._on_finding(finding)
                    except Exception as error:  # noqa: BLE001  (the user's function is part of the guard: P2)
                        self._access.failed("on_finding", error)

    def _propose(self, look: Look, action: Action, finding: Finding, since: int, tries: int) -> Order | str:
        done = next((r for r in self._remedies.values() if r.handled(finding)), None)
        if done is not None:
            return f"{done.action} handles it already"
        return self._remedies[action].propose(finding, since, tries, look)

    def _act(self, order: Order, step: int) -> None:
        if self._dry_run:
            self._note(order, step, "dry run")
            return
        if order.action == "stop":  # which cannot fail, and writes the run and its report: this event is in both
            self._note(order, step, "done")
        try:
            self._remedies[order.action].carry_out(order)
        except GuardStop:
            self.close()
            raise
        except Exception as error:  # noqa: BLE001  (P2: an act that fails leaves the training as it is)
            self._note(order, step, "failed", f"{type(error).__name__}: {error}")
        else:
            self._note(order, step, "done")

    def _note(self, order: Order, step: int, outcome: Outcome, problem: str | None = None) -> None:
        act = Act(
            step=step, action=order.action, rule=order.rule, where=order.where, since_step=order.since_step,
            before=order.before, after=order.after, reason=order.reason, outcome=outcome, problem=problem,
        )  # fmt: skip
        self._acts.append(act)
        if self._ranks.decides or problem is not None:
            self._access.record("guard", str(act), act.to_dict(), warn=True)

    # -- looking -------------------------------------------------------------------------------------------------------

    def _gather(self, step: int) -> bool:
        """All ranks' parts up to the step are on disk; on rank 0 alone it is true."""
        if self._ranks.decides:
            return self._ranks.gather(step, self._checker.closing) and self._access.gather(_FLUSH_SECONDS)
        return self._access.flush(_FLUSH_SECONDS) and self._ranks.gather(step, self._checker.closing)

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ArgumentError(f"Guard.{operation}: expected an open guard; got one that is closed. Make another.")
