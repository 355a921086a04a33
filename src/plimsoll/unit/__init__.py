"""Unit scaling: tensors at unit scale, for FP16 and FP8 without a loss scale.

Each operation multiplies by one constant forward and by another one backward, which depend on its shapes. `functional`
has the operations, `nn` the modules, `optim` the optimizers whose learning rate carries over width. `convert` rewrites
an ordinary model, `fold` turns it into plain weights again, and `audit` measures the scale of each operation.

All are loaded on first use. A level of `plimsoll.prepare` needs the formulas alone, while capturing graphs loads a
large part of torch.
"""

from typing import TYPE_CHECKING

from plimsoll import exports

if TYPE_CHECKING:
    from plimsoll.unit import functional as functional, nn as nn, optim as optim
    from plimsoll.unit.auditing.audit_model import audit as audit
    from plimsoll.unit.auditing.result import (
        Audit as Audit,
        Comparison as Comparison,
        Pair as Pair,
        Reading as Reading,
        Row as Row,
    )
    from plimsoll.unit.changes import Left as Left, SkippedOperation as SkippedOperation
    from plimsoll.unit.conversion.convert_model import convert as convert
    from plimsoll.unit.conversion.converted_modules import (
        Converted as Converted,
        Folded as Folded,
        Kept as Kept,
        RemainingFactor as RemainingFactor,
    )
    from plimsoll.unit.folding import fold as fold
    from plimsoll.unit.optim.parameter_kinds import (
        kinds_of as kinds_of,
        tag as tag,
        tag_depth as tag_depth,
        tag_fan_in as tag_fan_in,
    )

# Module of each name, the same as in the block for type checkers above (a test compares them).
_MODULES = {
    **dict.fromkeys(("functional", "nn", "optim"), ""),
    **dict.fromkeys(("Audit", "Comparison", "Pair", "Reading", "Row"), "auditing.result"),
    "audit": "auditing.audit_model",
    **dict.fromkeys(("Left", "SkippedOperation"), "changes"),
    **dict.fromkeys(("Converted", "Folded", "Kept", "RemainingFactor"), "conversion.converted_modules"),
    "convert": "conversion.convert_model",
    "fold": "folding",
    **dict.fromkeys(("kinds_of", "tag", "tag_depth", "tag_fan_in"), "optim.parameter_kinds"),
}

__getattr__, __dir__ = exports.lazy(__name__, _MODULES)
