"""A guard's decisions: the rules in the background, and the choice of an action."""

import atexit
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plimsoll.diagnosis.finding import SEVERITIES, Action, Finding, Severity
from plimsoll.diagnosis.guard.records import Limits, Look, Order
from plimsoll.diagnosis.rules.base import Rule
from plimsoll.diagnosis.run_rules import diagnose
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16
from plimsoll.runs import Run
from plimsoll.tensor_collections import WITH_LOSS_SCALE

# -- checks of a run in progress: the rules, on a thread, at bounded cost ----------------------------------------------

# A look up to step s reads only what steps up to s have left, so that it finds what ``diagnose(run, until=s)`` finds at
# any later time. One look at a time; after one that took t seconds of a core the next begins t / share seconds later,
# or not at all if nothing asks by then.

_RECENT = 8  # samples whose largest gradient tells how much room there is
_CLOSE_SECONDS = 5.0
_EXIT_SECONDS = 60.0  # that the end of the process waits for a look, which Python would end within pyarrow by aborting
_checkers: "weakref.WeakSet[BackgroundChecker]" = weakref.WeakSet()


class BackgroundChecker:
    """Looks at one run.

    - `gather`: called on the looking thread before each look, with its step; says whether all is on disk.
    - `failed`: called with what a check raised.
    """

    def __init__(
        self,
        path: Path,
        rules: Sequence[Rule],
        *,
        share: float,
        gather: Callable[[int], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self._path, self._rules, self._share = path, tuple(rules), share
        self._gather, self._failed = gather, failed
        self._done: Look | None = None
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self.closing = threading.Event()
        _checkers.add(self)

    def ask(self, step: int) -> bool:
        """Begin a background look up to that step; return False while one runs, or if it would cost too much."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or self._done is not None or time.monotonic() < self._not_before:
            return False
        self._thread = threading.Thread(target=self._work, args=(step,), name="plimsoll-guard", daemon=True)
        self._thread.start()
        return True

    def take(self) -> Look | None:
        """The look that has come to an end since the last call, if any; never waits."""
        look = self._done
        # Only one that was seen is taken away: another may end at this moment. None begins before it is taken.
        if look is not None:
            self._done = None
        return look

    def now(self, step: int) -> Look | None:
        """Return a look on this thread, after a running one; None if data came too late."""
        if self._thread is not None:
            self._thread.join()
            self._done = None  # what was looked at before is older
        return self._look(step) if self._gather(step) else None

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Ends a look that is under way, at its next rest; waits so long for it."""
        self.closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(self, step: int) -> None:
        started = time.thread_time()
        try:
            if self._gather(step) and not self.closing.is_set():
                self._done = self._look(step)
        except Exception as error:  # noqa: BLE001  (P2: a run that cannot be read must not stop training)
            self._failed(error)
        self._not_before = time.monotonic() + (time.thread_time() - started) * (1 / self._share - 1)

    def _look(self, step: int) -> Look:
        view = View(Run(self._path), step)
        findings = diagnose(view, rules=self._rules)
        newest = {"": view.last_step}
        for collection in {f.collection for f in findings if f.collection is not None}:
            cells = view.cells(collection)
            if cells is not None:
                newest[collection] = int(cells.steps[-1])
        return Look(step=step, findings=tuple(findings), newest=newest, room=room(view) if findings else None)


@atexit.register
def _end_all() -> None:
    """Wait for looks that are still under way, also of guards that are closed."""
    for checker in list(_checkers):
        checker.close(_EXIT_SECONDS)


def room(view: View) -> int | None:
    """Return the highest shift without overflow of recent gradients; None if unseen.

    Of parameters and of activations, as true values, against the narrowest format that held them, or FP16.
    """
    rooms: list[int] = []
    for collection in WITH_LOSS_SCALE:
        narrow = view.narrow(collection)
        if narrow is None:
            continue
        largest_of_formats = [fmt.max for fmt in narrow.cells.elements if fmt.max < FP16.max * 2]
        largest = float(np.fmax.reduce(narrow.cells.true_absmax[:, -_RECENT:], axis=None, initial=np.nan))
        if largest > 0 and math.isfinite(largest):
            rooms.append(math.floor(math.log2(min([FP16.max, *largest_of_formats]) / largest)))
    return min(rooms, default=None)


# -- choice of the finding that a guard acts on, and of the action -----------------------------------------------------

# A guard acts once at a look, within its limits, and never twice in vain.

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
        self._effective = begin  # the first step that the last action was active for
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
