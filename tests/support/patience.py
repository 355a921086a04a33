"""Waits of the tests, and the one limit of all of them: only a hang reaches it, on a busy machine too.

While a page is changed, `PLIMSOLL_HANG_SECONDS=20` lets a test that waits for the wrong words fail sooner.
"""

import os
import time
from collections.abc import Callable

HANG_SECONDS = float(os.environ.get("PLIMSOLL_HANG_SECONDS", "300"))


def wait_until(condition: Callable[[], object]) -> None:
    """Returns when the condition holds; other threads, and a server in this process, get their turns meanwhile."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited for something that does not come"
        time.sleep(0.005)
