"""Arithmetic of a level during forward and backward.

It consists of operation lists, emulation, TF32, banned operations and regions of other formats.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import nn

from plimsoll.emulate.autocast import Autocast
from plimsoll.emulate.casting import OperationLists
from plimsoll.emulate.entry import emulate, of_module
from plimsoll.emulate.module_regions import Regions, Switch, is_native
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, ModulePlan, get
from plimsoll.precision.levels.catalogue import DTYPES, Level
from plimsoll.precision.levels.policy import Policy

_AMPERE = (8, 0)


def has_tf32(device: torch.device) -> bool:
    """Return whether the device has TF32 matrix products."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _AMPERE


@contextlib.contextmanager
def tf32() -> Generator[None]:
    """Run CUDA's FP32 matrix products and convolutions in TF32."""
    backends: Any = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


Context = contextlib.AbstractContextManager[Any]


class Arithmetic:
    """Contexts of one level on one model."""

    def __init__(self, root: nn.Module, level: Level, policy: Policy, rules: Mapping[str, ModulePlan]) -> None:
        self._level, self._lists = level, policy.operations
        self._device = device_of(root)
        native = all(is_native(plan) for plan in rules.values())
        self.native = self._device.type == "cuda" and not policy.own_lists and native  # torch's own autocast is enough
        outside = ModulePlan.of(level.operations or "fp32")
        self._regions = Regions(root, {} if level.casts else rules, outside, self._entering()).attach()

    @contextlib.contextmanager
    def forward(self) -> Generator[None]:
        """Context of the forward and the loss."""
        with self._precision(), self._operations():
            self._regions.switch.on = True
            try:
                yield
            finally:
                self._regions.switch.on = False

    @contextlib.contextmanager
    def backward(self) -> Generator[None]:
        """Context of the backward and the step, which sets TF32 again."""
        with self._precision(forward=False):
            # Formats follow from the recorded forward. A module that a checkpoint recomputes during backward runs in
            # its own format again.
            self._regions.switch.on = True
            try:
                yield
            finally:
                self._regions.switch.on = False

    @property
    def switch(self) -> Switch:
        """Switch that is on while the forward or the backward runs."""
        return cast("Switch", self._regions.switch)

    def remove(self) -> None:
        """Remove the regions' hooks."""
        self._regions.remove()

    def _precision(self, *, forward: bool = True) -> Context:
        if self._level.matmuls is None:
            return contextlib.nullcontext()
        if has_tf32(self._device):
            return tf32()
        return emulate(forward="tf32", backward="tf32") if forward else contextlib.nullcontext()

    # On CUDA the amp levels use torch's own autocast if the lists are torch's. Everywhere else `plimsoll.emulate`
    # applies the same lists (or the user's), because torch's lists for CPUs differ: they leave sums, norms and losses
    # in 16 bits. On a CPU, FP16 and BF16 products also go through `emulate`: accumulated in FP32 and rounded once, as
    # on a GPU. Levels that cast the model cast no operations, but refuse banned ones all the same.
    def _operations(self) -> Context:
        if self._level.operations is not None:
            return self._entering()(ModulePlan.of(self._level.operations))
        if not self._level.casts:
            return contextlib.nullcontext()
        bans = OperationLists(banned=self._lists.banned)
        return _in_16_bits(self._device, bans, self._level.dtype)

    def _entering(self) -> Callable[[ModulePlan], Context]:
        """Return a function that enters a format. It keeps no reference to this object."""
        native, kind, lists, device = self.native, self._device.type, self._lists, self._device

        def enter(plan: ModulePlan) -> Context:
            if not is_native(plan):
                return of_module(plan)
            if plan.forward == "fp32":
                return torch.autocast(kind, enabled=False) if native else _without(device)
            dtype = DTYPES[plan.forward]
            return torch.autocast(kind, dtype) if native else _in_16_bits(device, lists, dtype)

        return enter


def device_of(root: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or the CPU."""
    return next((p.device for p in root.parameters()), torch.device("cpu"))


def _in_16_bits(device: torch.device, lists: OperationLists, dtype: torch.dtype) -> Context:
    """Return the context of the lists. A CPU accumulates products in FP32."""
    return emulate(dtype, lists=lists) if device.type == "cpu" else Autocast(lists, dtype)


def _without(device: torch.device) -> Context:
    """Return the context of an FP32 region inside another one."""
    return emulate("fp32") if device.type == "cpu" else Autocast(enabled=False)


def check_policy(level: Level, policy: Policy, rules: Mapping[str, ModulePlan]) -> None:
    """Raise for a policy or plan that the level cannot apply."""
    if policy.own_lists and level.operations is None:
        raise ArgumentError(
            f"prepare: expected a policy of modules only at {level.name}, which casts no operations; got custom "
            "operation lists. Use amp-fp16 or amp-bf16, or take with_operation(...) out."
        )
    strange = sorted({plan.forward for plan in rules.values() if not is_native(plan)})
    if level.casts and strange:
        raise ArgumentError(
            f"prepare: expected modules in {', '.join(DTYPES)} at {level.name}, which keeps weights in them; got "
            f"{', '.join(strange)}. Use an amp level, which emulates other formats in the operations."
        )
    for fmt in sorted({fmt for plan in rules.values() if not is_native(plan) for fmt in (plan.forward, plan.backward)}):
        number_format = get(fmt)
        element = number_format.element if isinstance(number_format, BlockFormat) else number_format
        if not element.signed or element.bits > 32:
            raise ArgumentError(
                f"prepare: expected formats of signed numbers of at most 32 bits for modules; got {fmt}. "
                "Choose another format for it."
            )
