"""Base class of actions, `GuardAction`, their state, and actions on the whole run."""

import importlib.util
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from torch import nn

from plimsoll import display
from plimsoll.diagnosis.finding import Action, Finding
from plimsoll.diagnosis.guard.checkpoints import CheckpointStore
from plimsoll.diagnosis.guard.records import Look, Order, Value
from plimsoll.errors import ArgumentError, GuardStop, MissingExtraError
from plimsoll.extras import install_line
from plimsoll.tensor_collections import OF_MODULES
from plimsoll.watch.companion import WatchAccess


class Training:
    """The training that a guard acts on, with weak references to loop and scaler."""

    def __init__(self, access: WatchAccess, loop: Any, scaler: Any) -> None:
        self.access = access
        self._loop = None if loop is None else weakref.ref(loop)
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.keeper: CheckpointStore

    @property
    def loop(self) -> Any:
        """The loop; None for a hand-written loop."""
        return None if self._loop is None else self._loop()

    @property
    def scaler(self) -> Any:
        """The scaler in use, if any."""
        if self.loop is not None:
            return self.loop.scaler
        return None if self._scaler is None else self._scaler()

    def modules_of(self, finding: Finding) -> list[str]:
        """Return the modules that a finding names, by the run's names, if in the model."""
        modules = dict.fromkeys(_module_of(name, finding.collection, self.access.root) for name in finding.where)
        known = self.access.modules()
        return [name for name in modules if name in known]

    def in_model(self, name: str) -> str:
        """A module's name within the model, where the root's is empty."""
        return "" if name == self.access.root else name

    def module(self, name: str) -> nn.Module:
        """A module by the run's name."""
        return self.access.modules()[name]


class GuardAction(ABC):
    """One action; a guard has one of each kind that it is allowed."""

    action: ClassVar[Action]

    def __init__(self, training: Training) -> None:
        self.training = training

    def refusal(self) -> str | None:
        """Return why the action is impossible in this training, or None. The guard asks when it is made."""
        return None

    @abstractmethod
    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:
        """Return the order for a finding, or why there is none; on the deciding rank."""

    @abstractmethod
    def carry_out(self, order: Order) -> None:
        """Does it; on every rank."""

    def handled(self, finding: Finding) -> bool:  # noqa: ARG002  (what those that hold say)
        """Return True if a past action takes care of a finding that still holds."""
        return False

    def between(self) -> None:
        """A step has ended."""
        return

    def undo(self) -> None:
        """Takes back what holds on the model's modules."""
        return

    def order(
        self,
        finding: Finding,
        since: int,
        reason: str,
        *,
        before: Value = None,
        after: Value = None,
        where: Sequence[str] = (),
        targets: Sequence[str] = ("the run",),
    ) -> Order:
        """An order of this action."""
        return Order(
            action=self.action,
            rule=finding.rule,
            where=tuple(where),
            since_step=since,
            before=before,
            after=after,
            reason=reason,
            targets=tuple(targets),
            finding=str(finding),
        )


def _module_of(name: str, collection: str | None, root: str) -> str:
    if collection in OF_MODULES:
        return name.partition(":")[0]
    parameter = name.partition(":")[0] if collection == "optimizer" else name
    return parameter.rpartition(".")[0] or root


# -- the run: skip a step, return to a checkpoint, and end -------------------------------------------------------------

_FLUSH_SECONDS = 60.0


class Skip(GuardAction):
    """The next step changes nothing: its gradients are dropped."""

    action = "skip"

    def __init__(self, training: Any) -> None:
        super().__init__(training)
        self._drops: Any = None

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """The next step."""
        if self.training.loop is None and not self.training.access.optimizers:
            return "the watch has no optimizer whose step could be skipped"
        return self.order(finding, since, "the next optimizer step is skipped")

    # A `Loop`'s schedulers do not advance then, and its outcome says why. In a hand-written loop the optimizers are
    # called and find no gradients; what you step besides (schedulers) is yours.
    def carry_out(self, order: Order) -> None:
        """Drops the gradients of the next step."""
        if self.training.loop is not None:
            self.training.loop.skip_next(f"the guard skipped it: {order.finding}")
            return
        from plimsoll.precision.training.loop_control import DropsGradients

        access = self.training.access
        if access.model is not None:
            self._drops = DropsGradients(access.model, access.optimizers)

    def between(self) -> None:
        """The step that was to be left out is over."""
        self.undo()

    def undo(self) -> None:
        """The next step is made."""
        if self._drops is not None:
            self._drops.remove()
            self._drops = None


class Rollback(GuardAction):
    """Action that restores the last checkpoint from before the finding."""

    action = "rollback"

    def refusal(self) -> str | None:
        """Return why a checkpoint would be incomplete; None if it would not."""
        return self.training.keeper.refusal()

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """The checkpoint."""
        saved = self.training.keeper.good(since)
        if saved is None:
            there = ", ".join(map(str, self.training.keeper.steps)) or "none"
            return f"no checkpoint was passed before step {since} (of steps: {there}); call guard.checkpoint()"
        now = self.training.access.next_step
        return self.order(finding, since, "the last checkpoint from before it", before=now, after=saved.step)

    def carry_out(self, order: Order) -> None:
        """Puts it back."""
        self.training.keeper.restore(int(order.after or 0))


class Stop(GuardAction):
    """Action that ends the training with `GuardStop`, after the run is on disk."""

    action = "stop"

    def __init__(self, training: Any, report: "Callable[[Path], object] | None") -> None:
        super().__init__(training)
        self._report = report

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """The end."""
        return self.order(finding, since, "no other allowed action helps")

    def carry_out(self, order: Order) -> NoReturn:
        """Flushes the run, writes the report, and raises."""
        access = self.training.access
        try:
            access.settle()
            access.hand_over()
            access.flush(_FLUSH_SECONDS)
        except Exception as error:  # noqa: BLE001  (the training is to end, its run on disk or not)
            access.failed("the guard's flush", error)
        where = None
        if self._report is not None and access.rank == 0:
            try:
                where = self._report(access.path)
            except Exception as error:  # noqa: BLE001  (likewise)
                access.failed("the guard's report", error)
        report = f" The report is at {where}." if isinstance(where, Path) else ""
        raise GuardStop(
            f"Guard: expected a training that is sound; got {order.finding} Look at the run in {access.path}; stop was "
            f"allowed by actions=.{report}"
        )


def html_writer() -> Callable[[Path, Path], object]:
    """Return the function that writes a run as HTML."""
    if importlib.util.find_spec("plotly") is None:
        raise MissingExtraError(
            f"Guard: expected the package plotly for report=; got none. Install it: {install_line('report')}"
        )
    return display.function("report")


def reporting(given: "str | os.PathLike[str] | Callable[[Path], object]") -> Callable[[Path], object]:
    """Return the function that writes a report of a run: the given one, or one that writes HTML to the path."""
    if callable(given):
        return given
    if not isinstance(cast("object", given), str | os.PathLike) or not os.fspath(given):
        raise ArgumentError(
            f"Guard: expected report as a path or a function; got {given!r}. Write report='stopped.html'."
        )
    target = Path(given)
    write = html_writer()

    def to_path(run: Path) -> Path:
        write(run, target)
        return target

    return to_path
