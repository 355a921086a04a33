"""Choice of the finding that a guard acts on, and of the action.

A guard acts once at a look, within its limits, and never twice in vain.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plimsoll.diagnosis.finding import SEVERITIES, Action, Finding, Severity
from plimsoll.diagnosis.guard.records import Limits, Look, Order

ESCALATION: tuple[Action, ...] = ("raise_scale", "layer_scale", "to_bf16", "stop")

# (action, finding, since which step it has held, how often it was tried) -> what to do, or why it cannot be done.
Propose = Callable[[Action, Finding, int, int], Order | str]
_WAIT = "wait"


@dataclass(slots=True)
class _Track:
    """State of one finding over the looks."""

    clear_at: int  # the last step by which it was known not to hold
    tries: Counter[Action] = field(default_factory=Counter["Action"])


class ActionChooser:
    """Chooses for one guard; `begin` is the first step that counts."""

    def __init__(
        self, allowed: Sequence[Action], limits: Limits, begin: int, severity: Severity, *, dry_run: bool
    ) -> None:
        self._allowed, self._limits, self._severity = frozenset(allowed), limits, SEVERITIES.index(severity)
        self._begin, self._dry_run = begin, dry_run
        self._tracks: dict[tuple[str, str | None], _Track] = {}
        self._before: dict[str, int] = {}  # the newest step of each collection at the look before
        self._effective = begin  # the first step that the last act was in force for
        self._totals: Counter[Action] = Counter()
        self._last: dict[tuple[str, str], int] = {}  # when a kind of action was last taken on a target

    def choose(self, look: Look, step: int, propose: Propose) -> tuple[Order | None, dict[str, str]]:
        """Return the order after `step`, and the findings without a remedy.

        The order is None if nothing is to be done. The findings are reasons by rule.
        """
        order, helpless = None, dict[str, str]()
        current = [(f, track) for f in look.findings if (track := self._current(f, look)) is not None]
        for finding, track in current:
            if order is None and SEVERITIES.index(finding.severity) >= self._severity:
                choice = self._for(finding, track, step, propose)
                if isinstance(choice, Order):
                    order = choice
                elif choice is not _WAIT:
                    helpless[finding.rule] = choice
        self._before |= look.newest
        if order is not None:
            self._note(order, step)
        return order, helpless

    # A finding stays in a run for good, so a guard acts on new evidence only: the finding must have held since the look
    # before, and since the guard's last act has come into force. One that has not held in what was newly recorded is
    # over; an act has helped then, and may be taken again another time. (A dry run, in which nothing can help, says the
    # first thing that it would do for a finding, and no more until that is over.)
    def _current(self, finding: Finding, look: Look) -> _Track | None:
        """The finding's track, if it has held in what was recorded since the last look."""
        track = self._tracks.setdefault((finding.rule, finding.collection), _Track(self._begin - 1))
        newest = look.newest.get(finding.collection or "", look.step)
        before = self._before.get(finding.collection or "", self._begin - 1)
        if finding.until_step > before:
            return track if finding.until_step >= self._effective else None
        if newest > max(before, self._effective - 1):
            track.clear_at = newest
            track.tries.clear()
        return None

    # Of a finding's own actions the first that is allowed and possible is taken. One that was taken `Limits.tries`
    # times, and the finding holds still, is passed over for what follows it in `ESCALATION`; an alarm for which nothing
    # is left comes to "stop", if that is allowed.
    def _for(self, finding: Finding, track: _Track, step: int, propose: Propose) -> Order | str:
        since = max(finding.since_step, track.clear_at + 1)
        reasons: list[str] = []
        if not chain(finding) or (self._dry_run and track.tries):
            return _WAIT
        for action in chain(finding):
            if action not in self._allowed or track.tries[action] >= self._limits.tries:
                continue
            if self._totals[action] >= self._limits.total:
                reasons.append(f"{action} was taken {self._limits.total} times, the limit")
                continue
            proposal = propose(action, finding, since, track.tries[action])
            if isinstance(proposal, str):
                reasons.append(f"{action}: {proposal}")
            elif self._too_soon(proposal, step):
                return _WAIT
            else:
                track.tries[action] += 1
                return proposal
        tried = [f"{action} was tried {n} times" for action, n in track.tries.items() if n >= self._limits.tries]
        if not tried and not reasons and finding.severity != "alarm":
            return _WAIT
        return "; ".join([*tried, *reasons]) or "no action that would help is allowed"

    def _too_soon(self, order: Order, step: int) -> bool:
        last = [self._last.get((_kind(order.action), target)) for target in order.targets]
        return any(at is not None and step - at < self._limits.steps for at in last)

    def _note(self, order: Order, step: int) -> None:
        self._effective = step + 1
        self._totals[order.action] += 1
        self._last |= {(_kind(order.action), target): step for target in order.targets}


def chain(finding: Finding) -> tuple[Action, ...]:
    """The actions for a finding, in the order in which they are tried.

    >>> from plimsoll.diagnosis import Finding
    >>> facts = {"since_step": 0, "until_step": 9, "advice": "", "meaning": "", "figure": "scale_window"}
    >>> chain(Finding(rule="scale-low", severity="alarm", actions=("raise_scale",), **facts))
    ('raise_scale', 'layer_scale', 'to_bf16', 'stop')
    >>> chain(Finding(rule="loss-spike", severity="warning", actions=("rollback", "skip"), **facts))
    ('rollback', 'skip')
    """
    places = [ESCALATION.index(action) for action in finding.actions if action in ESCALATION]
    further: tuple[Action, ...] = ESCALATION[max(places) + 1 :] if places else ("stop",)
    more: list[Action] = [
        a for a in further if a not in finding.actions and (a != "stop" or finding.severity == "alarm")
    ]
    return finding.actions + tuple(more)


def _kind(action: Action) -> str:
    return "scale" if action in ("raise_scale", "lower_scale") else action
