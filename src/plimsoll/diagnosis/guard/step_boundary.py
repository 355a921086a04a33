"""Boundaries between steps, where a guard acts, and its ranks' common actions.

With a `Loop` a boundary is the end of ``loop.step``. In a hand-written loop it is the end of ``scaler.update()``, or,
where no loss is scaled, of the last optimizer's step: once each of the watch's optimizers has stepped.
"""

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from plimsoll.diagnosis.guard.records import Order
from plimsoll.errors import ArgumentError
from plimsoll.watch.companion import WatchAccess
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.parameters.optimizer_tensors import innermost
from plimsoll.watch.ranks.store_channel import StoreChannel

# -- boundaries, on the thread that trains -----------------------------------------------------------------------------


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
        # Scalers that have scaled a loss since their last update: the step's end is the update of ours.
        self._scaling: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: set[int] = set()
        torch_hooks.subscribe(self)

    def remove(self) -> None:
        """Stop receiving events."""
        torch_hooks.unsubscribe(self)

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:  # noqa: ARG002
        """A scaler has scaled a loss."""
        self._scaling.add(scaler)

    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned."""
        if innermost(optimizer) in self._access.optimizers:
            self._scaler = weakref.ref(scaler)

    def scaler_update_ends(self, scaler: Any) -> None:
        """A scaler has changed its scale."""
        self._scaling.discard(scaler)  # it may be that of another training in this process
        if self._scaler is not None and self._scaler() is scaler:
            self._end()

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        ours = self._access.optimizers
        if self._scaling or optimizer not in ours:
            return
        self._stepped.add(id(optimizer))
        if self._stepped >= {id(optimizer_of_ours) for optimizer_of_ours in ours}:
            self._end()

    # What `between` raises leaves the user's call of `update` or `step`, whose work is done by then.
    def _end(self) -> None:
        self._scaling.clear()
        self._stepped.clear()
        self._between()


# -- ranks: rank 0 decides, all act at one step ------------------------------------------------------------------------

_PATIENCE_SECONDS = 30.0  # for the slowest rank's flush
_POLL_SECONDS = 0.05


class SingleRank:
    """One process: it agrees with itself."""

    decides = True
    several = False

    def agree(self, order: Order | None) -> Order | None:
        """The order."""
        return order

    def gather(self, step: int, closing: threading.Event) -> bool:  # noqa: ARG002  (what several ranks need)
        """Nobody is waited for."""
        return True


# At every look that is due, all ranks meet once: rank 0 broadcasts what is to be done, over a gloo group of its own, so
# that no device waits. That is the one collective of a guard, of some bytes, every so many steps; a rank that lags
# holds the others up there as it would in the next gradient reduction. Before rank 0 reads the run, each rank has
# flushed its part; that is exchanged through the process group's store, in the background, with no collective.
class ManyRanks:
    """One of several processes."""

    several = True

    def __init__(self, path: Path, rank: int, world: int) -> None:
        self.decides = rank == 0
        self._rank, self._world = rank, world
        self._group: Any = cast("Any", torch.distributed).new_group(backend="gloo")
        self._link = StoreChannel(f"{path}#guard", rank)

    def agree(self, order: Order | None) -> Order | None:
        """Return rank 0's decision; all ranks call it at the same step."""
        text = b"" if order is None else order.encoded()
        size = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
        torch.distributed.broadcast(size, 0, group=self._group)
        if not int(size.item()):
            return None
        data = torch.zeros(int(size.item()), dtype=torch.uint8, device="cpu")
        if self.decides:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        torch.distributed.broadcast(data, 0, group=self._group)
        return Order.decoded(data.numpy().tobytes())

    def gather(self, step: int, closing: threading.Event) -> bool:
        """Publish that this rank's part is on disk; return True if rank 0 may read.

        Rank 0 waits for the others'.
        """
        self._link.tell(f"flushed/{self._rank}", str(step))
        if not self.decides:
            return False
        deadline = time.monotonic() + _PATIENCE_SECONDS
        missing = set(range(1, self._world))
        while missing and time.monotonic() < deadline and not closing.is_set():
            missing = {rank for rank in missing if int(self._link.read(f"flushed/{rank}") or -1) < step}
            if missing:
                closing.wait(_POLL_SECONDS)
        return not missing


def ranks_of(path: Path, rank: int, world: int) -> SingleRank | ManyRanks:
    """Return the object by which a run's ranks agree; ArgumentError if nothing connects several ranks."""
    if world == 1:
        return SingleRank()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ArgumentError(
            f"Guard: expected a process group on rank {rank} of {world}; got none, so that ranks could not act alike. "
            "Call torch.distributed.init_process_group before pl.watch."
        )
    return ManyRanks(path, rank, world)
