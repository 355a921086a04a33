"""The base class of actions, `GuardAction`, and the state they share, `Training`."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from plimsoll.diagnosis.finding import Action, Finding
from plimsoll.diagnosis.guard.checkpoints import CheckpointStore
from plimsoll.diagnosis.guard.records import Look, Order, Value
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
        """Return why the action is impossible in this training, or None.

        The guard asks for it when it is made.
        """
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
    """The module that a series belongs to."""
    if collection in OF_MODULES:
        return name.partition(":")[0]
    parameter = name.partition(":")[0] if collection == "optimizer" else name
    return parameter.rpartition(".")[0] or root
