"""Inference of a cast: rounding, overflow, subnormals, zeros, Inf and NaN."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from plimsoll.certification.elements.observed import BETWEEN, Observed
from plimsoll.certification.probing.arrays import Values
from plimsoll.certification.probing.comparing import Mask, same
from plimsoll.certification.specifications import allowed_saturation
from plimsoll.formats.codec import Rounding

MODES: tuple[Rounding, ...] = ("nearest_even", "nearest_away", "toward_zero", "up", "down")
# Rules that no specification asks for and that implementations have all the same. Each says which values between two
# neighbours go to the larger magnitude.
_OTHER_RULES: dict[str, Callable[[Observed], Mask]] = {
    "nearest_odd": lambda o: (o.fraction > 0.5) | ((o.fraction == 0.5) & o.lower_is_even),
    "nearest_zero": lambda o: o.fraction > 0.5,
    "nearest_up": lambda o: (o.fraction > 0.5) | ((o.fraction == 0.5) & ~o.negative),
    "nearest_down": lambda o: (o.fraction > 0.5) | ((o.fraction == 0.5) & o.negative),
    "to_odd": lambda o: (o.fraction > 0) & o.lower_is_even,
    "away_from_zero": lambda o: o.fraction > 0,
}
IN_WORDS: dict[Rounding, str] = {
    "nearest_even": "to the nearest, ties to even",
    "nearest_away": "to the nearest, ties away from zero",
    "toward_zero": "toward zero",
    "up": "up",
    "down": "down",
    "stochastic": "to either neighbour at random",
}
_KNOWN = 0.9  # share of inexact inputs that a rule must explain to be named although others deviate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rounding of a cast."""

    name: str  # name of the rule, of `IN_WORDS`
    through: str | None = None  # name of a format that inputs are rounded to first, or None


def rounding_rule(observed: Observed) -> Rule:
    """Return the rule that explains most results of inputs between two normal values."""
    where = observed.normal & ~observed.exact & ~observed.failed
    best, explained = Rule(name="unknown"), _KNOWN
    for rule, predicted in _predictions(observed) if where.any() else ():
        share = float(np.mean(same(observed.y, predicted)[where]))
        if share > explained:
            best, explained = rule, share
        if share == 1.0:
            break
    return best


def _predictions(observed: Observed) -> Iterator[tuple[Rule, Values]]:
    """Yield each known rule with its results; only normal values matter."""
    fmt = observed.fmt
    saturate = allowed_saturation(fmt)[0]
    for mode in MODES:
        yield Rule(name=mode), observed.expected(mode, saturate)
    for name, goes_up in _OTHER_RULES.items():
        magnitude = np.where(goes_up(observed), observed.upper, observed.lower)
        yield Rule(name=name), observed.as_returned(np.where(observed.negative, -magnitude, magnitude))
    for name, between in BETWEEN.items():
        if between.mantissa_bits > fmt.mantissa_bits and between.bits > fmt.bits:
            first = between.decode(between.encode(np.where(observed.nan, 0.0, observed.x)))
            twice = fmt.decode(fmt.encode(first if fmt.signed else np.abs(first), "nearest_even", saturate))
            yield Rule(name="nearest_even", through=name), observed.as_returned(twice)


def facts(observed: Observed, rule: Rule) -> dict[str, object]:
    """Return what was inferred, by the names of `Certificate.inferred`."""
    result: dict[str, object] = {"rounding": rule.name, "rounded_through": rule.through}
    finite = observed.beyond("stochastic" if rule.name == "stochastic" else "nearest_even") & ~observed.beside_tie
    result["saturate"] = saturates(observed, finite)
    result["infinities"] = became(observed, observed.inf)
    if rule.name == "toward_zero":  # finite values stop at the largest one, whatever the overflow rule
        result["saturate"] = saturates(observed, observed.inf)
    result["nan"] = became(observed, observed.nan)
    if observed.fmt.signed:
        result["negative_zero"] = _negative_zero(observed)
    if observed.fmt.has_subnormals:
        result["subnormals"] = _flushed(observed, observed.subnormal)
        if (observed.tiny_input & (observed.lower > 0)).any():
            result["subnormal_inputs"] = _flushed(observed, observed.tiny_input)
    result["takes"] = ", ".join(batch.carrier for batch in observed.batches)
    returned = dict.fromkeys(batch.dtype for batch in observed.batches)
    own = all(batch.dtype == batch.carrier for batch in observed.batches)
    result["returns"] = "the input's dtype" if own else ", ".join(returned)
    return result


def saturates(observed: Observed, where: Mask) -> bool | str:
    """Return True for overflow to the largest value, False to Inf or NaN, or words."""
    kind = became(observed, where)
    if kind == "largest value":
        return True
    return False if kind == ("inf" if observed.fmt.has_inf else "nan") else kind


def became(observed: Observed, where: Mask) -> str:
    """Return in words what a mask's inputs became, by sign or bits if these differ."""
    where = where & (True if observed.fmt.signed else ~observed.negative)
    kinds = _kinds(observed)
    positive, negative = (set(kinds[where & side].tolist()) for side in (~observed.negative, observed.negative))
    if not positive | negative:
        return "not tried"
    if len(positive | negative) == 1:
        return (positive | negative).pop()
    if len(positive) == 1 and len(negative) == 1:
        return f"{positive.pop()} if positive, {negative.pop()} if negative"
    return f"{', '.join(sorted(positive | negative))}, by the value"


def _kinds(observed: Observed) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
    """Return for each result what it is, in words."""
    y, fmt = observed.y, observed.fmt
    largest = observed.as_returned(np.full(y.shape, fmt.max))
    conditions = [observed.failed, np.isnan(y), np.isinf(y), np.abs(y) == largest, y == 0]
    return np.select(conditions, ["an error", "nan", "inf", "largest value", "zero"], "another value")


def _negative_zero(observed: Observed) -> str:
    where = observed.negative & observed.finite & (observed.magnitude == 0) & ~observed.failed
    if not where.any():
        return "not tried"
    return "kept" if bool(np.all(np.signbit(observed.y[where]))) else "becomes +0"


def _flushed(observed: Observed, where: Mask) -> str:
    """Return "kept", or which inputs became zero that no rounding takes to zero."""
    # What rounds up to the smallest normal value is one, also where subnormal results are flushed.
    becomes_normal = (observed.fraction > 0) & (observed.upper >= observed.fmt.smallest_normal)
    where = where & (observed.lower > 0) & ~becomes_normal & ~observed.failed
    zero = observed.y == 0
    sides = {"positive": where & ~observed.negative, "negative": where & observed.negative}
    flushed = [sign for sign, side in sides.items() if side.any() and bool(np.all(zero[side]))]
    if not where.any():
        return "not tried"
    if not flushed:
        return "flushed to zero in part" if bool(np.any(zero[where])) else "kept"
    return f"flushed to zero if {flushed[0]}" if len(flushed) == 1 else "flushed to zero"
