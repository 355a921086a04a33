"""Periodic checks of each tensor's usable range."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from plimsoll.formats import Format
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.scaling.spectral.gradient_banks import KeptBanks, OptimizerBanks
from plimsoll.scaling.spectral.scale_windows import ScaleReport

TWICE = 2  # checks in a row without a scale that fits, before the warning


class WindowChecks:
    """Latest check of each tensor's usable range, repeated every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps = 0
        self._offered: list[tuple[Any, OptimizerBanks]] = []
        self._copies: list[KeptBanks] = []
        self._report: ScaleReport | None = None
        self._narrow = 0  # checks in a row without a scale that fits
        self._warned = False

    # A check is copied to the host while training continues, and is read when the next is due. On a CPU it is read at
    # once.
    def offer(self, optimizer: Any, banks: OptimizerBanks) -> None:
        """Offer banks with an optimizer's gradients of the present step."""
        self._offered.append((optimizer, banks))

    def drop(self) -> None:
        """Drop the banks that were offered."""
        self._offered.clear()

    def step(self, scale: Tensor, fmt: Format) -> None:
        """End a step whose gradients had this scale."""
        if self._steps % self.every == 0:
            self._read(fmt, everything=False)
            self._copies = [banks.keep(optimizer, scale) for optimizer, banks in self._offered if banks.places]
            if scale.device.type == "cpu":
                self._read(fmt, everything=False)
        self._steps += 1
        self._offered.clear()

    def latest(self, fmt: Format) -> ScaleReport | None:
        """Return the latest report, if there is one. Waits for it."""
        self._read(fmt, everything=True)
        return self._report

    def _read(self, fmt: Format, *, everything: bool) -> None:
        if not self._copies or not (everything or all(banks.ready() for banks in self._copies)):
            return
        reports = [banks.report(fmt) for banks in self._copies]
        self._copies = []
        whole = [report for report in reports if report is not None]
        if whole and len(whole) == len(reports):
            tensors = tuple(window for report in whole for window in report.tensors)
            self._report = ScaleReport(format=fmt.name, scale=whole[0].scale, tensors=tensors)
            self._judge(self._report.finding)

    def _judge(self, finding: str | None) -> None:
        self._narrow = 0 if finding is None else self._narrow + 1
        if finding is not None and self._narrow >= TWICE and not self._warned:
            self._warned = True
            warnings.warn(
                f"SpectralScaler: {finding}. Give such tensors separate scales (LayerScaler), or use bf16. This "
                "warning "
                "appears once; report() has the latest ranges.",
                stacklevel=2,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, without the report."""
        return {"steps": self._steps, "narrow": self._narrow, "said": self._warned}

    @classmethod
    def from_dict(cls, every: int, saved: Mapping[str, Any]) -> "WindowChecks":
        """Return the checks that `to_dict` wrote."""
        checks = cls(every)
        checks._steps, checks._narrow, checks._warned = saved["steps"], saved["narrow"], saved["said"]
        return checks


class StepNumbers:
    """Numbers of one step, on the host or on their way to it."""

    __slots__ = ("_value",)

    def __init__(self, value: DeviceValue | list[float]) -> None:
        self._value = value

    def ready(self) -> bool:
        """Return whether `numbers` returns without waiting."""
        return isinstance(self._value, list) or self._value.ready()

    def numbers(self) -> list[float]:
        """Return the numbers. Waits for the device."""
        if isinstance(self._value, DeviceValue):
            self._value = cast("list[float]", self._value.tensor().tolist())
        return self._value
