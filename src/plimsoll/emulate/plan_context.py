"""`emulate` of a plan: the modules that the plan names compute in their formats."""

import contextlib
import fnmatch
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from plimsoll import checks
from plimsoll.emulate.context import Emulation, eagerly
from plimsoll.emulate.dispatch import frame_entry, thread_frame
from plimsoll.emulate.dispatch.thread_frame import Frame
from plimsoll.emulate.module_regions import NATIVE, OpenContexts, Regions, is_native, named_modules
from plimsoll.emulate.operation_counts import Operations
from plimsoll.errors import ArgumentError
from plimsoll.formats import ROLES, ModulePlan, Plan
from plimsoll.watch.names import clean, unwrapped

ROOT = "model"  # name of the root module, as in a watch

# Submodules of torch.nn.modules whose modules multiply nothing, and whose operations are on no low list.
_MULTIPLY_NOTHING = frozenset(
    """
    activation batchnorm channelshuffle distance dropout flatten fold instancenorm loss normalization padding
    pixelshuffle pooling sparse upsampling
""".split()
)


class PlannedEmulation(Emulation):
    """Context returned by `emulate` for a plan: re-entrant, and a decorator too."""

    def __init__(self, plan: Plan, model: nn.Module, enter: Callable[[ModulePlan], Emulation]) -> None:
        root = unwrapped(model)
        rules = rules_of(plan, root, "emulate")
        layered = next((name for name, rule in rules.items() if is_native(rule) and rule.gradients is not None), None)
        if layered is not None:
            raise ArgumentError(
                f"emulate: expected a plan without loss scales per layer; got one for {layered or ROOT}, which needs a "
                "LayerScaler. Pass the plan to plimsoll.prepare, which makes one."
            )
        self._title = f"{plan.target or 'a plan'} of {type(root).__name__}"
        self._made: dict[ModulePlan, Emulation] = {}
        self._enter = enter
        self._open, self._lock, self._entered = OpenContexts(), threading.Lock(), 0
        self._regions = Regions(root, rules, ModulePlan.of("fp32"), self._emulation, self._open)

    @property
    def operations(self) -> Operations:
        """Number of runs of each operation in the modules of the plan."""
        emulated, native = Counter[str](), Counter[str]()
        for emulation in self._made.values():
            emulated.update(emulation.operations.emulated)
            native.update(emulation.operations.native)
        return Operations(emulated=dict(emulated), native=dict(native))

    def __repr__(self) -> str:
        """Return the plan's target, the model, and how many operations ran so far."""
        return f"<PlannedEmulation: {self._title}, {self.operations.counted}>"

    @contextlib.contextmanager
    def _context(self) -> Generator[None]:
        with self._lock:
            if not self._entered:
                self._regions.attach()
            self._entered += 1
        try:
            with eagerly() as eager:
                around = thread_frame.current() or Frame()
                with frame_entry.entered(replace(around, again=self, eager=eager)):
                    yield
        finally:
            with self._lock:
                self._entered -= 1
                if not self._entered:
                    self._regions.remove()

    def _emulation(self, plan: ModulePlan) -> Emulation:
        if plan not in self._made:
            self._made[plan] = self._enter(plan)
        return self._made[plan]


def plan_of(operation: str, plan: "Plan | str | os.PathLike[str]") -> Plan:
    """Return the plan, or load it from its file."""
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    if not path.is_file():
        raise ArgumentError(
            f"{operation}: expected a plan file; got {os.fspath(path)!r}, which does not exist. Save a plan there."
        )
    return Plan.load(path)


def rules_of(plan: Plan, root: nn.Module, operation: str) -> dict[str, ModulePlan]:
    """Return the plan's rule for each module of the model, by its first name.

    The name of the root is empty. Raises an `ArgumentError` if a name of the plan matches no module, two rules
    contradict each other, or a module cannot do what its rule asks.
    """
    named = named_modules(root)
    shown = {name: clean(name) or ROOT for name, _ in named}
    for glob in plan.formats:
        check_matches(operation, "plan", glob, shown.values())
    first: dict[int, str] = {}
    rules: dict[str, ModulePlan] = {}
    by: dict[str, str | None] = {}
    for name, module in named:
        mine = first.setdefault(id(module), name)
        module_plan, rule = plan.module(shown[name]), plan.rule_for(shown[name])
        if rule is not None and rule == shown[name]:
            _check_multiplies(operation, module, rule, plan.formats[rule])
        if module_plan is None or (mine in rules and (rule is None or module_plan == rules[mine])):
            continue
        if by.get(mine) is not None:
            raise ArgumentError(
                f"{operation}: expected one format for a module that has two names; got {by[mine]!r} and {rule!r}, "
                f"which differ for {shown[mine]}. Name it once."
            )
        _check_scales(operation, shown[name], module_plan)
        rules[mine], by[mine] = module_plan, rule
    return rules


def check_matches(operation: str, what: str, glob: str, names: Iterable[str]) -> None:
    """Raise `ArgumentError` with the nearest names if the glob matches no name."""
    shown = list(names)
    if glob in shown or any(fnmatch.fnmatchcase(name, glob) for name in shown):
        return
    near = checks.nearest(glob, shown) or shown[:5]
    raise ArgumentError(
        f"{operation}: expected each module of the {what} to be in the model; got {glob!r}, which matches none. "
        f"Names are like {', '.join(near)}."
    )


def check_alone(arguments: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` for further arguments next to a plan."""
    strange = [name for name, value in arguments.items() if value is not usual.get(name)]
    if strange:
        raise ArgumentError(
            f"emulate: expected a plan with its model alone; got {', '.join(strange)} too. Write formats into the plan."
        )


def _check_multiplies(operation: str, module: nn.Module, name: str, fmt: str) -> None:
    """Raise `ArgumentError` for a module named by itself that no format changes."""
    place, kind = type(module).__module__.rpartition("."), type(module).__name__
    nothing = place[0] == "torch.nn.modules" and place[2] in _MULTIPLY_NOTHING and kind != "MultiheadAttention"
    if fmt.lower() != "fp32" and nothing:
        raise ArgumentError(
            f"{operation}: expected formats for modules that multiply matrices; got {name!r} = {fmt!r}, a {kind}, "
            "which multiplies nothing. Remove it from the plan."
        )
    if kind == "NonDynamicallyQuantizableLinear":
        raise ArgumentError(
            f"{operation}: expected modules that are called; got {name!r}, whose weight the attention around it "
            f"multiplies by. Name {name.rpartition('.')[0]!r}."
        )


def _check_scales(operation: str, name: str, plan: ModulePlan) -> None:
    strange = [role for role in ROLES[:2] if role in plan.scales]
    if strange and is_native(plan):
        raise ArgumentError(
            f"{operation}: expected scales of {' and '.join(strange)} with formats that values are cast to; got "
            f"{name} in {plan.forward}, which it computes in. Only gradients can be scaled there ({', '.join(NATIVE)})."
        )
