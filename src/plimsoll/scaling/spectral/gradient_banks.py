"""Banks that the unscale pass fills, and the numbers that the rule needs of them."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.formats import Format
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.scaling.spectral.rule import MeasuredStep
from plimsoll.scaling.spectral.scale_windows import ScaleReport, scale_report
from plimsoll.scaling.step.gradients import Gradient, all_reduce

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
        """Return the summary of this rank's gradients of the step, on `device`.

        Without gradients it contains only the flags.
        """
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
