"""`Trial`: a function under test with evidence, collected when rows need it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plimsoll.certification.blocks import RULES, BlockTrials, element_call, rule_words
from plimsoll.certification.certificate import Kind, allowed_saturation
from plimsoll.certification.codes import Decoded, UnpackConvention
from plimsoll.certification.elements.inference import IN_WORDS, MODES, Draws, Rule, rounding_rule
from plimsoll.certification.elements.observed import Observed, observe
from plimsoll.certification.probing.arrays import CallFailedError, Mask, Values, element_of, same
from plimsoll.certification.probing.caller import Caller, OutOfTimeError
from plimsoll.certification.probing.conventions import CastConvention
from plimsoll.certification.reductions.observed import Reduction
from plimsoll.certification.reductions.reducer import Reducer
from plimsoll.formats import BlockFormat, Format
from plimsoll.formats.codec import Rounding


class NotTriedError(Exception):
    """A check that cannot be made; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The function's format and kind, and the choices that it is held to."""

    fmt: Format | BlockFormat  # the number format
    kind: Kind  # kind of the function
    rounding: Rounding  # the rounding mode that it is held to
    scale_rule: str | None  # the rule for scales that it is held to, by request; None for that of its specification

    @property
    def held_to_scale_rule(self) -> str:
        """The rule for scales to hold the function to; default: its specification's."""
        return self.scale_rule or RULES[0]

    @property
    def blocks(self) -> BlockFormat | None:
        """The block format; None for an element format."""
        return self.fmt if isinstance(self.fmt, BlockFormat) else None

    @property
    def accumulator_bits(self) -> int:
        """Bits that partial sums must have: FP32's significand, or the format's if more."""
        return max(24, self.element.mantissa_bits + 1)

    @property
    def element(self) -> Format:
        """The format of single values."""
        return element_of(self.fmt)


class Trial:
    """A function under test, and all that was found of it."""

    def __init__(
        self, subject: Subject, caller: Caller, convention: CastConvention | UnpackConvention | Reducer
    ) -> None:
        self.subject = subject
        self.caller = caller
        self.not_tried: list[str] = []  # sentences on what was not tried
        self._convention = convention

    @property
    def convention(self) -> CastConvention:
        """The function as a cast or a pack."""
        assert isinstance(self._convention, CastConvention), self.subject.kind
        return self._convention

    @property
    def unpack(self) -> UnpackConvention:
        """The function as an unpack."""
        assert isinstance(self._convention, UnpackConvention), self.subject.kind
        return self._convention

    @cached_property
    def reduction(self) -> Reduction:
        """The function as a sum or a product."""
        assert isinstance(self._convention, Reducer), self.subject.kind
        return Reduction(self._convention, self.caller)

    @cached_property
    def decoded(self) -> Decoded:
        """Results of an unpack for all codes."""
        return Decoded(self.unpack, self.subject.fmt)

    @cached_property
    def observed(self) -> Observed:
        """Results of single values."""
        call, limit = element_call(self.convention, self.subject.fmt)
        observed, skipped = observe(self.caller, call, self.subject.element, limit)
        self.not_tried += skipped
        return observed

    @cached_property
    def rule(self) -> Rule:
        """The rule by which single values are rounded."""
        return Rule(name="stochastic") if self.subject.rounding == "stochastic" else rounding_rule(self.observed)

    @cached_property
    def saturate(self) -> bool:
        """Of the choices that the specification allows, the one that explains more results."""
        observed, choices = self.observed, allowed_saturation(self.subject.element)
        finite = observed.beyond(self.subject.rounding)
        # Toward zero every finite value stops at the largest one, so that only infinities show the choice.
        where = observed.inf if self.rule.name == "toward_zero" or not finite.any() else finite
        right = [np.count_nonzero(same(observed.y, self._expected(choice))[where]) for choice in choices]
        return choices[int(np.argmax(right))]

    @cached_property
    def expected(self) -> Values:
        """The conforming results of single values."""
        return self._expected(self.saturate)

    @cached_property
    def side_lost(self) -> Mask:
        """Values beside a tie with the tie's results: they were rounded before."""
        if not self.subject.rounding.startswith("nearest"):
            return np.zeros(len(self.observed.x), np.bool_)
        return self.observed.side_lost(self.saturate)

    def _expected(self, saturate: bool) -> Values:
        # What lies beyond the largest value overflows in stochastic rounding too.
        rounding = "nearest_even" if self.subject.rounding == "stochastic" else self.subject.rounding
        return self.observed.expected(rounding, saturate)

    @cached_property
    def draws(self) -> Draws:
        """Repeated results of the same values."""
        call, _ = element_call(self.convention, self.subject.fmt)
        return Draws(self.caller, call, self.subject.element, self.carriers)

    @property
    def carriers(self) -> list[str]:
        """Dtypes that the function takes."""
        return [batch.carrier for batch in self.observed.batches]

    @cached_property
    def blocks(self) -> BlockTrials:
        """Results of whole blocks."""
        fmt = self.subject.blocks
        assert fmt is not None
        modes: tuple[Rounding, ...] = tuple(mode for mode in MODES if mode == self.rule.name)
        return BlockTrials(self.convention, fmt, self.carriers, modes or ("down", "up"))

    def sentence(self, says: str) -> str:
        """Return a requirement's sentence, with this function's words filled in."""
        blocks, element = self.subject.blocks, self.subject.element
        words = {
            "rounding": IN_WORDS[self.subject.rounding],
            "scale_rule": rule_words(blocks, self.subject.held_to_scale_rule) if blocks is not None else "",
            "accumulator_bits": str(self.subject.accumulator_bits),
        }
        if "{overflow}" in says:  # looked up only if needed: it is inferred from all results
            try:
                infinity = "Inf" if element.has_inf else "NaN"
                words["overflow"] = "the largest value" if self.saturate else infinity
            except (CallFailedError, OutOfTimeError):
                words["overflow"] = "what their specification says"
        return says.format(**words)
