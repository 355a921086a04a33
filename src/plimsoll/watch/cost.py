"""Cost of watching a training, measured while it trains."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.tensor_collections import NAMES
from plimsoll.watch.hooks.torch_hooks import has_compiled
from plimsoll.watch.steps.step_boundary import Steps

EVERYTHING, FLOOR = "everything", "one aminmax of each tensor"
NEVER = 10**9  # an interval, in steps, that no training reaches
BUDGETS = (0.01, 0.02, 0.05)  # parts of the training's time
_IDLE = "nothing"
_FLUSH_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Extra time of one step in which something is sampled.

    Attributes:
        name: The collection, `EVERYTHING` or `FLOOR`.
        extra_seconds: Median over rounds of the difference to the step without a sample of the same round.
        extra: Median over rounds of the same, as a part of the step without a sample.
        spread: Half the distance between the quartiles of that part.
        of_floor: `extra_seconds` as a multiple of the floor's; None without a floor, or one of zero.
    """

    name: str
    extra_seconds: float
    extra: float
    spread: float
    of_floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """Cost of watching one training.

    Attributes:
        model: Class of the model.
        parameters: Number of its values.
        threads: Threads of torch.
        rounds: Rounds that were measured.
        step_seconds: Median of a step in which nothing is sampled.
        costs: The floor where it was measured, each collection, then everything.
        every: By budget, as a part of the training's time, the interval at which sampling everything stays within it.
    """

    model: str
    parameters: int
    threads: int
    rounds: int
    step_seconds: float
    costs: tuple[Cost, ...]
    every: Mapping[str, int]


class CostProbe:
    """Measurement of what a watch costs, from one optimizer step to the next.

    Args:
        steps: The steps of a watch that collects everything and is never due by its schedule.
        optimizer: The optimizer whose steps are timed.
        rounds: Rounds to measure. One more goes first and is not counted: it compiles and fills caches.
        done: Called with the report inside the last optimizer step. What it raises leaves the training.
    """

    def __init__(self, steps: Steps, optimizer: Any, rounds: int, done: Callable[[CostReport], None]) -> None:
        self._steps, self._session, self._rounds, self._done = steps, steps.session, rounds, done
        self._floor = _Floor(steps)
        self._order = random.Random(0)  # the same in each process of a training
        self._left: list[str] = []  # kinds of step still to come in this round
        self._kind = _IDLE
        self._is_second = False
        self._seconds: dict[str, list[float]] = {}
        # For good: torch iterates over these hooks while they run.
        optimizer.register_step_post_hook(self._stepped)
        self._start = 0.0
        self.finished = False

    def _stepped(self, *_: object) -> None:
        if self.finished:
            return
        seconds = self._now() - self._start
        if self._is_second:
            self._seconds.setdefault(self._kind, []).append(seconds)
            # The worker's share of a sample must not fall on the next kind of step.
            self._session.writer.flush(_FLUSH_SECONDS)
            if not self._left and len(self._seconds[self._kind]) > self._rounds:
                self._finish()
                return
        if self._is_second or not self._start:
            self._next_kind()
        else:
            self._is_second = True
        self._ask()
        self._start = self._now()

    # `CostProbe` takes over the schedule of a watch. It samples nothing, one collection, or all of them, in pairs of
    # consecutive steps, and times the second of each pair: the background work that the first leaves behind runs into
    # it, as in a run that samples every step. All kinds of step run once a round, in another order each round, and an
    # extra time is a difference between two steps of one round. So a slow moment of the machine falls on all kinds
    # alike.
    def _next_kind(self) -> None:
        if not self._left:
            # What is compiled would be compiled again with the floor's hooks.
            kinds = [_IDLE, *NAMES, EVERYTHING, *([] if has_compiled() else [FLOOR])]
            self._left = self._order.sample(kinds, len(kinds))
        self._kind, self._is_second = self._left.pop(), False
        self._floor.remove()
        if self._kind == FLOOR:
            self._floor.attach()

    def _ask(self) -> None:
        """Sample the next step as its kind says."""
        if self._kind not in (_IDLE, FLOOR):
            names = NAMES if self._kind == EVERYTHING else (self._kind,)
            self._session.settings = replace(self._session.settings, intervals=dict.fromkeys(names, NEVER))
            self._steps.request(1)

    def _now(self) -> float:
        """The time, once the devices have done what they were given."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _finish(self) -> None:
        self.finished = True
        self._floor.remove()
        self._done(self._report())

    def _report(self) -> CostReport:
        model = self._session.model()
        # The floor has fewer where code was compiled meanwhile.
        seconds = {kind: values[1:] for kind, values in self._seconds.items() if len(values) > self._rounds}
        idle = seconds[_IDLE]
        extra = {kind: [a - b for a, b in zip(values, idle, strict=True)] for kind, values in seconds.items()}
        floor = statistics.median(extra[FLOOR]) if FLOOR in extra else 0.0
        costs = [_cost(kind, extra[kind], idle, floor) for kind in (FLOOR, *NAMES, EVERYTHING) if kind in extra]
        return CostReport(
            model=type(model).__name__,
            parameters=0 if model is None else sum(p.numel() for p in model.parameters()),
            threads=torch.get_num_threads(),
            rounds=self._rounds,
            step_seconds=statistics.median(idle),
            costs=tuple(costs),
            every={f"{budget:g}": interval(costs[-1].extra, budget) for budget in BUDGETS},
        )


def interval(extra: float, budget: float) -> int:
    """Return the smallest interval at which the samples' time keeps to `budget`.

    Args:
        extra: Extra time of a sampled step, as a part of a step without a sample.
        budget: Largest extra time of all steps together, as a part of their time without samples.
    """
    return max(1, math.ceil(extra / budget - 1e-9))


def _cost(name: str, extra: Sequence[float], idle: Sequence[float], floor: float) -> Cost:
    parts = [more / step for more, step in zip(extra, idle, strict=True)]
    low, _, high = statistics.quantiles(parts, n=4) if len(parts) > 1 else parts * 3
    seconds = statistics.median(extra)
    return Cost(
        name=name,
        extra_seconds=seconds,
        extra=statistics.median(parts),
        spread=(high - low) / 2,
        of_floor=seconds / floor if floor > 0 else None,
    )


# The floor is one `torch.aminmax` of each tensor that a sample of all collections measures, but the updates, which no
# tensor of the training holds. Any statistic of every value has to read the values once, so no watcher costs less.
class _Floor:
    """Hooks that take `torch.aminmax` of each tensor that a sample measures, once."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._hooks: list[Any] = []  # of modules, while the floor is measured
        self._seen: dict[int, Tensor] = {}
        for optimizer in steps.parameters.optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def attach(self) -> None:
        """Measure from here on."""
        model = self._steps.session.model()
        for module in () if model is None else model.modules():
            self._hooks.append(module.register_forward_hook(self._after_forward))

    def remove(self) -> None:
        """Stop measuring."""
        while self._hooks:
            self._hooks.pop().remove()
        self._seen.clear()

    def _take(self, x: Tensor | None) -> None:
        if x is not None and x.is_floating_point() and x.numel() and x.layout == torch.strided:
            torch.aminmax(x.detach())

    def _after_forward(self, _module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        outputs = cast("tuple[object, ...]", output) if isinstance(output, tuple) else (output,)
        for x in (*inputs, *outputs):
            if isinstance(x, Tensor) and self._seen.get(id(x)) is not x:
                self._seen[id(x)] = x
                self._take(x)
                if x.requires_grad:
                    x.register_hook(self._take)

    def _before_step(self, optimizer: Any, *_: object) -> None:
        self._seen.clear()
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if self._hooks):
            self._take(parameter)
            if parameter.grad is not None:
                self._take(parameter.grad)

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if self._hooks:
            states: list[dict[str, Any]] = list(optimizer.state.values())
            for x in [x for state in states for x in state.values() if isinstance(x, Tensor)]:
                self._take(x)
