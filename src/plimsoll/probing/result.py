"""`Probe`: whether a model fits a format, what does not, and the plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.diagnosis import Finding, grouped
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.formats import Plan
from plimsoll.results import NotebookRepr
from plimsoll.tensor_collections import BACKWARD
from plimsoll.text import counted, shown


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
        from plimsoll.probing.question import Question

        return Question.of(self.format).forward.name


def module_of(finding: Finding, name: str) -> str:
    """Return the module, or the decision, that a location of a finding belongs to."""
    if finding.collection == "weights":
        return name.rpartition(".")[0] or name
    return name.rpartition(":")[0] or name


def line_of(finding: Finding) -> str:
    """Return a finding as a line: severity, rule, place, meaning and advice."""
    return f"{finding.severity}: {finding.rule} in {grouped(finding.where)}: {finding.meaning} {finding.advice}"
