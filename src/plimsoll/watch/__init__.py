"""Collecting spectra from live training: `watch` starts it, `Watch` is the handle on it.

The room has the name of its function, and is the function too: ``plimsoll.watch(model, run=...)`` works whether or not
anything has imported ``plimsoll.watch`` as a module before.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from plimsoll.watch.handle import Watch as Watch, watch as watch
from plimsoll.watch.hooks.cast_counts import Casting as Casting


class _Room(ModuleType):
    """A module that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Watch:
        return watch(*args, **kwargs)


_room = sys.modules[__name__]
_room.__class__ = _Room
_room.__signature__ = inspect.signature(watch)  # type: ignore[attr-defined]
