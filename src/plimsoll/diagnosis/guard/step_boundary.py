"""Boundaries between steps, on the thread that trains; only there a guard acts.

With a `Loop` that is the end of ``loop.step``. In a hand-written loop it is the end of ``scaler.update()``, or, where
no loss is scaled, of the last optimizer's step: once each of the watch's optimizers has stepped.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from plimsoll.watch.companion import WatchAccess
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.parameters.optimizer_tensors import innermost


class Boundary(Protocol):
    """Caller of a function between steps, until it is removed."""

    def remove(self) -> None:
        """Ends the calls."""


class LoopBoundary:
    """The boundary of a loop's steps."""

    def __init__(self, loop: Any, between: Callable[[], None]) -> None:
        self.remove = loop.after_each_step(between)


class HookedBoundary(torch_hooks.TrainingEvents):
    """Boundary of a hand-written loop, from a watch's `torch_hooks.TrainingEvents`."""

    def __init__(self, access: WatchAccess, between: Callable[[], None]) -> None:
        self._access, self._between = access, between
        self._scaler: weakref.ref[Any] | None = None  # what has stepped one of our optimizers
        self._scaled = False  # a loss was scaled in this step: its end is the scaler's update
        self._stepped: set[int] = set()
        torch_hooks.subscribe(self)

    def remove(self) -> None:
        """Hears no more."""
        torch_hooks.unsubscribe(self)

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:  # noqa: ARG002
        """A scaler has scaled a loss."""
        self._scaled = True

    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned."""
        if innermost(optimizer) in self._access.optimizers:
            self._scaler = weakref.ref(scaler)

    def scaler_update_ends(self, scaler: Any) -> None:
        """A scaler has changed its scale."""
        if self._scaler is not None and self._scaler() is scaler:
            self._end()

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        ours = self._access.optimizers
        if self._scaled or optimizer not in ours:
            return
        self._stepped.add(id(optimizer))
        if self._stepped >= {id(optimizer_of_ours) for optimizer_of_ours in ours}:
            self._end()

    # What `between` raises leaves the user's call of `update` or `step`, whose work is done by then.
    def _end(self) -> None:
        self._scaled = False
        self._stepped.clear()
        self._between()
