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
    "optimizer.updates",
    "optimizer.schedules",
    "optimizer.kept_narrow",
    "loss.targets",
    "loss.divergence",
    "loss.chance",
    "loss.forerunner",
    "errors",
    "layers.zeros",
    "layers.vanishing",
    "layers.drift",
    "wiring.without_effect",
    "wiring.gradients",
    "wiring.model_state",
    "run",
)


def _position(name: str) -> tuple[int, str]:
    own = name.removeprefix(f"{__name__}.")
    return (_ORDER.index(own) if own in _ORDER else len(_ORDER), own)


_modules = (module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg)
for _name in sorted(_modules, key=_position):
    registry.add_own(importlib.import_module(_name))

RULES: tuple[Rule, ...] = tuple(registry.OWN.values())
