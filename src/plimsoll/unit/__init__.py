"""Unit scaling: every tensor starts at unit scale, so that FP16 and FP8 train with no loss scale.

Each operation multiplies by a constant forward and by another one backward, which its shapes give. `functional` has the
operations, `nn` the modules, `optim` the optimizers whose learning rate carries over width; `convert` rewrites a model
that was written without any of them, `fold` makes plain weights of it again, and `audit` shows each operation's scale.

All are loaded when they are first used: a level of `plimsoll.prepare` needs the formulas alone, and capturing graphs
loads a good part of torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.unit import functional as functional, nn as nn, optim as optim
    from plimsoll.unit._audit import audit as audit
    from plimsoll.unit._audit_compare import Comparison as Comparison, Pair as Pair
    from plimsoll.unit._audit_result import Audit as Audit
    from plimsoll.unit._audit_rows import Reading as Reading, Row as Row
    from plimsoll.unit._changes import Left as Left
    from plimsoll.unit._convert import convert as convert
    from plimsoll.unit._converted import Converted as Converted, Folded as Folded
    from plimsoll.unit._fold import fold as fold
    from plimsoll.unit._fold_plan import Kept as Kept
    from plimsoll.unit._kinds import (
        kinds_of as kinds_of,
        tag as tag,
        tag_depth as tag_depth,
        tag_fan_in as tag_fan_in,
    )

_ROOMS = ("functional", "nn", "optim")
# Where each name lives: the same as the block for type checkers above (a test compares them).
_HOMES = {
    "Audit": "_audit_result",
    "Comparison": "_audit_compare",
    "Pair": "_audit_compare",
    "Reading": "_audit_rows",
    "Row": "_audit_rows",
    "audit": "_audit",
    "Converted": "_converted",
    "Folded": "_converted",
    "Kept": "_fold_plan",
    "Left": "_changes",
    "convert": "_convert",
    "fold": "_fold",
    "kinds_of": "_kinds",
    "tag": "_kinds",
    "tag_depth": "_kinds",
    "tag_fan_in": "_kinds",
}


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"plimsoll.unit.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"plimsoll.unit.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'plimsoll.unit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS, *_HOMES})
