"""The numbers of a writer's series: registered from any thread, looked up without a lock."""

import threading
from collections.abc import Sequence

from plimsoll.runs.columns.schema import Series
from plimsoll.spectrum import Source


class SeriesRegistry:
    """Series in the order of their numbers, those of earlier sessions first."""

    def __init__(self, former: Sequence[Series]) -> None:
        self.series = list(former)
        self._guard = threading.RLock()
        self._numbers = {(s.collection, s.name, s.format, s.shared): i for i, s in enumerate(self.series)}

    def number(self, collection: str, name: str, fmt: str, shared: bool) -> int:
        """The number of a series, a new one for one that is new."""
        key = (collection, name, fmt, shared)
        known = self._numbers.get(key)
        return self._registered(key) if known is None else known

    def _registered(self, key: tuple[str, str, str, bool]) -> int:
        collection, name, fmt, shared = key
        series = Series(collection=collection, name=name, format=Source(fmt).format, shared=shared)
        canonical = (collection, name, series.format, shared)
        with self._guard:
            if canonical not in self._numbers:
                self.series.append(series)
                self._numbers[canonical] = len(self.series) - 1
            self._numbers[key] = self._numbers[canonical]
            return self._numbers[key]

    def after_fork(self) -> None:
        """A lock that another thread held at the fork is never given back in the child."""
        self._guard = threading.RLock()
