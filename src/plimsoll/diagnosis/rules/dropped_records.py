"""The record itself: what the watch has lost, and what of the run cannot be read."""

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import Rule, threshold
from plimsoll.diagnosis.view import View

# Events by which the watch says that it left something out.
_LEFT_OUT = ("failure", "not measured", "capped", "shadow", "rank lost", "folder lost", "dropped", "damaged")


@dataclass(frozen=True, kw_only=True)
class RecordsLost(Rule):
    """Samples that the watch dropped, tensors that it could not measure, parts and ranks that are missing.

    All other findings are of what is left: nothing is wrong with the training by this.
    """

    id = "records-lost"
    says = "the watch lost records, or parts of the run are damaged or missing"
    meaning = "The findings speak of what is left; what is missing may have been worse."
    advice = "See the run's problems, its dropped counts and its events; a full disk or too small a queue is usual."
    figure = "record"

    records: float = threshold(1, "nothing may be lost in silence")

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of the whole run."""
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
