"""A run with its findings, as `plimsoll check` and `plimsoll ls` answer it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plimsoll.cli.paths import OpenRun, refuse_empty

if TYPE_CHECKING:
    from plimsoll.diagnosis import Finding, View
    from plimsoll.diagnosis.view import Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run and its findings."""

    opened: OpenRun
    view: "View"
    findings: "Sequence[Finding]"

    @property
    def state(self) -> str:
        """The highest severity in one word: healthy, warning, alarm or empty."""
        from plimsoll.report.verdicts.verdict_sentence import state_of

        return state_of(self.view, self.findings)

    @property
    def verdict(self) -> str:
        """The run in one sentence."""
        from plimsoll.report.verdicts.verdict_sentence import verdict

        return verdict(self.view, self.findings)

    @property
    def missing(self) -> dict[int, int]:
        """Last steps of ranks that end before the view's: they may have had an alarm."""
        incomplete = self.opened.run.incomplete
        return {rank: last for rank, last in incomplete.items() if last < self.view.last_step}

    @property
    def early_end(self) -> "Ending | None":
        """The run's early ending. None if it ended properly or is still running."""
        ending = self.view.ending
        return None if ending is None or self.view.last_step > ending.step else ending

    def to_dict(self) -> dict[str, object]:
        """Return the answer as JSON-able data."""
        ending = self.early_end
        return {
            "run": self.opened.label,
            "state": self.state,
            "verdict": self.verdict,
            "last_step": self.view.last_step,
            "incomplete": {str(rank): last for rank, last in self.missing.items()},
            "ended": None if ending is None else {"by": ending.how, "step": ending.step, "message": ending.message},
            "findings": [finding.to_dict() for finding in self.findings],
        }


def judge(
    opened: OpenRun, until: int | None, select: Sequence[str] | None, thresholds: Mapping[str, float]
) -> CheckedRun:
    """Return a run with its findings, the one that the verdict is about first.

    `select` has globs of the rules to apply, `thresholds` values by ``rule.threshold`` in place of the rules' own.
    Raises a `RunError` if nothing was recorded that could be judged.
    """
    from plimsoll.diagnosis import View, diagnose
    from plimsoll.report.verdicts.verdict_sentence import leading_first

    view = View(opened.run, until)
    findings = leading_first(diagnose(view, rules=select, thresholds=thresholds), view.last_step)
    if not any(finding.severity == "alarm" for finding in findings):
        refuse_empty(opened, view)  # a training that fails before its first step leaves an alarm and no step
    return CheckedRun(opened=opened, view=view, findings=findings)
