"""Periodic checks of each tensor's usable range, and numbers that are copied to the host."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from plimsoll.formats import Format
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.scaling.spectral.gradient_banks import KeptBanks, OptimizerBanks
from plimsoll.scaling.spectral.scale_windows import ScaleReport

TWICE = 2  # looks in a row at which no scale served, before it is said


class WindowChecks:
    """The latest look at each tensor's window, and when the next is due: at the first step and every so many steps.

    A look travels to the host while training goes on, and is read when the next is due. On a CPU it is there at once.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps = 0
        self._offered: list[tuple[Any, OptimizerBanks]] = []
        self._kept: list[KeptBanks] = []
        self._found: ScaleReport | None = None
        self._narrow = 0  # looks in a row at which no scale served
        self._said = False

    def offer(self, optimizer: Any, banks: OptimizerBanks) -> None:
        """These banks hold the optimizer's gradients of the present step."""
        self._offered.append((optimizer, banks))

    def drop(self) -> None:
        """Drop the banks that were offered."""
        self._offered.clear()

    def step(self, scale: Tensor, fmt: Format) -> None:
        """The step is over; `scale` is what its gradients carried."""
        if self._steps % self.every == 0:
            self._read(fmt, everything=False)
            self._kept = [banks.keep(optimizer, scale) for optimizer, banks in self._offered if banks.places]
            if scale.device.type == "cpu":
                self._read(fmt, everything=False)
        self._steps += 1
        self._offered.clear()

    def latest(self, fmt: Format) -> ScaleReport | None:
        """The latest report, if there is one; waits for it."""
        self._read(fmt, everything=True)
        return self._found

    def _read(self, fmt: Format, *, everything: bool) -> None:
        if not self._kept or not (everything or all(kept.ready() for kept in self._kept)):
            return
        reports = [kept.report(fmt) for kept in self._kept]
        self._kept = []
        whole = [report for report in reports if report is not None]
        if whole and len(whole) == len(reports):
            tensors = tuple(window for report in whole for window in report.tensors)
            self._found = ScaleReport(format=fmt.name, scale=whole[0].scale, tensors=tensors)
            self._judge(self._found.finding)

    def _judge(self, finding: str | None) -> None:
        self._narrow = 0 if finding is None else self._narrow + 1
        if finding is not None and self._narrow >= TWICE and not self._said:
            self._said = True
            warnings.warn(
                f"SpectralScaler: {finding}. Give such tensors a scale of their own (LayerScaler), or use bf16. Said "
                "once; report() tells at any time.",
                stacklevel=2,
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers; the report itself is not among them."""
        return {"steps": self._steps, "narrow": self._narrow, "said": self._said}

    @classmethod
    def from_dict(cls, every: int, saved: Mapping[str, Any]) -> "WindowChecks":
        """Return the checks that `to_dict` wrote."""
        looks = cls(every)
        looks._steps, looks._narrow, looks._said = saved["steps"], saved["narrow"], saved["said"]
        return looks


class StepNumbers:
    """The few numbers of one step: on their way to the host, or there."""

    __slots__ = ("_given",)

    def __init__(self, given: DeviceValue | list[float]) -> None:
        self._given = given

    def ready(self) -> bool:
        """Whether `numbers` would come back at once."""
        return isinstance(self._given, list) or self._given.ready()

    def numbers(self) -> list[float]:
        """The numbers; waits for the device."""
        if isinstance(self._given, DeviceValue):
            self._given = cast("list[float]", self._given.tensor().tolist())
        return self._given
