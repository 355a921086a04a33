"""Banks that the unscale pass fills, and the few numbers of them that the rule needs.

The summary of a bank is five int64 words on the bank's device: the key of the largest magnitude, whether a gradient is
float16, whether a loss is, the number of nonzero finite values, and how many of these are faint. Two summaries join as
spectra do: the larger of the first three, the sums of the others. All that a rank's next scale follows from is among
them, so that ranks which have joined theirs go to the same scale.
"""

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
from plimsoll.scaling.spectral.rule import Look
from plimsoll.scaling.spectral.scale_windows import ScaleReport, scale_report
from plimsoll.scaling.step.gradients import Gradient

_LARGEST = slice(row_layout.POSITIVE, row_layout.NEGATIVE + 1)
_COUNTS = slice(row_layout.HISTOGRAM, row_layout.HISTOGRAM + row_layout.BINADES)
_NONFINITE = slice(row_layout.NANS, row_layout.NEG_INFS + 1)
_WORDS, _LARGER = 5, 3  # of a summary; the first so many join by their maximum


@dataclass(slots=True)
class OptimizerBanks:
    """The banks of one optimizer's gradients, by device, and where in it their parameters stand.

    Banks stay from step to step. What was measured in the present one is told by `places`: a step without gradients has
    none, though its banks still hold those of a step before.
    """

    banks: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])
    places: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict[torch.device, list[tuple[int, int]]])
    groups: dict[int, Any] = field(default_factory=dict[int, Any])  # of the meshes over which gradients are spread
    _read: bool = True  # what was measured was summed up: what comes next is another step's

    def prepare(self, gradients: Sequence[Gradient]) -> Tensor:
        """A bank with a row for each of one device's gradients, the same as in the step before if it fits."""
        self._begin()
        device = gradients[0].values.device
        bank = self.banks.get(device)
        if bank is None or len(bank) != len(gradients):
            bank = self.banks[device] = kernels.new_bank(len(gradients), device=device)
        self.places[device] = [(gradient.group, gradient.index) for gradient in gradients]
        self.groups.update(_meshes(gradients))
        return bank

    def summary(self, faint_rows: int, flags: tuple[bool, bool], device: torch.device) -> Tensor:
        """The summary of this rank's gradients of the step, on `device`; without any, of nothing but the flags."""
        self._begin()
        self._read = True
        parts = [summarise(self.banks[place], faint_rows).to(device, non_blocking=True) for place in self.places]
        return join([no_summary(device, flags), *parts])

    def _begin(self) -> None:
        if self._read:
            self.places.clear()
            self.groups.clear()
            self._read = False

    def norm(self, scale: Tensor) -> Tensor:
        """The 2-norm of the gradients with the scale undone; Inf if one is not finite."""
        square = torch.zeros((), dtype=torch.float64, device=scale.device)
        broken = torch.zeros((), dtype=torch.int64, device=scale.device)
        for bank in self._measured():
            square += bank[:, row_layout.SUMSQ].view(torch.float64).sum().to(scale.device, non_blocking=True)
            broken += bank[:, _NONFINITE].sum().to(scale.device, non_blocking=True)
        return torch.where(broken > 0, torch.inf, square.sqrt() / scale.double())

    def keep(self, optimizer: Any, scale: Tensor) -> "KeptBanks":
        """A copy on its way to the host, with the parameters' names: what the next step measures leaves it alone."""
        return KeptBanks(
            [DeviceValue(bank) for bank in self._measured()],
            [parameter_name(optimizer, *place) for places in self.places.values() for place in places],
            DeviceValue(scale),
        )

    def _measured(self) -> list[Tensor]:
        return [self.banks[device] for device in self.places]


@dataclass(frozen=True, slots=True)
class KeptBanks:
    """The banks of one optimizer as they were at one step."""

    banks: list[DeviceValue]
    names: list[str]
    scale: DeviceValue

    def ready(self) -> bool:
        """Whether `report` would come back at once."""
        return self.scale.ready() and all(bank.ready() for bank in self.banks)

    def report(self, fmt: Format) -> ScaleReport | None:
        """The windows of all tensors; None where a gradient is not finite. Waits for what is still on its way."""
        rows = np.concatenate([bank.tensor().numpy() for bank in self.banks])
        if rows[:, _NONFINITE].any():
            return None
        return scale_report(rows, self.names, self.scale.value(), fmt)


def no_summary(device: torch.device, flags: tuple[bool, bool] = (False, False)) -> Tensor:
    """The summary of no gradients; `flags` tell whether a gradient was float16, and whether a loss was."""
    found = torch.zeros(_WORDS, dtype=torch.int64, device=device)
    for place, flag in enumerate(flags, start=1):
        if flag:
            found[place].fill_(1)  # a number is filled in without waiting; a list would be copied
    return found


def summarise(bank: Tensor, faint_rows: int) -> Tensor:
    """The summary of a bank; values of the first `faint_rows` binades are faint. Waits for nothing."""
    counts = bank[:, _COUNTS].sum(dim=0)
    largest = bank[:, _LARGEST].amax()
    unknown = torch.zeros_like(largest)
    return torch.stack([largest, unknown, unknown, counts.sum(), counts[:faint_rows].sum()])


def join(summaries: Iterable[Tensor]) -> Tensor:
    """The summary of all together."""
    stacked = torch.stack(list(summaries))
    return torch.cat([stacked[:, :_LARGER].amax(dim=0), stacked[:, _LARGER:].sum(dim=0)])


def join_ranks(summary: Tensor, groups: Iterable[Any]) -> Tensor:
    """The summary of the gradients of all ranks of the groups; written to `summary`."""
    for group in groups:
        distributed = sys.modules["torch.distributed"]  # there is no group without it
        distributed.all_reduce(summary[:_LARGER], op=distributed.ReduceOp.MAX, group=group)
        distributed.all_reduce(summary[_LARGER:], op=distributed.ReduceOp.SUM, group=group)
    return summary


def least(scale: Tensor, groups: Iterable[Any]) -> Tensor:
    """The smallest of the ranks' scales; written to `scale`."""
    for group in groups:
        distributed = sys.modules["torch.distributed"]
        distributed.all_reduce(scale, op=distributed.ReduceOp.MIN, group=group)
    return scale


def numbers_of(summary: Tensor) -> Tensor:
    """A summary's words as numbers: the largest magnitude itself and not its key."""
    return torch.cat([summary[:1].view(torch.float64), summary[1:].double()])


def look(numbers: Sequence[float], *, overflowed: bool) -> tuple[Look, bool, bool]:
    """The rule's view of a summary's numbers, whether a gradient was float16, and whether a loss was."""
    absmax, half_gradient, half_loss, nonzero, faint = numbers
    seen = Look(overflowed=overflowed, absmax=absmax, nonzero=int(nonzero), faint=int(faint))
    return seen, half_gradient > 0, half_loss > 0


def parameter_name(optimizer: Any, group: int, index: int) -> str:
    """Return the optimizer's name of a parameter, or its position there."""
    names = optimizer.param_groups[group].get("param_names")
    return str(names[index]) if names else f"parameter {index} in group {group} of {type(optimizer).__name__}"


def _meshes(gradients: Iterable[Gradient]) -> dict[int, Any]:
    """The process groups of DTensor gradients."""
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    found: dict[int, Any] = {}
    for gradient in gradients:
        mesh = getattr(cast("Any", gradient.parameter).grad, "device_mesh", None)
        for group in mesh.get_all_groups() if mesh is not None else ():
            found[id(group)] = group
    return found
