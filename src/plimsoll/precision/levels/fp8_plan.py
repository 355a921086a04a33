"""A plan's linear layers in E4M3 and E5M2, multiplied in FP8 at the plan's constant scales, and not emulated.

Both give the same: the plan's scales are powers of two, so that it is one whether a product is divided by them or its
operands were. Bit for bit so where products are summed in FP32 in the same order; FP8 units sum in an order of their
own. What is no linear layer of torch's, has another format, or lies in a module whose products are emulated, stays
emulated.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from plimsoll.emulate.module_regions import is_native
from plimsoll.formats import ModulePlan
from plimsoll.fp8 import Linear
from plimsoll.fp8.products import has_units
from plimsoll.fp8.recipe import Recipe
from plimsoll.precision.levels.arithmetic import device_of
from plimsoll.precision.levels.fp8_layers import FP8, InPlace, own_class
from plimsoll.precision.levels.policy import Policy


class PlannedLayers(InPlace):
    """The layers of a plan that are multiplied in FP8; `names` are theirs."""

    def __init__(self, root: nn.Module, rules: Mapping[str, ModulePlan]) -> None:
        super().__init__(root)
        self.names = frozenset(planned_layers(root, rules))
        for name in self.names:
            module: Any = root.get_submodule(name)
            said = rules[name].scales
            scales = said.get("activations", 1.0), said.get("weights", 1.0), said.get("gradients", 1.0)
            self.note(module)
            module.__class__ = Linear
            module.take_recipe(Recipe(scaling="tensor", scales=scales))


def planned_layers(root: nn.Module, rules: Mapping[str, ModulePlan]) -> list[str]:
    """The linear layers that a rule of their own has in FP8, in no module whose products are emulated."""
    found: list[str] = []
    for name, said in rules.items():
        in_fp8 = (said.forward, said.backward) == (FP8.forward, FP8.backward)
        around = [rules[part] for part in _around(name) if part in rules]
        if in_fp8 and own_class(root.get_submodule(name)) is nn.Linear and all(map(is_native, around)):
            found.append(name)
    return found


def are_multiplied(root: nn.Module, policy: Policy) -> bool:
    """Whether such layers are to run in FP8: where the device has FP8 units, or the policy says so."""
    device = device_of(root)
    units = device.type == "cuda" and has_units(device)
    return policy.fp8_plans == "multiplied" or (policy.fp8_plans == "auto" and units)


def _around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts))] if name else []
