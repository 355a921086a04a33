"""Dynamic loss scale, lowered on overflow and raised after clean steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from plimsoll import checks
from plimsoll.scaling import arguments
from plimsoll.scaling.base import FLOOR, LossScaler

# -- rule: a function of its state, in numbers or tensors --------------------------------------------------------------

# On the host the rule costs a few comparisons. On a device it is a few kernels and waits for nothing. Only `select`
# differs: ``a if condition else b`` on the host, `torch.where` on a device.

Kind = Literal["consecutive", "windowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """Number of overflows after which the scale is lowered.

    A step with an overflow is skipped whether or not the scale is lowered. DeepSpeed's scale grows one clean step
    later: DeepSpeed counts neither the first clean step after an overflow nor the first of the training.

    Args:
        overflows: The overflow that brings the count to this number lowers the scale, as does each one after it.
            Default: 1.
        kind: ``"consecutive"``: every clean step resets the count, so that single hard batches do not lower the scale.
            DeepSpeed counts so with ``consecutive_hysteresis``. ``"windowed"``: each end of a growth interval does,
            so that overflows add up over a growth interval, as in Megatron-LM and in DeepSpeed without
            ``consecutive_hysteresis``. Default: ``"consecutive"``.

    Raises:
        ArgumentError: An argument is out of range.
    """

    overflows: int = 1
    kind: Kind = "consecutive"

    def __post_init__(self) -> None:
        remedy = "Use 1 to lower the scale at every overflow."
        checks.integer("Hysteresis", "overflows", self.overflows, low=1, remedy=remedy)
        checks.one_of("Hysteresis", "kind", self.kind, get_args(Kind))


# A number is a Python number or a tensor of one element; truth values are bools or such tensors.
Number = Any
Select = Callable[[Any, Any, Any], Any]


class RuleState(NamedTuple):
    """State of the rule from step to step."""

    scale: Number
    clean: Number  # steps without overflow since the last overflow, or the last end of an interval
    overflows: Number  # counted by the hysteresis
    ceiling: Number  # scale to regrow to, never below the scale
    unproven: Number  # whether the scale has grown, and not been proven since


class Rule(NamedTuple):
    """Settings of the rule."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    regrowth_interval: int | None
    hysteresis: Hysteresis
    min_scale: float
    max_scale: float


def advance(state: RuleState, overflowed: Number, rule: Rule, select: Select) -> RuleState:
    """Return the state after one more step."""
    clean, lowered = _after_clean(state, rule, select), _after_overflow(state, rule, select)
    return RuleState(*(select(overflowed, there, here) for there, here in zip(lowered, clean, strict=True)))


def _after_clean(state: RuleState, rule: Rule, select: Select) -> RuleState:
    clean = state.clean + 1
    regrows = state.scale < state.ceiling
    interval = rule.growth_interval if rule.regrowth_interval is None else rule.regrowth_interval
    due = clean >= select(regrows, interval, rule.growth_interval)
    grown = state.scale * rule.growth_factor
    grown = select(regrows & (grown > state.ceiling), state.ceiling, grown)
    grows = due & (grown <= rule.max_scale)
    scale = select(grows, grown, state.scale)
    forgets = due if rule.hysteresis.kind == "windowed" else clean > 0
    return RuleState(
        scale=scale,
        clean=select(due, 0, clean),
        overflows=select(forgets, 0, state.overflows),
        ceiling=select(scale > state.ceiling, scale, state.ceiling),
        unproven=grows | (state.unproven & (clean < interval)),
    )


# A scale is *proven* after as many clean steps as regrowth waits. An overflow at a proven scale counts as a burst,
# after which the scale regrows to its old value. An overflow soon after a growth shows the new limit: the scale regrows
# only to below the limit, and grows further by the growth interval.
def _after_overflow(state: RuleState, rule: Rule, select: Select) -> RuleState:
    limit = rule.hysteresis.overflows
    overflows = select(state.overflows < limit, state.overflows + 1, state.overflows)
    backs_off = overflows >= limit
    lowered = state.scale * rule.backoff_factor
    lowered = select(lowered < rule.min_scale, rule.min_scale, lowered)
    scale = select(backs_off, lowered, state.scale)
    limits = backs_off & state.unproven if rule.regrowth_interval is not None else backs_off
    return RuleState(
        scale=scale,
        clean=select(backs_off, 0, 0),
        overflows=overflows,
        ceiling=select(limits, scale, state.ceiling),
        unproven=state.unproven & (overflows < limit),
    )


# -- scaler ------------------------------------------------------------------------------------------------------------


class DynamicScaler(LossScaler, name="dynamic"):
    """Rule of `torch.amp.GradScaler` with bounds, hysteresis and fast regrowth.

    A step with a non-finite gradient is skipped, and the scale is multiplied by `backoff_factor`. After
    `growth_interval` clean steps in a row it is multiplied by `growth_factor`. The first six arguments are those of
    GradScaler, in the same positions.

    Args:
        device: Type of the device of the loss. Default: ``"cuda"``.
        init_scale: First scale. Default: 2**16.
        growth_factor: Factor above 1. Default: 2.
        backoff_factor: Factor between 0 and 1. Default: 0.5.
        growth_interval: Number of clean steps before the scale grows. Default: 2000.
        enabled: Whether anything is scaled. Default: yes.
        min_scale: Smallest scale. Default: 2**-14.
        max_scale: Largest scale. A growth that would exceed it is left out. Default: the largest float32.
        hysteresis: Number of overflows in a row that lower the scale, or a `Hysteresis`. Default: 1.
        regrowth_interval: After a burst of hard batches the scale grows each time after this number of clean steps, up
            to its value before the burst. An overflow within this number of clean steps after a growth shows the
            new limit: the scale is lowered, and grows by `growth_interval` from there, so that gradients that have
            become larger do not cost one step in ten. None: GradScaler's rule, exactly except for the bounds. Default:
            10.
        process_group: Ranks that skip together and have one scale. Not needed for DDP, whose gradients are the same on
            all ranks, nor for DTensor gradients (FSDP2, tensor parallel), whose ranks are known.
        sync_free: Whether the host never waits for the device, neither in `step` nor in `update`. Optimizers that
            cannot skip on the device are refused. Default: no.

    Raises:
        ArgumentError: An argument is out of range.

    >>> import torch, plimsoll as pl
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer, scaler = torch.optim.SGD([weight], lr=0.5), pl.scaling.DynamicScaler("cpu")
    >>> scaler.scale((weight * torch.tensor([1e38, 1.0])).sum()).backward()
    >>> scaler.step(optimizer); scaler.update()
    >>> scaler.get_scale(), scaler.outcome.reason
    (32768.0, 'non-finite gradients in 1 of 2 values of parameter 0 in group 0 of SGD')
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = FLOOR,
        max_scale: float = arguments.LARGEST,
        hysteresis: int | Hysteresis = 1,
        regrowth_interval: int | None = 10,
        process_group: Any = None,
        sync_free: bool = False,
    ) -> None:
        name = type(self).__name__
        super().__init__(
            device,
            init_scale,
            enabled=enabled,
            min_scale=min_scale,
            max_scale=max_scale,
            process_group=process_group,
            sync_free=sync_free,
        )
        self._growth_factor = arguments.check_growth(name, growth_factor)
        self._backoff_factor = arguments.check_backoff(name, backoff_factor)
        self._growth_interval = arguments.check_interval(name, "growth_interval", growth_interval)
        if regrowth_interval is not None:
            arguments.check_interval(name, "regrowth_interval", regrowth_interval)
        self._regrowth_interval = regrowth_interval
        self._hysteresis = _hysteresis(name, hysteresis)
        self._init_memory = (0.0, self._init_scale, 0.0)
        self._memory: Tensor | None = None

    def _start(self, device: torch.device) -> None:
        self._memory = torch.zeros(3, dtype=torch.float32, device=device)
        for place, value in enumerate(self._init_memory):
            self._memory[place].fill_(value)  # a number is filled in without waiting, while a list would be copied

    def _scale_set(self) -> None:
        scale, memory = cast("Tensor", self._scale), cast("Tensor", self._memory)
        memory.zero_()
        memory[1].copy_(scale)

    def _next_scale(self, found_inf: Tensor) -> float | Tensor:
        if found_inf.device.type == "cpu" and not self._sync_free:
            return self._advance_on_host(found_inf)
        return self._advance_on_device(found_inf)

    def _rule(self) -> Rule:
        interval = self._regrowth_interval
        return Rule(
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            regrowth_interval=None if interval is None else min(interval, self._growth_interval),
            hysteresis=self._hysteresis,
            min_scale=self._min_scale,
            max_scale=self._max_scale,
        )

    def _advance_on_host(self, found_inf: Tensor) -> float:
        """Return the next scale, computed with Python numbers."""
        # The tensors are on the host, and Python numbers are some tens of microseconds faster than their operations.
        scale, tracker = self._check_scale_growth_tracker("update")
        memory = cast("Tensor", self._memory)
        before = _numbers(memory)
        state = RuleState(scale.item(), tracker.item(), before[0], before[1], before[2] > 0)
        after = advance(state, found_inf.item() > 0, self._rule(), _select)
        tracker.fill_(after.clean)
        remembered = (after.overflows, after.ceiling, float(after.unproven))
        if remembered != before:
            memory.copy_(torch.tensor(remembered, device="cpu"))
        return float(after.scale)

    def _advance_on_device(self, found_inf: Tensor) -> Tensor:
        scale, tracker = self._check_scale_growth_tracker("update")
        memory = cast("Tensor", self._memory)
        wide = torch.float32 if scale.device.type == "mps" else torch.float64
        overflows, ceiling, unproven = memory.to(wide).unbind()
        state = RuleState(scale.to(wide), tracker, overflows, ceiling, unproven > 0)
        after = advance(state, found_inf > 0, self._rule(), torch.where)
        tracker.copy_(after.clean)
        memory.copy_(torch.stack([after.overflows, after.ceiling, after.unproven.to(wide)]))
        return cast("Tensor", after.scale)

    def _save(self) -> dict[str, Any]:
        memory = self._init_memory if self._memory is None else _numbers(self._memory)
        return {
            "regrowth_interval": self._regrowth_interval,
            "hysteresis": {"overflows": self._hysteresis.overflows, "kind": self._hysteresis.kind},
            "memory": list(memory),
        }

    def _load(self, extra: dict[str, Any]) -> None:
        if "memory" in extra:
            interval = extra["regrowth_interval"]
            check = arguments.check_interval
            self._regrowth_interval = None if interval is None else check("load", "regrowth_interval", interval)
            self._hysteresis = Hysteresis(**extra["hysteresis"])
        overflows, ceiling, unproven = extra.get("memory", (0.0, self._init_scale, 0.0))
        self._init_memory = (float(overflows), float(ceiling), float(unproven))
        if not all(math.isfinite(number) and number >= 0 for number in self._init_memory):
            raise ValueError(f"memory holds finite numbers of 0 or more; got {self._init_memory}")
        if self._memory is not None:
            self._memory.copy_(torch.tensor(self._init_memory, device="cpu"))


def _numbers(memory: Tensor) -> tuple[float, float, float]:
    return tuple(cast("list[float]", memory.tolist()))  # type: ignore[return-value]


def _select(condition: bool, there: Any, here: Any) -> Any:
    return there if condition else here


def _hysteresis(name: str, hysteresis: int | Hysteresis) -> Hysteresis:
    if isinstance(hysteresis, Hysteresis):
        return hysteresis
    remedy = "Use 1 to lower the scale at every overflow, or a Hysteresis."
    return Hysteresis(overflows=checks.integer(name, "hysteresis", hysteresis, low=1, remedy=remedy))
