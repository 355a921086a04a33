"""What holds while a loop's forward runs: operation lists, emulation, TF32, bans, and the regions of single modules.

On CUDA the amp levels are torch's own autocast, as long as the lists are torch's; everywhere else the same lists, or
the user's, are applied by `plimsoll.emulate`, since torch's lists for CPUs are other ones, which leave sums, norms and
losses in 16 bits. CPUs compute FP16 and BF16 products through `emulate` too: accumulated in FP32 and rounded once, as a
GPU does it. At levels that cast the model no operation is cast; operations that are banned are refused all the same.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import nn

from plimsoll.emulate.autocast import Autocast
from plimsoll.emulate.casting.operation_lists import OperationLists
from plimsoll.emulate.entry import emulate, of_module
from plimsoll.emulate.module_regions import Regions, Switch, is_native
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, ModulePlan, get
from plimsoll.precision.levels.catalogue import DTYPES, Level
from plimsoll.precision.levels.policy import Policy

_AMPERE = (8, 0)


def has_tf32(device: torch.device) -> bool:
    """Whether the device multiplies in TF32 itself."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _AMPERE


@contextlib.contextmanager
def tf32() -> Generator[None]:
    """Inside, CUDA's FP32 matrix products and convolutions run in TF32."""
    places = _places()
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _places() -> list[Any]:
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    if not all(hasattr(place, "fp32_precision") for place in places):
        raise ArgumentError(
            f"prepare: expected a torch with fp32_precision for the level tf32; got torch {torch.__version__}. "
            "Use torch 2.9 or later."
        )
    return places


Context = contextlib.AbstractContextManager[Any]


class Computing:
    """The contexts of one level on one model."""

    def __init__(self, root: nn.Module, level: Level, policy: Policy, rules: Mapping[str, ModulePlan]) -> None:
        self._level, self._lists = level, policy.operations
        self._device = device_of(root)
        native = all(is_native(said) for said in rules.values())
        self.native = self._device.type == "cuda" and not policy.own_lists and native  # torch's own autocast serves
        outside = ModulePlan.of(level.operations or "fp32")
        self._regions = Regions(root, {} if level.casts else rules, outside, self._entering()).attach()

    @contextlib.contextmanager
    def forward(self) -> Generator[None]:
        """Around the forward and the loss."""
        with self._precision(), self._operations():
            self._regions.switch.on = True
            try:
                yield
            finally:
                self._regions.switch.on = False

    @contextlib.contextmanager
    def backward(self) -> Generator[None]:
        """Around the backward and the step, where what the forward recorded decides everything but TF32.

        A module that is called in it is recomputed by a checkpoint, in its own format again.
        """
        with self._precision(forward=False):
            self._regions.switch.on = True
            try:
                yield
            finally:
                self._regions.switch.on = False

    @property
    def switch(self) -> Switch:
        """On while the forward or the backward runs."""
        return cast("Switch", self._regions.switch)

    def remove(self) -> None:
        """Takes the regions' hooks away."""
        self._regions.remove()

    def _precision(self, *, forward: bool = True) -> Context:
        if self._level.matmuls is None:
            return contextlib.nullcontext()
        if has_tf32(self._device):
            return tf32()
        return emulate(forward="tf32", backward="tf32") if forward else contextlib.nullcontext()

    def _operations(self) -> Context:
        if self._level.operations is not None:
            return self._entering()(ModulePlan.of(self._level.operations))
        if not self._level.casts:
            return contextlib.nullcontext()
        bans = OperationLists(banned=self._lists.banned)
        return _in_16_bits(self._device, bans, self._level.dtype)

    def _entering(self) -> Callable[[ModulePlan], Context]:
        """What enters a format, as a function that keeps nothing of this object alive."""
        native, kind, lists, device = self.native, self._device.type, self._lists, self._device

        def enter(said: ModulePlan) -> Context:
            if not is_native(said):
                return of_module(said)
            if said.forward == "fp32":
                return torch.autocast(kind, enabled=False) if native else _without(device)
            dtype = DTYPES[said.forward]
            return torch.autocast(kind, dtype) if native else _in_16_bits(device, lists, dtype)

        return enter


def device_of(root: nn.Module) -> torch.device:
    """Where the model computes: the device of its first parameter, or the CPU."""
    return next((p.device for p in root.parameters()), torch.device("cpu"))


def _in_16_bits(device: torch.device, lists: OperationLists, dtype: torch.dtype) -> Context:
    """The lists in force; on a CPU with products accumulated in FP32."""
    return emulate(dtype, lists=lists) if device.type == "cpu" else Autocast(lists, dtype)


def _without(device: torch.device) -> Context:
    """A region in FP32 inside another."""
    return emulate("fp32") if device.type == "cpu" else Autocast(enabled=False)


def check_policy(level: Level, policy: Policy, rules: Mapping[str, ModulePlan]) -> None:
    """Raises for what a policy or plan asks of a level that it cannot do."""
    if policy.own_lists and level.operations is None:
        raise ArgumentError(
            f"prepare: expected a policy of modules only at {level.name}, which casts no operations; got operation "
            "lists of your own. Use amp-fp16 or amp-bf16, or take with_operation(...) out."
        )
    strange = sorted({said.forward for said in rules.values() if not is_native(said)})
    if level.casts and strange:
        raise ArgumentError(
            f"prepare: expected modules in {', '.join(DTYPES)} at {level.name}, which keeps weights in them; got "
            f"{', '.join(strange)}. Use an amp level, which emulates other formats in the operations."
        )
    for fmt in sorted({fmt for said in rules.values() if not is_native(said) for fmt in (said.forward, said.backward)}):
        found = get(fmt)
        element = found.element if isinstance(found, BlockFormat) else found
        if not element.signed or element.bits > 32:
            raise ArgumentError(
                f"prepare: expected formats of signed numbers of at most 32 bits for modules; got {fmt}. "
                "Choose another format for it."
            )
