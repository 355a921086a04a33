"""Linear layers of a model in FP8, in place, for fp8-unit and fp8-tensor.

`plimsoll.fp8.convert` changes a layer's class. The module and its parameters stay the same objects, so optimizers,
hooks, names and DistributedDataParallel keep working. Removal restores each layer's class and attributes, so a change
of level changes arithmetic only.
"""

import contextlib
import glob
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from plimsoll.emulate.module_regions import Switch, cast_floating, is_native, named_modules
from plimsoll.errors import ArgumentError
from plimsoll.formats import ModulePlan
from plimsoll.fp8 import Left, Linear, cached_weights, convert
from plimsoll.fp8.products import has_units
from plimsoll.fp8.recipe import Recipe
from plimsoll.precision.levels.arithmetic import device_of
from plimsoll.precision.levels.distributed import is_sharded_itself
from plimsoll.precision.levels.policy import Policy
from plimsoll.unit import nn as unit_nn
from plimsoll.watch.names import clean
from plimsoll.watch.taps.compiled_taps import inlined_only

_MADE: "weakref.WeakKeyDictionary[nn.Module, type[nn.Module]]" = weakref.WeakKeyDictionary()  # of active levels

Scaling = Literal["unit", "tensor"]
FP8 = ModulePlan.of("e4m3")
_ROOT = "model"
_OTHER_CLASS = "its class"
_NOT_UNIT_SCALED = "it is not unit-scaled"
_TAKEN = (nn.Linear, unit_nn.Linear, unit_nn.LinearReadout)
_NEVER_CALLED = "NonDynamicallyQuantizableLinear"  # an attention's output: its weight is read, the module never runs


class InPlace:
    """Layers with a temporary class. `left` lists skipped layers with reasons."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [_Attributes(module) for _, module in named_modules(root, twice=False)]
        self._handles: list[Any] = []
        self._root, self._cached, self._caching = root, contextlib.ExitStack(), False
        self._made: list[nn.Module] = []
        self.left: tuple[Left, ...] = ()

    def note(self, module: nn.Module) -> None:
        """Record a module whose class is about to change."""
        _MADE[module] = type(module)
        self._made.append(module)

    def keep_lists_out(
        self, root: nn.Module, switch: Switch, *, inputs: torch.dtype | None = None, outputs: torch.dtype | None = None
    ) -> None:
        """Exclude the layers from Plimsoll's operation lists."""
        # FP8 layers choose their own formats. While the switch is on, the layers take `inputs` and return `outputs`,
        # where these dtypes are given.
        for module in root.modules():
            if isinstance(module, Linear):
                call = _Call(switch, inputs, outputs)
                self._handles.append(module.register_forward_pre_hook(call.enter, prepend=True, with_kwargs=True))
                self._handles.append(module.register_forward_hook(call.leave, prepend=True, always_call=True))

    def hold_weights(self) -> None:
        """Cast each weight once and keep it in FP8 until `release_weights`."""
        if not self._caching:
            self._caching = True
            self._cached.enter_context(cached_weights(self._root))

    def release_weights(self) -> None:
        """Cast weights at each use again."""
        self._caching = False
        self._cached.close()

    def take_back(self) -> None:
        """Restore the class and attributes of all layers."""
        self.release_weights()
        self.left = ()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._before:
            self._before.pop().put_back()
        while self._made:
            _MADE.pop(self._made.pop(), None)


class Layers(InPlace):
    """FP8 layers of a level on a model."""

    def __init__(self, root: nn.Module, scaling: Scaling, policy: Policy, rules: Mapping[str, ModulePlan]) -> None:
        super().__init__(root)
        chosen, self.left = chosen_layers(root, scaling, rules)
        options: dict[str, Any] = {}
        if scaling == "tensor":
            options = {"history": policy.fp8_history, "margin": policy.fp8_margin}
        for name in chosen:
            self.note(root.get_submodule(name))
        try:
            if chosen:
                convert(root, scaling, include=[glob.escape(name or _ROOT) for name in chosen], **options)
        except Exception:
            self.take_back()
            raise
        self.left += _left_by_convert(root, chosen)


def _left_by_convert(root: nn.Module, chosen: Sequence[str]) -> tuple[Left, ...]:
    """Return the chosen layers that `convert` could not change, with the reason."""
    names = {name or _ROOT for name in chosen}
    skipped: list[Left] = getattr(root, "fp8_left", [])
    return tuple(Left(module=clean(left.module), why=left.why) for left in skipped if left.module in names)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has without an active level."""
    return _MADE.get(module, type(module))


def other_rules(rules: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    """Return the rules that ask for something else than the level's own FP8 format."""
    return {name: plan for name, plan in rules.items() if plan != FP8}


# The policy takes precedence. A layer that a rule puts into another format, directly or through a parent module, does
# not become an FP8 layer. A rule of "e4m3" selects a layer that would otherwise be skipped.
def chosen_layers(
    root: nn.Module, scaling: Scaling, rules: Mapping[str, ModulePlan]
) -> tuple[list[str], tuple[Left, ...]]:
    """Return the names of the layers to convert, and the linear layers that stay.

    Raises an `ArgumentError` if no layer can be converted, or one that a rule names cannot.
    """
    chosen: list[str] = []
    left: dict[str, str] = {}
    effective = _effective(root, rules)
    there = False
    for name, module in named_modules(root, twice=False):
        if isinstance(module, Linear) and module not in _MADE:
            _check_scaling(name, module, scaling)
            there = True
            continue
        if not issubclass(own_class(module), nn.Linear):
            continue
        why = _why_not(module, scaling, effective[name])
        if (why or "").startswith(_OTHER_CLASS) and is_sharded_itself(module):
            raise _sharded_before(name)
        if why is None:
            chosen.append(name)
        else:
            left[clean(name) or _ROOT] = why
    if not chosen and not there:
        raise _nothing_to_do(root, scaling, left)
    return chosen, tuple(Left(module=name, why=why) for name, why in left.items())


def _effective(root: nn.Module, rules: Mapping[str, ModulePlan]) -> dict[str, ModulePlan | None]:
    """Return the rule of each module: its own, or that of the nearest parent with one."""
    effective: dict[str, ModulePlan | None] = {}
    for name, _ in named_modules(root, twice=False):
        around = effective.get(name.rpartition(".")[0]) if name else None
        effective[name] = rules.get(name) or around
    return effective


def _why_not(module: nn.Module, scaling: Scaling, plan: ModulePlan | None) -> str | None:
    """Return why a linear layer stays as it is, or None if it becomes an FP8 layer."""
    kind = own_class(module)
    if kind.__name__ == _NEVER_CALLED:
        return "the attention around it multiplies by its weight"
    if plan is not None and plan != FP8:
        return f"the policy has it in {plan.forward}"
    if kind not in _TAKEN:
        return f"{_OTHER_CLASS} {kind.__name__} may have a custom forward"
    if scaling == "unit" and not issubclass(kind, unit_nn.Linear):
        return _NOT_UNIT_SCALED
    kinds: Mapping[str, str] = getattr(module, "unit_kinds", {})
    if (issubclass(kind, unit_nn.LinearReadout) or kinds.get("weight") == "readout") and plan is None:
        return "a readout, whose gradients come straight from the loss; with_module(name, 'e4m3') takes it in"
    return None


def _nothing_to_do(root: nn.Module, scaling: Scaling, left: Mapping[str, str]) -> ArgumentError:
    kind = type(root).__name__
    plain = [name for name, why in left.items() if why == _NOT_UNIT_SCALED]
    if plain:
        some = ", ".join(plain[:3]) + (f" and {len(plain) - 3} more" if len(plain) > 3 else "")
        return ArgumentError(
            f"prepare: expected a unit-scaled model at fp8-unit; got a {kind} whose linear layers ({some}) are not. "
            "Convert it with plimsoll.unit.convert, build it of plimsoll.unit.nn, or use fp8-tensor."
        )
    why = next(iter(left.values()), None)
    there = "none" if why is None else f"{', '.join(list(left)[:3])}: {why}"
    return ArgumentError(
        f"prepare: expected a model with linear layers that can run in FP8 at fp8-{scaling}; got a {kind} with "
        f"{there}. Use amp-bf16."
    )


def _check_scaling(name: str, module: Linear, scaling: Scaling) -> None:
    if module.fp8_recipe.scaling != scaling:
        raise ArgumentError(
            f"prepare: expected FP8 layers whose scaling is {scaling!r} at fp8-{scaling}; got {clean(name) or _ROOT} "
            f"with {module.fp8_recipe.scaling!r}. Use fp8-{module.fp8_recipe.scaling}, or give the model before "
            "fp8.convert."
        )


def _sharded_before(name: str) -> ArgumentError:
    return ArgumentError(
        "prepare: expected linear layers to be FP8 ones before fully_shard is applied to them; got "
        f"{clean(name) or _ROOT}, which is sharded by itself. Call plimsoll.fp8.convert, then fully_shard, then "
        "prepare."
    )


class _Attributes:
    """Class and attributes of a module, for restoring them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._class = module, type(module)
        self._own = frozenset(module.__dict__)
        self._tables = {
            name: table.copy()
            for name in ("_buffers", "_non_persistent_buffers_set")
            if (table := module.__dict__.get(name)) is not None
        }

    def put_back(self) -> None:
        """Restore the class, and remove attributes and buffers that are new."""
        module = self._module
        for name in [name for name in module.__dict__ if name not in self._own]:
            del module.__dict__[name]
        if type(module) is self._class:
            return
        module.__class__ = self._class
        for name, table in self._tables.items():
            now: Any = module.__dict__[name]
            for key in [key for key in now if key not in table]:
                now.discard(key) if isinstance(now, set) else now.pop(key)


class _Call:
    """Hooks around a layer's calls, which run in a region without casts."""

    def __init__(self, switch: Switch, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        self._switch, self._inputs, self._outputs = switch, inputs, outputs
        self._open: list[contextlib.ExitStack] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack = contextlib.ExitStack()
        self._open.append(stack)
        if not self._switch.on:
            return None
        kind = device_of(module).type
        kind = kind if torch.amp.is_autocast_available(kind) else "cpu"  # "meta" has none, and any disabled one works
        stack.enter_context(torch.autocast(kind, enabled=False))
        if self._inputs is None:
            return None
        return cast_floating(args, self._inputs), cast_floating(kwargs, self._inputs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        self._open.pop().close()
        return cast_floating(output, self._outputs) if self._switch.on and self._outputs is not None else None


inlined_only(_Call.enter, _Call.leave)


class PlannedLayers(InPlace):
    """Layers of a plan that are multiplied in FP8, with their `names`."""

    def __init__(self, root: nn.Module, rules: Mapping[str, ModulePlan]) -> None:
        super().__init__(root)
        self.names = frozenset(planned_layers(root, rules))
        for name in self.names:
            module: Any = root.get_submodule(name)
            activations, weights, gradients = (
                rules[name].scales.get(role, 1.0) for role in ("activations", "weights", "gradients")
            )
            self.note(module)
            module.__class__ = Linear
            module.take_recipe(Recipe(scaling="tensor", scales=(activations, weights, gradients)))


def planned_layers(root: nn.Module, rules: Mapping[str, ModulePlan]) -> list[str]:
    """Return linear layers with a rule of FP8, in no module with emulated products."""
    names: list[str] = []
    for name, plan in rules.items():
        in_fp8 = (plan.forward, plan.backward) == (FP8.forward, FP8.backward)
        around = [rules[part] for part in _around(name) if part in rules]
        if in_fp8 and own_class(root.get_submodule(name)) is nn.Linear and all(map(is_native, around)):
            names.append(name)
    return names


def are_multiplied(root: nn.Module, policy: Policy) -> bool:
    """Return whether a plan's FP8 layers are multiplied in FP8, not emulated."""
    device = device_of(root)
    units = device.type == "cuda" and has_units(device)
    return policy.fp8_plans == "multiplied" or (policy.fp8_plans == "auto" and units)


def _around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts))] if name else []
