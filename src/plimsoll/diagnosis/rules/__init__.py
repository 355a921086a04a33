"""Rules of diagnosis: each class here is one, with all its texts; no other list."""

import importlib
import pkgutil

from plimsoll.diagnosis.rules import registry
from plimsoll.diagnosis.rules.base import Rule

# Findings of the same severity and step are listed in this order, so it decides which one leads the verdict. Modules
# that are not named follow in alphabetical order.
_ORDER = (
    "underflow",
    "loss_scale",
    "overflow",
    "casts",
    "nonfinite",
    "optimizer",
    "targets",
    "loss",
    "errors",
    "layers",
    "wiring",
    "run",
)


def _position(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


for _name in sorted((module.name for module in pkgutil.iter_modules(__path__)), key=_position):
    registry.add_own(importlib.import_module(f"{__name__}.{_name}"))

RULES: tuple[Rule, ...] = tuple(registry.OWN.values())
