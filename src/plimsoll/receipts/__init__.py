"""Precision receipts: what one training step runs in, against its declaration.

`receipt` records a step of a model, `receipt_of_run` reads what a recorded run has of it, and `ScriptStep` records one
step of a script. All of them return a `Receipt`.
"""

from plimsoll import exports
from plimsoll.receipts.declared.deviations import KINDS as KINDS, DeviationKind as DeviationKind
from plimsoll.receipts.recorded_run import receipt_of_run as receipt_of_run
from plimsoll.receipts.result import Receipt as Receipt
from plimsoll.receipts.rows import (
    Deviation as Deviation,
    MemoryUse as MemoryUse,
    Row as Row,
    TensorRow as TensorRow,
)
from plimsoll.receipts.take import receipt as receipt

exports.show_classes(__name__)
