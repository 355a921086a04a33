"""Turns of a model's optimizers, if they alternate."""

from plimsoll.tensor_collections import OF_PARAMETERS
from plimsoll.watch.session import WatchSession

_Turn = frozenset[int]  # the optimizers, by identity
_MOST = 64  # turns, and steps in a row, that are distinguished
_AROUND_A_STEP = OF_PARAMETERS  # what can be read when an optimizer steps


class Turns:
    """The turns of one watch's optimizers."""

    def __init__(self, session: WatchSession) -> None:
        self.session = session
        self._counts: dict[_Turn, int] = {}  # steps so far; of the first, the number of the step
        self._after: dict[tuple[_Turn, int], _Turn] = {}  # by turn, and how many there were of it in a row
        self._last: tuple[_Turn, int] | None = None
        self._now: set[int] = set()
        self._steps: dict[int, int] = {}  # of each optimizer, since it was last sampled

    def enter(self, optimizer: object) -> None:
        """An optimizer steps: samples it where the schedule has passed it by."""
        key = id(optimizer)
        if key in self._now:
            return
        self._now.add(key)
        passed = self._steps.get(key)
        if len(self._counts) > 1 or any(key not in turn for turn in self._counts):  # else the schedule has it
            for collection in _AROUND_A_STEP:
                every = self.session.settings.intervals.get(collection)
                if every is not None and (passed is None or passed >= every):
                    self.session.take(collection)
        sampled = any(getattr(self.session.due, collection) for collection in _AROUND_A_STEP)
        self._steps[key] = 1 if sampled or passed is None else passed + 1

    def has(self, optimizer: object) -> bool:
        """Return True if the optimizer has stepped in this step."""
        return id(optimizer) in self._now

    def end(self) -> None:
        """The step has ended."""
        if not self._now:
            return
        before, self._last = self._last, self._present()
        turn = self._last[0]
        self._now = set()
        if len(self._counts) > _MOST:  # optimizers that come and go
            self._counts, self._after = {}, {}
        elif before is not None:
            self._after[before] = turn
        if not self._counts:
            self._counts[turn] = self.session.step
        elif turn not in self._counts:
            self._counts[turn] = -1  # this one came unforeseen
        self._counts[turn] += 1

    # Optimizers that step in the same step are a turn. Where there is one turn, intervals count steps. Where several
    # alternate, every tenth step could be the same one's for ever, so each turn counts its own steps: its first that
    # was seen coming is sampled, and every tenth after it.
    def number(self, step: int) -> int:
        """Return the next step's count for the intervals, also before this one's `end`."""
        present = self._present() if self._now else self._last
        following = None if present is None else self._after.get(present)
        if present is None or following is None or len(self._counts) <= 1:
            return step
        return self._counts.get(following, step) + (bool(self._now) and following == present[0])

    # Which turn comes next is known before it does only by what came the last time after as many of the present one.
    # Where that was wrong, the optimizers that step have their own count: one that has not been sampled for that long
    # is read when it steps, but for activations, whose forward is over by then.
    def _present(self) -> tuple[_Turn, int]:
        turn = frozenset(self._now)
        row = self._last[1] + 1 if self._last is not None and self._last[0] == turn else 1
        return turn, min(row, _MOST)
