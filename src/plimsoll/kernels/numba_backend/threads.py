"""Our own pool of threads for serial kernels, as many as torch's.

At most `torch.get_num_threads()` run at once, the caller among them. Safe from several threads at a time (tasks never
wait for tasks) and after fork (a child starts its own threads: the parent's do not exist there).
"""

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

SMALLEST_SHARE = 1 << 18  # values: below this, waking a thread (some 100 us) costs more than it brings
_SHARES_PER_THREAD = 4  # so that one thread's delay (another process on its core) is not everyone's
_FINE_SHARE = 1 << 19
_SPLIT = 1 << 12  # pieces of one tensor begin at a multiple of this many values

# Of a tensor, by its index: first value, number of values, and the slot of scratch memory that is its own where several
# pieces of the tensor are worked on at a time.
Piece = tuple[int, int, int, int | None]

_smallest = math.ulp(0.0)
_executor: ThreadPoolExecutor | None = None
_size = 0


def shares(values: int) -> int:
    """Into how many parts work over that many values should be cut."""
    threads = min(torch.get_num_threads(), values // SMALLEST_SHARE)
    if threads <= 1:
        return 1
    return max(threads, min(threads * _SHARES_PER_THREAD, values // _FINE_SHARE))


def cut(lengths: Sequence[int], count: int) -> tuple[list[list[Piece]], list[int]]:
    """Cut tensors into at most `count` equal shares; return also each slot's tensor."""
    size = -(-sum(lengths) // count)
    size = -(-size // _SPLIT) * _SPLIT
    shared: list[list[Piece]] = [[]]
    owners: list[int] = []
    room = size
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                shared.append([])
                room = size
            taken = min(room, length - start)
            slot = None if taken == length else len(owners)
            if slot is not None:
                owners.append(index)
            shared[-1].append((index, start, taken, slot))
            start += taken
            room -= taken
    return shared, owners


def run(tasks: Sequence[Callable[[], None]]) -> None:
    """Run all tasks; raise the first error after all have ended."""
    threads = min(torch.get_num_threads(), len(tasks))
    if threads <= 1:
        for task in tasks:
            task()
        return
    waiting = deque(tasks)
    flushing = _is_flushing()
    helpers = [_threads(threads - 1).submit(_help, waiting, flushing) for _ in range(threads - 1)]
    try:
        _drain(waiting)
    finally:
        errors = [helper.exception() for helper in helpers if not helper.cancel()]
    for error in errors:
        if error is not None:
            raise error


def _is_flushing() -> bool:
    """Return True if this thread flushes subnormals (`torch.set_flush_denormal`)."""
    return _smallest == 0.0


def _help(waiting: deque[Callable[[], None]], flushing: bool) -> None:
    """Work through the tasks in their thread's mode for subnormal numbers."""
    if _is_flushing() != flushing:
        torch.set_flush_denormal(flushing)
    _drain(waiting)


def _drain(waiting: deque[Callable[[], None]]) -> None:
    while True:
        try:
            task = waiting.popleft()
        except IndexError:
            return
        task()


def _threads(count: int) -> ThreadPoolExecutor:
    global _executor, _size
    if _executor is None or _size < count:
        # An older, smaller pool ends by itself when its last task is done: nobody holds it any more.
        _executor, _size = ThreadPoolExecutor(count, thread_name_prefix="plimsoll-kernel"), count
    return _executor


def _forget() -> None:
    global _executor, _size
    _executor, _size = None, 0


os.register_at_fork(after_in_child=_forget)
