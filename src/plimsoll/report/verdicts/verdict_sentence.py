"""Verdict on a run: one sentence, made from its findings.

The most severe finding leads. Of several alarms a fatal one leads (NaN weights, a collapsed scale), and of several
fatal ones the earliest, since it is the cause. The sentence says what happened, since when, what followed and what to
do, as far as `LONGEST` allows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from plimsoll.diagnosis import Finding, FindingContext, Phrase, Rule, View, diagnose
from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.rules.registry import guarded, rule_of
from plimsoll.runs import Run
from plimsoll.text import percent

State = Literal["healthy", "warning", "alarm", "empty"]
LONGEST = 200  # characters, about two lines of a terminal: more only where what happened takes more by itself
# Judging takes about 1 s for a run of this size (benchmarks/command_line.py). A larger one keeps nobody waiting.
MOST_BYTES = 64 << 20

_BEGINS = {"alarm": "Problem", "warning": "Warning"}
_BEGINS_LIVE = {**_BEGINS, "alarm": "Stop"}  # only a run that still goes on can be stopped


def state_of(view: View, findings: Sequence[Finding]) -> State:
    """Return "empty" without a record, else "alarm", "warning" or "healthy"; missing records are a warning."""
    severities = {finding.severity for finding in findings}
    if view.last_step < 0:
        return "empty"
    if "alarm" in severities:
        return "alarm"
    if "warning" in severities or view.run.missing:
        return "warning"
    return "healthy"


def verdict(view: View, findings: Sequence[Finding]) -> str:
    """Return the run in a sentence. Equal findings give equal sentences."""
    state = state_of(view, findings)
    if state == "empty":
        return "Nothing was recorded."
    if state == "healthy":
        return _healthy(view, findings)
    if not any(finding.severity in ("alarm", "warning") for finding in findings):
        return _fitted("Warning", Phrase(what="records of this run are missing"), "")
    lead = leading(findings, view.last_step)
    begins = _BEGINS_LIVE if _is_live(view) else _BEGINS
    return _fitted(begins[state], phrase_of(lead, view, findings), _consequence(lead, findings, view.last_step))


def phrase_of(finding: Finding, view: View, findings: Sequence[Finding]) -> Phrase:
    """Return a finding as part of a sentence, in the light of all findings of the run."""
    rule, context = rule_of(finding), FindingContext(finding=finding, view=view, findings=findings)
    return guarded(rule, lambda: rule.phrase(context), Rule.phrase(rule, context))


def _is_live(view: View) -> bool:
    return view.until is None and not view.run.closed and view.ending is None


def leading(findings: Sequence[Finding], last_step: int) -> Finding:
    """Return the finding that the verdict is about. One at least must be a warning or an alarm."""
    severe = [f for f in findings if f.severity == "alarm"] or [f for f in findings if f.severity == "warning"]
    fatal = [f for f in severe if is_fatal(f, last_step)]
    candidates = fatal or [f for f in severe if not rule_of(f).is_secondary] or severe
    return min(candidates, key=lambda finding: finding.since_step)


def leading_first(findings: Sequence[Finding], last_step: int) -> tuple[Finding, ...]:
    """Return the findings in display order: the verdict's, then the others."""
    if all(finding.severity == "info" for finding in findings):
        return tuple(findings)
    lead = leading(findings, last_step)
    return (lead, *(finding for finding in findings if finding is not lead))


def is_fatal(finding: Finding, last_step: int) -> bool:
    """Return whether a training does not recover from a finding by itself."""
    rule = rule_of(finding)
    return finding.severity == "alarm" and guarded(rule, lambda: rule.is_fatal(finding, last_step), False)


def _consequence(lead: Finding, findings: Sequence[Finding], last_step: int) -> str:
    """Return the words of the first alarm that followed the leading one and has any."""
    for finding in findings:
        if finding is lead or finding.severity != "alarm" or finding.since_step < lead.since_step:
            continue
        if words := _consequence_of(finding, last_step):
            return words
    return ""


def _consequence_of(finding: Finding, last_step: int) -> str:
    rule = rule_of(finding)
    return guarded(rule, lambda: rule.consequence(finding, last_step), "")


def _fitted(begins: str, phrase: Phrase, followed: str) -> str:
    """Return as much as fits: what and since when always, then the remedy, then the effect and what followed."""
    head = f"{begins}: {phrase.what}"
    remedy = f"; {phrase.remedy}" if phrase.remedy else ""
    for parts in ((phrase.effect, followed), (followed,), (phrase.effect,), ()):
        middle = "".join(f", {part}" for part in parts if part)
        if len(head + middle + remedy) < LONGEST:
            return f"{head}{middle}{remedy}."
    return f"{head}."


def _healthy(view: View, findings: Sequence[Finding]) -> str:
    noted = [f for f in findings if rule_of(f).is_noted]
    begin = f"Healthy through step {view.last_step:,}"
    if noted:
        return f"{begin}, but note: {phrase_of(noted[0], view, findings).what}."
    return f"{begin}: {_worst_underflow(view)}."


def _worst_underflow(view: View) -> str:
    """Return the share of gradients that underflowed, in the layer that lost most."""
    narrow = view.narrow("gradients")
    if narrow is None:
        return "no findings, but gradients were not recorded"
    modules = Modules.of(narrow.cells)
    lost = np.nansum(modules.total(narrow.lost_of_cell), axis=1)
    would_be = lost + np.nansum(modules.total(narrow.cells.total(narrow.cells.nonzero)), axis=1)
    worst = float(np.max(lost[would_be > 0] / would_be[would_be > 0], initial=0.0))
    if worst == 0:
        return "no parameter gradients lost to underflow"
    return f"at most {percent(worst)} of any layer's parameter gradients lost to underflow"


def verdict_at_end(folder: Path) -> tuple[State, str] | None:
    """Return state and verdict of a run that has just ended; None for one of several ranks, or above `MOST_BYTES`."""
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    if size_bytes > MOST_BYTES:
        return None
    run = Run(folder, warn=False)
    view = View(run)
    # A run of several ranks is not judged: the others may still be writing.
    if run.world_size > 1:
        return None
    findings = leading_first(diagnose(view), view.last_step)
    return state_of(view, findings), verdict(view, findings)
