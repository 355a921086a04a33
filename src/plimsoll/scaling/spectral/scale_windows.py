"""Usable scale range per gradient, from banks that the unscale pass fills.

Scales are exponents: k stands for 2**k. A tensor's usable range is from the lowest scale at which certainly less than
`TOLERANCE` of its nonzero values underflow, to the highest at which none overflows. Values that underflowed in FP16
before the measurement are zeros there. If a tensor has zeros and values in the format's lowest binade, as many values
are assumed to have underflowed as are in that binade, and half as many at twice the scale.
"""

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.formats import Format
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.results import NotebookRepr
from plimsoll.scaling.spectral.rule import MeasuredStep
from plimsoll.scaling.step import Gradient, all_reduce

TOLERANCE = 0.01  # as `Spectrum.window`


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWindow:
    """Range of exponents of the scales that fit one tensor's gradient.

    No scale fits if `low` is above `high`.
    """

    name: str
    low: int
    high: int

    @property
    def excess(self) -> int:
        """Binades that the gradient spans in excess of the format, 0 if a scale fits."""
        return max(self.low - self.high, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleReport(NotebookRepr):
    """Usable ranges of scales of all gradients that are not zero, at the latest check."""

    format: str
    scale: float
    tensors: tuple[ScaleWindow, ...]

    @property
    def window(self) -> tuple[int, int] | None:
        """Lowest and highest exponent of the scales that fit all tensors, or None."""
        if not self.tensors:
            return None
        low, high = max(t.low for t in self.tensors), min(t.high for t in self.tensors)
        return (low, high) if low <= high else None

    @property
    def too_wide(self) -> tuple[ScaleWindow, ...]:
        """Tensors that no scale fits, widest first."""
        return tuple(sorted((t for t in self.tensors if t.excess), key=lambda t: -t.excess))

    @property
    def finding(self) -> str | None:
        """One sentence if no scale fits all tensors, or None."""
        if not self.tensors or self.window is not None:
            return None
        if self.too_wide:
            named = ", ".join(f"{t.name} by {t.excess}" for t in self.too_wide)
            return (
                f"no scale fits: the gradients of {len(self.too_wide)} of {len(self.tensors)} tensors span more "
                f"binades than {self.format} has: {named}"
            )
        small = max(self.tensors, key=lambda t: t.low)
        large = min(self.tensors, key=lambda t: t.high)
        return (
            f"no single scale fits: in {self.format} the gradient of {small.name} needs at least 2**{small.low}, and "
            f"that of {large.name} at most 2**{large.high}, {small.low - large.high} binades less"
        )

    def __str__(self) -> str:
        window = self.window
        joint = "none" if window is None else f"2**{window[0]} to 2**{window[1]}"
        head = f"{self.format}, scale 2**{math.log2(self.scale):g}, scales that fit all {len(self.tensors)}: {joint}"
        return "\n".join([head, *(f"  {t.name}: 2**{t.low} to 2**{t.high}" for t in self.tensors)])


def scale_report(
    rows: NDArray[np.int64], names: Sequence[str], scale: float, fmt: Format, tolerance: float = TOLERANCE
) -> ScaleReport:
    """Return the report of gradients that were measured with the scale in them."""
    histogram = rows[:, row_layout.HISTOGRAM : row_layout.HISTOGRAM + row_layout.BINADES]
    some = np.flatnonzero(histogram.any(axis=1))
    exponent = math.log2(scale)
    low = _lowest(histogram[some], rows[some, row_layout.ZEROS], fmt, tolerance)
    high = _highest(rows[some], fmt)
    windows = (
        ScaleWindow(name=names[index], low=math.ceil(exponent + below), high=math.floor(exponent + above))
        for index, below, above in zip(some.tolist(), low.tolist(), high.tolist(), strict=True)
    )
    return ScaleReport(format=fmt.name, scale=scale, tensors=tuple(windows))


def _highest(rows: NDArray[np.int64], fmt: Format) -> NDArray[np.int64]:
    """Return the largest shifts without overflow."""
    extremes = rows[:, row_layout.POSITIVE : row_layout.NEGATIVE + 1].max(axis=1)
    fraction, exponent = np.frexp(fmt.overflow_threshold / extremes.view(np.float64))
    return exponent.astype(np.int64) - 1 - (fraction == 0.5)


def _lowest(histogram: NDArray[np.int64], zeros: NDArray[np.int64], fmt: Format, tolerance: float) -> NDArray[np.int64]:
    """Return the smallest shifts at which few enough values underflow."""
    allowed = tolerance * histogram.sum(axis=1)
    below = np.cumsum(histogram, axis=1)  # [:, i]: values in the binades up to i
    binade = (below < allowed[:, None]).sum(axis=1)  # all binades below this one may underflow
    quantum = fmt.quantum_exponent
    # Half the smallest value starts a binade, and rounds to zero itself. So all of that binade may underflow.
    shift = quantum - (binade + row_layout.LOWEST_BINADE)
    bottom = quantum - row_layout.LOWEST_BINADE
    censored = np.where(below[:, bottom - 1] == 0, np.minimum(zeros, histogram[:, bottom]), 0) if bottom else 0 * zeros
    with np.errstate(divide="ignore"):
        halvings = np.floor(np.log2(censored / allowed)) + 1  # until the number is below the allowed one
    halvings = np.where(np.isfinite(halvings), halvings, 0)
    return np.where(censored >= allowed, np.maximum(shift, halvings), shift).astype(np.int64)


# -- banks, and the numbers that the rule needs of them ----------------------------------------------------------------

_LARGEST = slice(row_layout.POSITIVE, row_layout.NEGATIVE + 1)
_COUNTS = slice(row_layout.HISTOGRAM, row_layout.HISTOGRAM + row_layout.BINADES)
_NONFINITE = slice(row_layout.NANS, row_layout.NEG_INFS + 1)
# The summary of a bank is five int64 words on the bank's device: the key of the largest magnitude, whether a gradient
# is float16, whether a loss is, the number of nonzero finite values, and the number of faint ones among them. Two
# summaries join like spectra: the larger of the first three, the sums of the others. A rank's next scale depends on
# nothing else, so ranks that have joined their summaries choose the same scale.
_WORDS, _LARGER = 5, 3  # words of a summary, and how many of the first join by their maximum


@dataclass(slots=True)
class OptimizerBanks:
    """Banks of one optimizer's gradients by device, with parameters' places."""

    banks: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])
    places: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict[torch.device, list[tuple[int, int]]])
    groups: dict[int, Any] = field(default_factory=dict[int, Any])  # of the meshes of sharded gradients
    _read: bool = True  # the step was summed up, so that the next gradients are those of another

    # Banks are reused from step to step. `places` lists the gradients of the present step only, while a bank may still
    # contain those of an earlier one.
    def prepare(self, gradients: Sequence[Gradient]) -> Tensor:
        """Return a bank with a row for each of one device's gradients."""
        self._begin()
        device = gradients[0].values.device
        bank = self.banks.get(device)
        if bank is None or len(bank) != len(gradients):
            bank = self.banks[device] = kernels.new_bank(len(gradients), device=device)
        self.places[device] = [(gradient.group, gradient.index) for gradient in gradients]
        self.groups.update(_meshes(gradients))
        return bank

    def summary(self, faint_rows: int, flags: tuple[bool, bool], device: torch.device) -> Tensor:
        """Return this rank's summary of the step, on `device`; without gradients the flags."""
        self._begin()
        self._read = True
        parts = [summarize(self.banks[place], faint_rows).to(device, non_blocking=True) for place in self.places]
        return join([no_summary(device, flags), *parts])

    def _begin(self) -> None:
        if self._read:
            self.places.clear()
            self.groups.clear()
            self._read = False

    def norm(self, scale: Tensor) -> Tensor:
        """Return the 2-norm of the unscaled gradients, or Inf if one is not finite."""
        square = torch.zeros((), dtype=torch.float64, device=scale.device)
        broken = torch.zeros((), dtype=torch.int64, device=scale.device)
        for bank in self._measured():
            square += bank[:, row_layout.SUMSQ].view(torch.float64).sum().to(scale.device, non_blocking=True)
            broken += bank[:, _NONFINITE].sum().to(scale.device, non_blocking=True)
        return torch.where(broken > 0, torch.inf, square.sqrt() / scale.double())

    def keep(self, optimizer: Any, scale: Tensor) -> "KeptBanks":
        """Return a copy on its way to the host, with the parameters' names."""
        return KeptBanks(
            [DeviceValue(bank) for bank in self._measured()],
            [parameter_name(optimizer, *place) for places in self.places.values() for place in places],
            DeviceValue(scale),
        )

    def _measured(self) -> list[Tensor]:
        return [self.banks[device] for device in self.places]


@dataclass(frozen=True, slots=True)
class KeptBanks:
    """Banks of one optimizer at one step."""

    banks: list[DeviceValue]
    names: list[str]
    scale: DeviceValue

    def ready(self) -> bool:
        """Return whether `report` returns without waiting."""
        return self.scale.ready() and all(bank.ready() for bank in self.banks)

    def report(self, fmt: Format) -> ScaleReport | None:
        """Return the usable ranges of all tensors, or None if a gradient is not finite.

        Waits for copies that are still on their way.
        """
        rows = np.concatenate([bank.tensor().numpy() for bank in self.banks])
        if rows[:, _NONFINITE].any():
            return None
        return scale_report(rows, self.names, self.scale.value(), fmt)


def no_summary(device: torch.device, flags: tuple[bool, bool] = (False, False)) -> Tensor:
    """Return the summary of no gradients: whether a gradient and a loss are float16."""
    summary = torch.zeros(_WORDS, dtype=torch.int64, device=device)
    for place, flag in enumerate(flags, start=1):
        if flag:
            summary[place].fill_(1)  # a number is filled in without waiting, while a list would be copied
    return summary


def summarize(bank: Tensor, faint_rows: int) -> Tensor:
    """Return the summary of a bank, in which the first `faint_rows` binades are faint."""
    counts = bank[:, _COUNTS].sum(dim=0)
    largest = bank[:, _LARGEST].amax()
    unknown = torch.zeros_like(largest)
    return torch.stack([largest, unknown, unknown, counts.sum(), counts[:faint_rows].sum()])


def join(summaries: Iterable[Tensor]) -> Tensor:
    """Return the joint summary."""
    stacked = torch.stack(list(summaries))
    return torch.cat([stacked[:, :_LARGER].amax(dim=0), stacked[:, _LARGER:].sum(dim=0)])


def join_ranks(summary: Tensor, groups: Iterable[Any]) -> Tensor:
    """Join a summary over the ranks of all groups, in place, and return it."""
    for group in groups:
        all_reduce(summary[:_LARGER], "MAX", group)
        all_reduce(summary[_LARGER:], "SUM", group)
    return summary


def least(scale: Tensor, groups: Iterable[Any]) -> Tensor:
    """Set a scale to the smallest of all ranks' scales, and return it."""
    for group in groups:
        all_reduce(scale, "MIN", group)
    return scale


def numbers_of(summary: Tensor) -> Tensor:
    """Return a summary's words as numbers, with the largest magnitude for its key."""
    return torch.cat([summary[:1].view(torch.float64), summary[1:].double()])


def measured_step(numbers: Sequence[float], *, overflowed: bool) -> tuple[MeasuredStep, bool, bool]:
    """Return a summary's numbers for the rule, with two flags of float16.

    The flags are those of gradients and of losses.
    """
    absmax, half_gradient, half_loss, nonzero, faint = numbers
    step = MeasuredStep(overflowed=overflowed, absmax=absmax, nonzero=int(nonzero), faint=int(faint))
    return step, half_gradient > 0, half_loss > 0


def parameter_name(optimizer: Any, group: int, index: int) -> str:
    """Return the optimizer's name of a parameter, or its position there."""
    names = optimizer.param_groups[group].get("param_names")
    return str(names[index]) if names else f"parameter {index} in group {group} of {type(optimizer).__name__}"


def _meshes(gradients: Iterable[Gradient]) -> dict[int, Any]:
    """Return the process groups of DTensor gradients, by their ids."""
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    meshes = (getattr(cast("Any", gradient.parameter).grad, "device_mesh", None) for gradient in gradients)
    return {id(group): group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()}


# -- periodic checks of each tensor's usable range ---------------------------------------------------------------------

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
                "warning appears once; report() has the latest ranges.",
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
