"""What a writer lost and why: counted, said once for each cause, and handed over to be recorded as an event."""

import threading
from collections.abc import Mapping

from plimsoll.runs.user_messages import say


class Losses:
    """Counts by reason. Safe from any thread; nothing here raises."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._counts: dict[str, int] = {}
        self._untold: dict[str, int] = {}
        self._said: set[str] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        """All losses so far, by reason."""
        with self._guard:
            return dict(self._counts)

    def count(self, reason: str, records: int, message: str) -> None:
        """Adds losses; the first one of a reason is warned of."""
        with self._guard:
            self._counts[reason] = self._counts.get(reason, 0) + records
            self._untold[reason] = self._untold.get(reason, 0) + records
        self.say(reason, message)

    def say(self, cause: str, message: str) -> None:
        """Warns, once for each cause."""
        with self._guard:
            new = cause not in self._said
            self._said.add(cause)
        if new:
            say(message)

    def untold(self) -> dict[str, int]:
        """The losses since this was last asked."""
        with self._guard:
            found, self._untold = self._untold, {}
        return found

    def after_fork(self) -> None:
        """A lock that another thread held at the fork is never given back in the child."""
        self._guard = threading.RLock()
