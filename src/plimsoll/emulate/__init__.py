"""Low precision on hardware that lacks it: `emulate`, and autocast's operation lists as data.

The room has the name of its function, and is the function too: ``plimsoll.emulate("fp16")`` works whether or not
anything has imported ``plimsoll.emulate`` as a module before.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from plimsoll.emulate.autocast import Autocast as Autocast
from plimsoll.emulate.casting.operation_lists import CUDA as CUDA, OperationLists as OperationLists
from plimsoll.emulate.context import Emulation as Emulation
from plimsoll.emulate.entry import emulate as emulate
from plimsoll.emulate.operation_counts import Operations as Operations


class _Room(ModuleType):
    """A module that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Emulation:
        return emulate(*args, **kwargs)


_room = sys.modules[__name__]
_room.__class__ = _Room
_room.__signature__ = inspect.signature(emulate)  # type: ignore[attr-defined]
