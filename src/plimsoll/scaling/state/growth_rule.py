"""The dynamic scaler's rule, as one function of its state: written once, for Python numbers and for tensors.

On the host it costs some comparisons; on a device it is a few kernels and waits for nothing. `select` is what differs:
``a if condition else b`` there, `torch.where` here.

A scale is *proven* once it has held for as many clean steps as regrowth waits. What lowers a proven scale is a burst:
the scale regrows to where it was. What lowers a scale that has just grown has shown where the limit lies now: the scale
regrows no further than to below it, and goes on by the growth interval.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from plimsoll.scaling.hysteresis import Hysteresis

# A number is a Python number or a tensor of one element; truth values are bools or such tensors.
Number = Any
Select = Callable[[Any, Any, Any], Any]


class RuleState(NamedTuple):
    """What the rule remembers from step to step."""

    scale: Number
    clean: Number  # steps without overflow since the last overflow or growth
    overflows: Number  # counted by the hysteresis
    ceiling: Number  # what the scale regrows to; never below the scale
    unproven: Number  # whether the scale has grown and not held since


class Rule(NamedTuple):
    """The numbers that the rule works by."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    regrowth_interval: int | None
    hysteresis: Hysteresis
    min_scale: float
    max_scale: float


def advance(state: RuleState, overflowed: Number, rule: Rule, select: Select) -> RuleState:
    """The state after one more step."""
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
