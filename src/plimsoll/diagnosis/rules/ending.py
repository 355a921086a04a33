"""The end of a run: by an exception, an interrupt or a signal, or without being closed."""

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import Rule, threshold
from plimsoll.diagnosis.view import View

_MEANING = {
    "exception": "The training did not reach its end: an exception ended it.",
    "interrupt": "Somebody ended the training by hand.",
    "signal": "The system, a scheduler or a user ended the training's process by a signal.",
    "killed": "The training's process ended without closing the run: killed, out of memory, or its machine stopped.",
}
_ADVICE = {
    "exception": "Read the traceback that the process printed, and go on from the last checkpoint.",
    "interrupt": "Nothing, if this was meant. The findings speak of the steps until then.",
    "signal": "Look for a time limit or a preemption, and go on from the last checkpoint.",
    "killed": "Look for an out-of-memory kill, a time limit or a lost machine. The last seconds may be missing.",
}


@dataclass(frozen=True, kw_only=True)
class RunEnded(Rule):
    """A run that an exception, an interrupt, a signal or a kill has ended.

    Nothing is wrong with the numbers by this. A run that went on afterwards, from a checkpoint, has not ended.
    """

    id = "run-ended"
    says = "the training ended early: by an exception, an interrupt, a signal, or killed"
    meaning = "The training did not reach its end."
    advice = "Read what the process printed, and go on from the last checkpoint."
    figure = "loss_and_scale"

    later: float = threshold(1, "step recorded afterwards: the training was continued")

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of the whole run."""
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
