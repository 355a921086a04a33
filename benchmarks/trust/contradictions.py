"""Pairs of findings of one run that cannot both be right, or that send the reader two ways."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plimsoll.diagnosis import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A kind of contradiction; `between` is asked of each ordered pair of a run's findings."""

    name: str
    between: Callable[[Finding, Finding], bool]


def _modules(finding: Finding) -> set[str]:
    """The modules, or parameters' owners, that a finding names."""
    return {re.sub(r"(:(input|output).*|\.(weight|bias)(:.*)?)$", "", name) for name in finding.where}


def _meet(one: Finding, other: Finding) -> bool:
    """Whether two findings hold at one step."""
    return one.since_step <= other.until_step and other.since_step <= one.until_step


def _same_layer(one: Finding, other: Finding) -> bool:
    return bool(_modules(one) & _modules(other)) and _meet(one, other)


def _dead_and_nonfinite(one: Finding, other: Finding) -> bool:
    follows = one.since_step >= other.since_step
    return one.rule == "dead-layer" and other.rule == "nonfinite" and other.severity == "alarm" and (
        follows or _same_layer(one, other)
    )  # fmt: skip


def _dead_and_flushed(one: Finding, other: Finding) -> bool:
    flushed = other.rule in {"underflow-high", "cast-flushes", "scale-low"} and other.severity != "info"
    return one.rule == "dead-layer" and flushed and _same_layer(one, other)


def _raise_while_skipping(one: Finding, other: Finding) -> bool:
    raised = one.rule == "scale-low" or "raise the loss scale" in one.advice.lower()
    nan = other.rule == "nonfinite" and other.severity == "alarm" and one.since_step >= other.since_step
    return raised and one.severity != "info" and nan


def _raise_and_lower(one: Finding, other: Finding) -> bool:
    raises = one.advice.lower().startswith("raise the loss scale")
    lowers = re.match(r"lower the (loss )?scale", other.advice.lower()) is not None
    loss_scale = "tensor" not in other.advice.lower()
    return raises and lowers and loss_scale and "info" not in {one.severity, other.severity} and _meet(one, other)


def _infinities_of_small_values(one: Finding, _: Finding) -> bool:
    largest = [v for k, v in one.evidence.items() if "absmax" in k and isinstance(v, int | float)]
    return one.rule == "activation-growth" and "infinities" in one.meaning and bool(largest) and max(largest) < 256


def _swallowed_and_moves_nothing(one: Finding, other: Finding) -> bool:
    rate = re.search(r"learning rate (is|of) (0|nan|inf)\b", f"{other.rule} {other.meaning}", re.IGNORECASE)
    return one.rule == "updates-swallowed" and one.severity != "info" and rate is not None


def _swallowed_and_unseen(one: Finding, other: Finding) -> bool:
    outside = re.search(r"in no optimizer|not in (any|the) optimizer", f"{other.rule} {other.meaning}", re.IGNORECASE)
    return one.rule == "updates-swallowed" and outside is not None and bool(set(one.where) & set(other.where))


def _two_spikes(one: Finding, other: Finding) -> bool:
    whole = one is not other and one.rule == other.rule == "loss-spike"
    return whole and one.severity == "alarm" and other.severity == "warning" and other.since_step > one.since_step


def _skipped_and_diverged(one: Finding, other: Finding) -> bool:
    every = other.rule == "nonfinite" and other.severity == "alarm"
    return one.rule in {"distribution-drift", "spike-forerunner"} and every and one.since_step > other.since_step


PAIRS: tuple[Pair, ...] = (
    Pair(name="dead-layer where values are NaN or Inf", between=_dead_and_nonfinite),
    Pair(name="dead-layer where the format flushed the values", between=_dead_and_flushed),
    Pair(name="raise the scale, while NaN or Inf is skipped or trained on", between=_raise_while_skipping),
    Pair(name="raise and lower the loss scale at one step", between=_raise_and_lower),
    Pair(name="infinities foretold of values under 256", between=_infinities_of_small_values),
    Pair(name="updates smaller than rounding, at a rate of 0, NaN or Inf", between=_swallowed_and_moves_nothing),
    Pair(name="updates smaller than rounding, of parameters in no optimizer", between=_swallowed_and_unseen),
    Pair(name="a spike that recovered, after a divergence that did not", between=_two_spikes),
    Pair(name="drift or forerunner begun after NaN or Inf", between=_skipped_and_diverged),
)


def contradictions(findings: Sequence[Finding]) -> list[str]:
    """The kinds of contradiction that a run's findings have, each once."""
    return [
        pair.name
        for pair in PAIRS
        if any(pair.between(one, other) for one in findings for other in findings)
    ]  # fmt: skip
