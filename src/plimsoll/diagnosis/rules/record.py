"""Rules of the record itself: how a run ended, and what of its record is missing."""

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding, shown
from plimsoll.diagnosis.rules.base import FindingContext, Phrase, Rule, threshold
from plimsoll.diagnosis.view import View
from plimsoll.text import counted

_MEANING = {
    "exception": "The training did not reach its end: an exception ended it.",
    "interrupt": "The user ended the training.",
    "signal": "The system, a scheduler or a user ended the training's process by a signal.",
    "killed": "The training's process ended without closing the run: killed, out of memory, or its machine stopped.",
}
_ADVICE = {
    "exception": "Read the traceback that the process printed, and continue from the last checkpoint.",
    "interrupt": "No action is needed if this was intended. The findings are about the steps until then.",
    "signal": "Look for a time limit or a preemption, and continue from the last checkpoint.",
    "killed": "Look for an out-of-memory kill, a time limit or a lost machine. The last seconds may be missing.",
}
# A killed process leaves no message, and only the absence of its writer shows that it is gone.
_PHRASES = {
    "exception": "an exception ended the training",
    "interrupt": "the training was interrupted",
    "signal": "a signal ended the training",
}
# Events by which a watch reports that it left something out.
_LEFT_OUT = ("failure", "not measured", "capped", "shadow", "rank lost", "folder lost", "dropped", "damaged")


@dataclass(frozen=True, kw_only=True)
class RunEnded(Rule):
    """A run that an exception, an interrupt, a signal or a kill has ended."""

    id = "run-ended"
    says = "the training ended early: by an exception, an interrupt, a signal, or killed"
    meaning = "The training did not reach its end."
    advice = "Read what the process printed, and continue from the last checkpoint."
    figure = "loss_and_scale"
    is_secondary = True
    is_noted = True

    later: float = threshold(1, "step recorded afterwards: the training was continued")

    # The numbers may be fine. A run that was continued from a checkpoint has not ended.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        ending = view.ending
        if ending is None or view.last_step >= ending.step + self.later:
            return
        evidence = {"ended_by": ending.how, "message": ending.message, "step": ending.step}
        yield self.finding(
            "warning" if ending.how in ("exception", "killed") else "info",
            (),
            evidence,
            since_step=ending.step,
            until_step=ending.step,
            meaning=_MEANING[ending.how],
            advice=_ADVICE[ending.how],
        )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how the run ended, and the message."""
        by = context.text("ended_by")
        return Phrase(
            what=f"{_PHRASES.get(by, 'the process was gone without closing the run')} {context.at}",
            effect=context.text("message") if by in _PHRASES else "",
            remedy="" if by == "interrupt" else "continue from the last checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class RecordsLost(Rule):
    """Dropped samples, unmeasured tensors, missing parts and ranks."""

    id = "records-lost"
    says = "the watch dropped records, or parts of the run are damaged or missing"
    meaning = "The findings come from the remaining records. The missing ones may have been worse."
    advice = (
        "See the run's problems, its dropped counts and its events. A full disk or too small a queue is the usual "
        "cause."
    )
    figure = "record"
    is_secondary = True

    records: float = threshold(1, "no record may be lost silently")

    # All other findings are judged by the rest. Nothing is wrong with the training by this.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        dropped, problems = view.run.dropped, view.run.problems
        events = [event for event in view.events if event.kind in _LEFT_OUT]
        if sum(dropped.values()) + len(problems) + len(events) < self.records:
            return
        evidence: dict[str, float | int | str] = {f"dropped: {reason}": n for reason, n in sorted(dropped.items())}
        if problems:
            evidence |= {"problems": len(problems), "first_problem": problems[0]}
        if events:
            evidence |= {"events": len(events), "first_event": events[0].message}
        steps = [event.step for event in events]
        since, until = (min(steps), max(steps)) if steps else (0, max(view.last_step, 0))
        severity = "warning" if dropped or problems else "info"
        yield self.finding(severity, (), evidence, since_step=since, until_step=until)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the number of dropped records, and the first problem."""
        evidence = context.finding.evidence
        counts = [n for name, n in evidence.items() if name.startswith("dropped") and isinstance(n, int)]
        lost = "parts of the run are missing or were not measured"
        if sum(counts):
            lost = f"{counted(sum(counts), 'record')} {'was' if sum(counts) == 1 else 'were'} dropped"
        problem = evidence.get("first_problem", evidence.get("first_event", ""))
        return Phrase(
            what=f"{lost} {context.since}, so this is judged by the rest",
            effect=shown(str(problem)) if problem else "",
        )
