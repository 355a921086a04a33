"""`Beside`: what something that goes along with a watch may use of it, as a guard does.

It reads what the watch knows of the training, hands over and flushes what it has measured, and records events of its
own. It ends with the watch: what `at_close` was given is called first of all when the watch closes.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from plimsoll.watch.names import clean
from plimsoll.watch.ranks.collector import Collector
from plimsoll.watch.session import Core
from plimsoll.watch.steps.step_boundary import Steps


class Beside:
    """A watch, from the side of what accompanies it."""

    def __init__(self, core: Core, steps: Steps) -> None:
        self._core, self._steps = core, steps

    @property
    def core(self) -> Core:
        """The hub, for `plimsoll.watch.session.contained`."""
        return self._core

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._core.writer.path

    @property
    def rank(self) -> int:
        """This process's number among `world`."""
        return self._core.ranks.rank

    @property
    def world(self) -> int:
        """How many processes there are."""
        return self._core.ranks.world

    @property
    def model(self) -> nn.Module | None:
        """The model, unwrapped; None once it is gone."""
        return self._core.model()

    @property
    def root(self) -> str:
        """What the root module is called."""
        return self._core.name

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that the watch reads, those that it has found by itself included."""
        return list(self._steps.parameters.optimizers)

    @property
    def step(self) -> int:
        """The number of the step that is under way, or has ended and is not followed by another yet."""
        return self._core.step

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
        """Ends the present step for good, if an optimizer or scaler has ended it: only between two steps."""
        self._steps.settle_if_ended()

    def hand_over(self) -> None:
        """Gives the numbers of the finished steps to the writer; on the thread that trains."""
        self._steps.recorder.send_facts()

    def flush(self, seconds: float) -> bool:
        """Waits until what was handed over is in the run's folder; on any thread. Whether it was done in time."""
        return self._core.writer.flush(seconds)

    def gather(self, seconds: float) -> bool:
        """The same on rank 0, of what the other ranks have flushed too, where it writes for them."""
        writer = self._core.writer
        return (not isinstance(writer, Collector) or writer.take_sent(seconds)) and writer.flush(seconds)

    def record(self, kind: str, message: str, details: Mapping[str, Any], *, warn: bool = False) -> None:
        """Records an event of the present step; with `warn` it is said too."""
        self._core.say(kind, message, warn=warn, **details)

    def failed(self, where: str, error: Exception) -> None:
        """Contains a failure: it is recorded, and said once."""
        self._core.failed(where, error)

    def at_close(self, call: Callable[[], None]) -> Callable[[], None]:
        """Has a function called when the watch closes; the function that is returned takes that back.

        It is kept until then, so it must not keep the model alive.
        """
        calls = self._core.at_close
        calls.append(call)

        def take_back() -> None:
            calls[:] = [other for other in calls if other is not call]

        return take_back
