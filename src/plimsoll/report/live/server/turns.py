"""`Turns`: answers in threads, few a run, so that a slow one leaves the others."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from plimsoll.errors import StateError

# What is read of a run is checked and bounded before it is computed with, so an answer ends; storage that hangs is what
# remains, and from that no process could be ended either. So an answer has a time, a run has few threads, and who asks
# about a run that has used up both is refused at once. Threads share what was read; processes would each read it.
PATIENCE_SECONDS = 60.0  # from question to answer
MOST_OF_RUN = 64  # questions to one run that wait or are being answered
_THREADS_OF_RUN = 2  # a verdict that is being made keeps no figure waiting
_THREADS = 32  # of all runs, those aside that have had their time


class BusyError(StateError):
    """More is asked for at a time than there is room for."""


@dataclass(kw_only=True, eq=False)
class _Question:
    """Question about some runs. `overdue`: still being made, but nobody waits."""

    runs: tuple[str, ...]
    make: Callable[[], bytes]
    answer: "Future[bytes]" = field(default_factory=Future[bytes])
    overdue: bool = False


class Turns:
    """Questions that wait and that are being answered, each on a run or two."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._waiting: list[_Question] = []
        self._under_way: list[_Question] = []

    async def answer(self, runs: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
        """Return what `make` returns; `BusyError` if too many, `StateError` if too slow."""
        question = _Question(runs=tuple(dict.fromkeys(runs)), make=make)
        self._begin(question)
        answer = asyncio.wrap_future(question.answer)
        done, _ = await asyncio.wait({answer}, timeout=self.patience_seconds)
        if not done:
            self._give_up(question)
            answer.cancel()
            raise StateError(
                f"serve: expected an answer within {self.patience_seconds:.0f} s; got none: this run, or its storage, "
                "takes longer. Ask again."
            )
        return answer.result()

    def _begin(self, question: _Question) -> None:
        with self._lock:
            asked = Counter(run for other in (*self._waiting, *self._under_way) for run in other.runs)
            overdue = Counter(run for other in self._under_way if other.overdue for run in other.runs)
            for run in question.runs:
                if asked[run] >= MOST_OF_RUN:
                    raise BusyError(
                        f"serve: expected at most {MOST_OF_RUN} questions to a run at a time; got one more. Ask again."
                    )
                if overdue[run] >= _THREADS_OF_RUN:
                    raise BusyError(
                        f"serve: expected a run that is answered about within {self.patience_seconds:.0f} s; got one "
                        "of which earlier answers are still being made. Ask again later."
                    )
            self._waiting.append(question)
        self._start()

    def _give_up(self, question: _Question) -> None:
        with self._lock:
            question.overdue = True
            if question in self._waiting:
                self._waiting.remove(question)
        self._start()

    def _start(self) -> None:
        """Start the next answers: the oldest first, of runs with a thread left."""
        with self._lock:
            busy = Counter(run for running in self._under_way for run in running.runs)
            room = _THREADS - sum(not running.overdue for running in self._under_way)
            for question in list(self._waiting):
                if room > 0 and all(busy[run] < _THREADS_OF_RUN for run in question.runs):
                    self._waiting.remove(question)
                    self._under_way.append(question)
                    busy.update(question.runs)
                    room -= 1
                    threading.Thread(target=self._make, args=(question,), name="plimsoll-answer", daemon=True).start()

    def _make(self, question: _Question) -> None:
        if question.answer.set_running_or_notify_cancel():
            try:
                question.answer.set_result(question.make())
            except BaseException as error:  # noqa: BLE001  (it is the asker's)
                question.answer.set_exception(error)
        with self._lock:
            self._under_way.remove(question)
        self._start()
