"""Test of a model's fit to a number format, from a handful of batches: `probe`.

Names are loaded when they are first used: the command asks for a `Question` before its script may import torch.
"""

from typing import TYPE_CHECKING

from plimsoll import exports

if TYPE_CHECKING:
    from plimsoll.probing.entry import probe
    from plimsoll.probing.result import Probe

__all__ = ["Probe", "probe"]

__getattr__, __dir__ = exports.lazy(__name__, {"Probe": "result", "probe": "entry"})
