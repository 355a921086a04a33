"""Unit scaling: every tensor starts at unit scale, so that FP16 and FP8 train with no loss scale.

Each operation multiplies by a constant forward and by another one backward, which its shapes give. `functional` has the
operations, `nn` the modules, `optim` the optimizers whose learning rate carries over width; `convert` rewrites a model
that was written without any of them, `fold` makes plain weights of it again, and `audit` shows each operation's scale.

All are loaded when they are first used: a level of `plimsoll.prepare` needs the formulas alone, and capturing graphs
loads a good part of torch.
"""

from typing import TYPE_CHECKING

from plimsoll import exports

if TYPE_CHECKING:
    from plimsoll.unit import functional as functional, nn as nn, optim as optim
    from plimsoll.unit.auditing.audit_model import audit as audit
    from plimsoll.unit.auditing.result import Audit as Audit, Comparison as Comparison
    from plimsoll.unit.auditing.rows import Pair as Pair, Reading as Reading, Row as Row
    from plimsoll.unit.changes import Left as Left
    from plimsoll.unit.conversion.convert_model import convert as convert
    from plimsoll.unit.conversion.converted_modules import Converted as Converted, Folded as Folded, Kept as Kept
    from plimsoll.unit.folding.fold_model import fold as fold
    from plimsoll.unit.optim.parameter_kinds import (
        kinds_of as kinds_of,
        tag as tag,
        tag_depth as tag_depth,
        tag_fan_in as tag_fan_in,
    )

# Where each name lives: the same as the block for type checkers above (a test compares them).
_HOMES = {
    **dict.fromkeys(("functional", "nn", "optim"), ""),
    "Audit": "auditing.result",
    "Comparison": "auditing.result",
    "Pair": "auditing.rows",
    "Reading": "auditing.rows",
    "Row": "auditing.rows",
    "audit": "auditing.audit_model",
    "Converted": "conversion.converted_modules",
    "Folded": "conversion.converted_modules",
    "Kept": "conversion.converted_modules",
    "Left": "changes",
    "convert": "conversion.convert_model",
    "fold": "folding.fold_model",
    "kinds_of": "optim.parameter_kinds",
    "tag": "optim.parameter_kinds",
    "tag_depth": "optim.parameter_kinds",
    "tag_fan_in": "optim.parameter_kinds",
}

__getattr__, __dir__ = exports.lazy(__name__, _HOMES)
