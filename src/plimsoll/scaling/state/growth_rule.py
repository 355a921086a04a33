"""Rule of the dynamic scaler: a function of its state, in numbers or tensors.

On the host the rule costs a few comparisons. On a device it is a few kernels and waits for nothing. Only `select`
differs: ``a if condition else b`` on the host, `torch.where` on a device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from plimsoll import checks

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
            DeepSpeed counts so with ``consecutive_hysteresis``. ``"windowed"``: growth of the scale resets the count,
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
    clean: Number  # steps without overflow since the last overflow or growth
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
