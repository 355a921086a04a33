"""Low precision on hardware without it: `emulate`, and operation lists as data.

The package can be called as its function: ``plimsoll.emulate(...)``.
"""

from plimsoll import exports
from plimsoll.emulate.autocast import Autocast as Autocast
from plimsoll.emulate.casting import CUDA as CUDA, OperationLists as OperationLists
from plimsoll.emulate.context import Emulation as Emulation
from plimsoll.emulate.entry import emulate as emulate
from plimsoll.emulate.operation_counts import Operations as Operations

exports.show_classes(__name__)
exports.make_callable(__name__, emulate)
