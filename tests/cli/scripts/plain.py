"""A script without torch, which tells how it was started, and is imported again by a process that it spawns."""
# ruff: noqa: T201  (a script prints)

import atexit
import multiprocessing
import os
import pickle
import sys
from pathlib import Path


class Pair:
    def __init__(self, first: int) -> None:
        self.first = first


def first_of(pair: Pair) -> int:
    return pair.first + (__name__ == "__mp_main__")


if __name__ == "__main__":
    atexit.register(lambda: print("goodbye from", Path(__file__).name, "by", sys.modules["__main__"].__name__))
    print(sys.argv, __file__, sys.path[0], __spec__ and __spec__.name, __package__, __doc__, __cached__)
    print(sorted(name for name in globals() if name.startswith("__")), __loader__.__class__, Path.cwd())
    print(sys.modules["__main__"].__dict__ is globals(), sys.excepthook is sys.__excepthook__, "torch" in sys.modules)
    print(pickle.loads(pickle.dumps(Pair(3))).first, Pair.__module__)
    for method in os.environ.get("START_METHODS", "spawn forkserver").split():
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(first_of, [Pair(1)]))
    sys.exit(os.environ.get("EXIT_WITH") or 5)
