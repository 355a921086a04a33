"""Question and answer of `probe`: a format, whether a model fits it, what does not, and the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from plimsoll.diagnosis import Finding, grouped
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.errors import FormatError
from plimsoll.formats import FP32, BlockFormat, Format, Plan, get
from plimsoll.formats.catalogue import NATIVE, TARGETS
from plimsoll.results import NotebookRepr
from plimsoll.tensor_collections import BACKWARD
from plimsoll.text import counted, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The format of a probe."""

    name: str  # the name as the user gave it, in lower case: of a format, or of a target of `plan` such as "fp8"
    forward: Format | BlockFormat  # format of weights and activations
    backward: Format | BlockFormat  # format of gradients
    target: str | None  # the target of `plan` that tries this format first; None: there is none

    @classmethod
    def of(cls, fmt: object) -> "Question":
        """Return the question about a format, its name or dtype, or a target of `plan` ("fp8", "mxfp8", "mxfp6")."""
        key = fmt.lower() if isinstance(fmt, str) else ""
        if key in TARGETS:
            forward, backward = TARGETS[key][0]
            return cls(name=key, forward=forward, backward=backward, target=key)
        found = get(fmt)
        if isinstance(found, Format) and not found.signed:
            raise FormatError(
                f"probe: expected a format for values; got {found.name}, which holds scales. Ask for another."
            )
        backward = (isinstance(found, Format) and found.gradient_format) or found
        target = next((name for name, pairs in TARGETS.items() if pairs[0][0] == found), None)
        return cls(name=found.name, forward=found, backward=get(backward), target=target)

    @property
    def title(self) -> str:
        """The name as sentences have it."""
        return self.name.upper()

    @property
    def is_native(self) -> bool:
        """True if whole operations compute in the format, so that values have no scales."""
        return self.forward in NATIVE

    @property
    def is_exact(self) -> bool:
        """True if the format holds every FP32 value."""
        fmt = self.forward
        if isinstance(fmt, BlockFormat):
            return False
        return fmt.exponent_bits >= FP32.exponent_bits and fmt.mantissa_bits >= FP32.mantissa_bits

    @property
    def block(self) -> Literal[16, 32] | None:
        """Length of the blocks that must be recorded. None: none."""
        if not isinstance(self.forward, BlockFormat):
            return None
        return 32 if self.forward.block == 32 else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(NotebookRepr):
    """Answer of `plimsoll.probe`.

    Attributes:
        subject: Name of the model or file.
        format: Name of the format, or of the plan's target.
        findings: What does not fit, and notes, the worst first. `since_step` counts batches from 0.
        plan: A format for each module that multiplies matrices. None: none could be made.
        batches: Number of batches that were used.
        judged: The collections that were judged.
        not_judged: What was not, with the reason, as sentences.
        remarks: What is to be known about the answer, as sentences.
    """

    subject: str
    format: str
    findings: tuple[Finding, ...] = ()
    plan: Plan | None = None
    batches: int = 0
    judged: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if everything that was judged fits."""
        return not self._problems

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        name, title = shown(self.subject), self.format.upper()
        whose = f"The weights of {name}" if self.judged == ("weights",) else name
        verb = ("fit", "do not fit") if self.judged == ("weights",) else ("fits", "does not fit")
        if self.fits:
            return f"{whose} {verb[0]} {title}: nothing overflows or is lost{self._used}."
        modules = dict.fromkeys(module_of(finding, name) for finding in self._problems for name in finding.where)
        return f"{whose} {verb[1]} {title}: see {grouped(list(modules))}{self._used}."

    @property
    def next_step(self) -> str:
        """The next thing to do."""
        if any(finding.rule == Nonfinite.id for finding in self.findings):
            return "Find the first operation that makes a NaN or an infinity: pl.locate(closure)."
        if not self.batches:
            return "Run the model on data for the rest: pl.probe(model, batches, fmt, loss=loss)."
        if self.plan is None:
            return "Probe a format that a plan can be made for: plimsoll plan --help lists the targets."
        if not set(BACKWARD) <= set(self.judged):
            return "For the gradients, and a plan to train with, pass loss= or batches with labels."
        save = "Save the plan (-o plan.toml) and train with"
        if self.fits:
            return f'{save} pl.prepare(model, optimizer, precision="plan.toml").'
        kept = sum(fmt != self._forward for fmt in self.plan.formats.values())
        if kept:
            return f'{save} it, which keeps {counted(kept, "module")} wide: pl.prepare(..., precision="plan.toml").'
        return "Keep the modules of the findings in BF16 or FP32, and probe again."

    def __str__(self) -> str:
        """Return the answer as text: sentence, findings, plan, gaps and the next step."""
        lines = [self.sentence, *map(line_of, self.findings)]
        if self.plan is not None:
            lines += [f"Plan: {remark}" for remark in self.plan.remarks[:1]]
        return "\n".join([*lines, *self.not_judged, *self.remarks, f"Next: {self.next_step}"])

    def to_dict(self) -> dict[str, object]:
        """Return the answer as data that JSON can hold."""
        return {
            "subject": self.subject, "format": self.format, "fits": self.fits, "sentence": self.sentence,
            "batches": self.batches, "judged": list(self.judged), "not_judged": list(self.not_judged),
            "findings": [finding.to_dict() for finding in self.findings],
            "plan": None if self.plan is None else self.plan.to_dict(), "remarks": list(self.remarks),
            "next_step": self.next_step,
        }  # fmt: skip

    @property
    def _used(self) -> str:
        if not self.batches:
            return ""
        return f", in {self.batches} batch{'es' if self.batches > 1 else ''}"

    @property
    def _problems(self) -> Sequence[Finding]:
        return [finding for finding in self.findings if finding.severity != "info"]

    @property
    def _forward(self) -> str:
        return Question.of(self.format).forward.name


def module_of(finding: Finding, name: str) -> str:
    """Return the module, or the decision, that a location of a finding belongs to."""
    if finding.collection == "weights":
        return name.rpartition(".")[0] or name
    return name.rpartition(":")[0] or name


def line_of(finding: Finding) -> str:
    """Return a finding as a line: severity, rule, place, meaning and advice."""
    return f"{finding.severity}: {finding.rule} in {grouped(finding.where)}: {finding.meaning} {finding.advice}"
