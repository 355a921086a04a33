"""Counter of dropped records by cause. Warns once per cause; the counts become an event of the run."""

import threading
from collections.abc import Mapping

from plimsoll.runs.user_messages import warn_user


class DroppedRecords:
    """Counts by reason. Safe from any thread; no method raises."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._counts: dict[str, int] = {}
        self._unreported: dict[str, int] = {}
        self._causes_warned: set[str] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        """All records dropped so far, by reason."""
        with self._guard:
            return dict(self._counts)

    def count(self, reason: str, records: int, message: str) -> None:
        """Add dropped records, with a warning for the first of a reason."""
        with self._guard:
            self._counts[reason] = self._counts.get(reason, 0) + records
            self._unreported[reason] = self._unreported.get(reason, 0) + records
        self.warn_once(reason, message)

    def warn_once(self, cause: str, message: str) -> None:
        """Warn, once per cause."""
        with self._guard:
            new = cause not in self._causes_warned
            self._causes_warned.add(cause)
        if new:
            warn_user(message)

    def unreported(self) -> dict[str, int]:
        """Return the records dropped since the last call."""
        with self._guard:
            found, self._unreported = self._unreported, {}
        return found

    def after_fork(self) -> None:
        """Replace the lock: one that another thread held at the fork is never released in the child."""
        self._guard = threading.RLock()
