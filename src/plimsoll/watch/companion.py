"""`WatchAccess`: the part of a watch that companions such as `Guard` may use.

It reads the state of the training, flushes measurements, and records events. It ends with the watch: callbacks of
`at_close` are called before anything else when the watch closes.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from plimsoll.watch.names import clean
from plimsoll.watch.ranks.collector import Collector
from plimsoll.watch.session import WatchSession
from plimsoll.watch.steps.step_boundary import Steps


class WatchAccess:
    """Access to a watch for its companions."""

    def __init__(self, session: WatchSession, steps: Steps) -> None:
        self._session, self._steps = session, steps

    @property
    def session(self) -> WatchSession:
        """The session, for `plimsoll.watch.session.contained`."""
        return self._session

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._session.writer.path

    @property
    def rank(self) -> int:
        """This process's number among `world`."""
        return self._session.ranks.rank

    @property
    def world(self) -> int:
        """Number of processes."""
        return self._session.ranks.world

    @property
    def model(self) -> nn.Module | None:
        """The model, unwrapped; None once it is gone."""
        return self._session.model()

    @property
    def root(self) -> str:
        """Name of the root module."""
        return self._session.name

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that the watch reads, those that it has found by itself included."""
        return list(self._steps.parameters.optimizers)

    @property
    def step(self) -> int:
        """The number of the step that runs, or has ended and has no successor yet."""
        return self._session.step

    @property
    def next_step(self) -> int:
        """The number of the first step that has not ended."""
        return self._steps.next_step

    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by the names that the run has for them."""
        model = self.model
        if model is None:
            return {}
        named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        return {clean(name) or self.root: module for name, module in named}

    def settle(self) -> None:
        """End the step if an optimizer or scaler has. Call it between two steps only."""
        self._steps.settle_if_ended()

    def hand_over(self) -> None:
        """Give the finished steps' numbers to the writer; on the thread that trains."""
        self._steps.recorder.send_facts()

    def flush(self, seconds: float) -> bool:
        """Wait until the run's folder has all records; return False if not in time."""
        return self._session.writer.flush(seconds)

    def gather(self, seconds: float) -> bool:
        """Do the same on rank 0, with the flushed data of the ranks that it writes for."""
        writer = self._session.writer
        return (not isinstance(writer, Collector) or writer.take_sent(seconds)) and writer.flush(seconds)

    def record(self, kind: str, message: str, details: Mapping[str, Any], *, warn: bool = False) -> None:
        """Record an event of the current step; with `warn`, warn the user too."""
        self._session.say(kind, message, warn=warn, **details)

    def failed(self, where: str, error: Exception) -> None:
        """Contain a failure: record it, and warn once."""
        self._session.failed(where, error)

    def at_close(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call a function when the watch closes; return a function that cancels that.

        It is kept until then, so it must not keep the model alive.
        """
        calls = self._session.at_close
        calls.append(call)

        def take_back() -> None:
            calls[:] = [other for other in calls if other is not call]

        return take_back
