"""Requirements of a cast to an element format, one for each class of inputs."""

import numpy as np

from plimsoll.certification.certificate import FNUZ, IEEE_754, NVFP4_RECIPE, OCP_MX, OFP8, Outcome
from plimsoll.certification.registry import requirement
from plimsoll.certification.trial import Subject, Trial
from plimsoll.formats import FP16, Format


# No specification says how values become E8M0, whose only use is as a scale: it is unsigned, and its rounding is
# inferred only.
def _deterministic(subject: Subject) -> bool:
    return subject.element.signed and subject.rounding != "stochastic"


def _to_nearest(subject: Subject) -> bool:
    return subject.element.signed and subject.rounding.startswith("nearest")


# What becomes of the largest values of a block follows from its scale: requirements/blocks.py.
def _element(subject: Subject) -> bool:
    return isinstance(subject.fmt, Format) and subject.fmt.signed


@requirement(
    "exact",
    "Zero and the normal values of the format stay as they are.",
    sections={IEEE_754: "5.4.2", OFP8: "5.2", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
)
def exact(trial: Trial) -> Outcome:
    """Try all values of the format but subnormal ones and -0, which have rows of their own."""
    observed = trial.observed
    where = observed.exact & ~observed.subnormal & ~(observed.negative & (observed.x == 0))
    return observed.compare(where, observed.as_returned(observed.x))


@requirement(
    "between",
    "A value between two normal values of the format is rounded {rounding}.",
    sections={IEEE_754: "4.3", OFP8: "5.2", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
    applies=_deterministic,
)
def between(trial: Trial) -> Outcome:
    """Try values that are not half-way."""
    observed = trial.observed
    where = observed.normal & ~observed.exact & ~observed.tie & ~trial.side_lost
    return observed.compare(where, trial.expected)


@requirement(
    "ties",
    "A value half-way between two normal values is rounded {rounding}.",
    sections={IEEE_754: "4.3.1", OFP8: "5.2", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
    applies=_deterministic,
)
def ties(trial: Trial) -> Outcome:
    """Try values half-way between two normal values."""
    return trial.observed.compare(trial.observed.normal & trial.observed.tie, trial.expected)


@requirement(
    "rounded-once",
    "Values are rounded once: near half-way, where a step through FP16 or BF16 would lose it, the side counts.",
    sections={IEEE_754: "4.3", OFP8: "5.2", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
    applies=_to_nearest,
)
def rounded_once(trial: Trial) -> Outcome:
    """Try values next to ties, in every range. What becomes something else than the tie does is for other rows."""
    return trial.observed.judge(trial.observed.beside_tie, ~trial.side_lost, trial.expected)


@requirement(
    "subnormal-results",
    "Results below the smallest normal value are rounded like others, and not flushed to zero.",
    sections={IEEE_754: "3.3", OFP8: "5.1", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
    applies=lambda subject: _deterministic(subject) and subject.element.has_subnormals,
)
def subnormal_results(trial: Trial) -> Outcome:
    """Try values in the range of subnormals, down to those that become zero."""
    observed = trial.observed
    where = observed.subnormal & ~trial.side_lost & ~(observed.tiny_input & (trial.expected != 0))
    return observed.compare(where, trial.expected, sign_of_zero=False)


@requirement(
    "subnormal-inputs",
    "Inputs that are subnormal in their own dtype count as what they are.",
    sections={IEEE_754: "3.3", OFP8: "5.2", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
    # FP16 is the narrowest dtype of inputs: where its subnormals become zero there is nothing to see.
    applies=lambda subject: _deterministic(subject) and subject.element.smallest_subnormal < FP16.smallest_normal,
)
def subnormal_inputs(trial: Trial) -> Outcome:
    """Try inputs that are subnormal in their own dtype and whose results are not zero."""
    observed = trial.observed
    where = observed.tiny_input & observed.in_range & ~trial.side_lost & (trial.expected != 0)
    return observed.compare(where, trial.expected)


@requirement(
    "top",
    "Values above the largest one, as far as they round to it, become the largest one.",
    sections={IEEE_754: "7.4", OFP8: "5.2", OCP_MX: "6.3", FNUZ: ""},
    applies=lambda subject: _element(subject) and _to_nearest(subject),
)
def top(trial: Trial) -> Outcome:
    """Try values between the largest value and the point where overflow begins."""
    observed = trial.observed
    largest = observed.as_returned(np.where(observed.negative, -observed.fmt.max, observed.fmt.max))
    return observed.compare(observed.top & ~trial.side_lost, largest)


@requirement(
    "overflow",
    "Values beyond the largest one overflow: they become {overflow}.",
    sections={IEEE_754: "7.4", OFP8: "5.2, table 3", OCP_MX: "6.3", FNUZ: ""},
    applies=_element,
)
def overflow(trial: Trial) -> Outcome:
    """Try finite values beyond the point where overflow begins."""
    where = trial.observed.beyond(trial.subject.rounding) & ~trial.side_lost
    return trial.observed.compare(where, trial.expected)


@requirement(
    "infinities",
    "Infinities become what overflow gives: {overflow}.",
    sections={IEEE_754: "6.1", OFP8: "5.2, table 3", FNUZ: ""},
    applies=_element,
)
def infinities(trial: Trial) -> Outcome:
    """Try both infinities."""
    return trial.observed.compare(trial.observed.inf, trial.expected)


@requirement(
    "nan",
    "NaN of either sign, quiet or signalling, stays NaN.",
    sections={IEEE_754: "6.2", OFP8: "5.2, table 3", OCP_MX: "5.3", FNUZ: ""},
    applies=lambda subject: isinstance(subject.fmt, Format) and subject.fmt.has_nan,
)
def nan(trial: Trial) -> Outcome:
    """Try NaN of every payload."""
    return trial.observed.compare(trial.observed.nan, trial.observed.x)


@requirement(
    "negative-zero",
    "A zero keeps its sign: -0, and a negative value that rounds to zero.",
    sections={IEEE_754: "6.3", OFP8: "5.1", OCP_MX: "5.3", NVFP4_RECIPE: ""},
    applies=lambda subject: subject.element.has_negative_zero,
)
def negative_zero(trial: Trial) -> Outcome:
    """Try -0, and negative values whose results are zero."""
    observed = trial.observed
    zero = observed.negative & observed.finite & (observed.magnitude == 0)
    rounded = observed.negative & observed.subnormal & (observed.y == 0)
    return observed.judge(zero | rounded, (observed.y == 0) & np.signbit(observed.y), np.full(observed.y.shape, -0.0))
