"""The verdict: a run in one sentence for someone who does not read on, made from its findings and nothing else.

The gravest finding leads. Of several alarms the one that ends trainings leads (a NaN loss, NaN weights, a collapsed
scale, a diverged loss), and of several of these the earliest, since it is the cause. The sentence says what, since
when, what followed and what to do, as far as it stays within `LONGEST` characters.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.estimates.module_parameters import Modules
from plimsoll.report.verdicts.verdict_phrases import Said, said
from plimsoll.text import percent

State = Literal["healthy", "warning", "alarm", "empty"]
LONGEST = 200  # characters of a verdict, about two lines of a terminal

_BEGINS = {"alarm": "Problem", "warning": "Warning"}
_BEGINS_LIVE = {**_BEGINS, "alarm": "Stop"}  # only a run that still goes on can be stopped
_TOLD_WHEN_HEALTHY = (
    "updates-swallowed",
    "run-ended",
)  # findings of severity "info" that a verdict of health should not hide
# Warnings that say what another one says too, or that say less: they lead only where nothing else does.
_SECONDARY = ("decay-lost", "run-ended", "records-lost", "distribution-drift", "epsilon-dominates", "structural-zeros")


def state_of(view: View, findings: Sequence[Finding]) -> State:
    """The gravest severity in one word; "empty" for a run in which nothing was recorded.

    A run of which records are missing is not called healthy.
    """
    if view.last_step < 0:
        return "empty"
    severities: set[str] = {finding.severity for finding in findings}
    if view.run.missing:
        severities.add("warning")
    return "alarm" if "alarm" in severities else "warning" if "warning" in severities else "healthy"


def verdict(view: View, findings: Sequence[Finding]) -> str:
    """The run in one sentence of at most `LONGEST` characters; the same findings give the same sentence."""
    state = state_of(view, findings)
    if state == "empty":
        return "Nothing was recorded."
    if state == "healthy":
        return _healthy(view, findings)
    if not any(finding.severity in ("alarm", "warning") for finding in findings):
        return _fitted("Warning", Said(what="records of this run are missing"), "")
    lead = leading(findings, view.last_step)
    begins = _BEGINS_LIVE if _is_live(view) else _BEGINS
    return _fitted(begins[state], said(lead, view, findings), _followed(lead, findings, view))


def _is_live(view: View) -> bool:
    return view.until is None and not view.run.closed and view.ending is None


def leading(findings: Sequence[Finding], last_step: int) -> Finding:
    """The finding that the verdict is about."""
    grave = [f for f in findings if f.severity == "alarm"] or [f for f in findings if f.severity == "warning"]
    fatal = [f for f in grave if is_fatal(f, last_step)] or [f for f in grave if f.rule not in _SECONDARY] or grave
    return min(fatal, key=lambda f: f.since_step)


def leading_first(findings: Sequence[Finding], last_step: int) -> tuple[Finding, ...]:
    """The findings in the order in which all surfaces list them: the one that the verdict is about, then the others."""
    if all(finding.severity == "info" for finding in findings):
        return tuple(findings)
    lead = leading(findings, last_step)
    return (lead, *(finding for finding in findings if finding is not lead))


def is_fatal(finding: Finding, last_step: int) -> bool:
    """Whether a training does not come back from it by itself."""
    if finding.severity != "alarm":
        return False
    if finding.rule == "nonfinite":
        return finding.collection == "weights" or (
            bool(finding.evidence.get("steps_with_loss")) and finding.until_step >= last_step
        )
    return finding.rule in ("scale-collapse", "loss-spike")


def _followed(lead: Finding, findings: Sequence[Finding], view: View) -> str:
    """What came of it, where another alarm says so."""
    for other in findings:
        if other is lead or other.severity != "alarm" or other.since_step < lead.since_step:
            continue
        if other.rule == "nonfinite":
            return f"and NaN or Inf came at step {other.since_step:,}"
        if other.rule == "loss-spike" and is_fatal(other, view.last_step):
            return f"and the loss rose at step {other.since_step:,} and stayed high"
    return ""


def _fitted(begins: str, told: Said, followed: str) -> str:
    """As much of it as there is room for: what and when always, then what to do, then what came of it."""
    head = f"{begins}: {told.what}"
    remedy = f"; {told.remedy}" if told.remedy else ""
    for parts in ((told.effect, followed), (followed,), (told.effect,), ()):
        middle = "".join(f", {part}" for part in parts if part)
        if len(head + middle + remedy) < LONGEST:
            return f"{head}{middle}{remedy}."
    return f"{head}."


def _healthy(view: View, findings: Sequence[Finding]) -> str:
    noted = [f for f in findings if f.rule in _TOLD_WHEN_HEALTHY]
    begin = f"Healthy up to step {view.last_step:,}"
    if noted:
        return f"{begin}, but note: {said(noted[0], view, findings).what}."
    return f"{begin}: {_kept(view)}."


def _kept(view: View) -> str:
    """How much of the gradients the format has kept, in the layer that lost most."""
    narrow = view.narrow("gradients")
    if narrow is None:
        return "no rule found anything, but gradients were not recorded"
    modules = Modules.of(narrow.cells)
    lost = np.nansum(modules.total(narrow.lost_of_cell), axis=1)
    would_be = lost + np.nansum(modules.total(narrow.cells.total(narrow.cells.nonzero)), axis=1)
    worst = float(np.max(lost[would_be > 0] / would_be[would_be > 0], initial=0.0))
    if worst == 0:
        return "no parameter gradient was lost to underflow"
    return f"at most {percent(worst)} of any layer's parameter gradients were lost to underflow"
