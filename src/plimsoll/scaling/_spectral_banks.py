"""What the unscale pass saw of the gradients: its banks, and the few numbers of them that the rule needs.

The summary of a bank is three int64 words on the bank's device: the key of the largest magnitude, the number of nonzero
finite values, and how many of these are faint. Two summaries join as spectra do: the larger key, the sums of the rest.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.formats import Format
from plimsoll.kernels import _layout as layout
from plimsoll.kernels._later import Later
from plimsoll.scaling._gradients import Gradient
from plimsoll.scaling._spectral_rule import Look
from plimsoll.scaling._spectral_windows import ScaleReport, scale_report

_LARGEST = slice(layout.POSITIVE, layout.NEGATIVE + 1)
_COUNTS = slice(layout.HISTOGRAM, layout.HISTOGRAM + layout.BINADES)
_NONFINITE = slice(layout.NANS, layout.NEG_INFS + 1)


@dataclass(slots=True)
class OptimizerBanks:
    """The banks of one optimizer's gradients, by device, and where in it their parameters stand."""

    banks: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])
    places: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict[torch.device, list[tuple[int, int]]])
    groups: dict[int, Any] = field(default_factory=dict[int, Any])  # of the meshes over which gradients are spread
    filled: bool = False

    def prepare(self, gradients: Sequence[Gradient]) -> Tensor:
        """A bank with a row for each of one device's gradients, the same as in the step before if it fits."""
        device = gradients[0].values.device
        bank = self.banks.get(device)
        if bank is None or len(bank) != len(gradients):
            bank = self.banks[device] = kernels.new_bank(len(gradients), device=device)
        self.places[device] = [(gradient.group, gradient.index) for gradient in gradients]
        self.groups.update(_meshes(gradients))
        self.filled = True
        return bank

    def summary(self, faint_rows: int, process_group: Any, device: torch.device) -> Tensor:
        """The summary of all banks, over all ranks that gradients are spread over, on `device`."""
        parts = [summarise(bank, faint_rows).to(device, non_blocking=True) for bank in self.banks.values()]
        found = join(parts) if parts and self.filled else no_summary(device)
        for group in (process_group, *self.groups.values()):
            if group is not None:
                _reduce(found, group)
        self.filled = False
        return found

    def norm(self, scale: Tensor) -> Tensor:
        """The 2-norm of the gradients with the scale undone; Inf if one is not finite."""
        square = torch.zeros((), dtype=torch.float64, device=scale.device)
        broken = torch.zeros((), dtype=torch.int64, device=scale.device)
        for bank in self.banks.values():
            square += bank[:, layout.SUMSQ].view(torch.float64).sum().to(scale.device, non_blocking=True)
            broken += bank[:, _NONFINITE].sum().to(scale.device, non_blocking=True)
        return torch.where(broken > 0, torch.inf, square.sqrt() / scale.double())

    def keep(self, optimizer: Any, scale: Tensor) -> "KeptBanks":
        """A copy on its way to the host, with the parameters' names: what the next step measures leaves it alone."""
        return KeptBanks(
            [Later(bank) for bank in self.banks.values()],
            [parameter_name(optimizer, *place) for places in self.places.values() for place in places],
            Later(scale),
        )


@dataclass(frozen=True, slots=True)
class KeptBanks:
    """The banks of one optimizer as they were at one step."""

    banks: list[Later]
    names: list[str]
    scale: Later

    def ready(self) -> bool:
        """Whether `report` would come back at once."""
        return self.scale.ready() and all(bank.ready() for bank in self.banks)

    def report(self, fmt: Format) -> ScaleReport | None:
        """The windows of all tensors; None where a gradient is not finite. Waits for what is still on its way."""
        rows = np.concatenate([bank.tensor().numpy() for bank in self.banks])
        if rows[:, _NONFINITE].any():
            return None
        return scale_report(rows, self.names, self.scale.value(), fmt)


def no_summary(device: torch.device) -> Tensor:
    """The summary of nothing."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def summarise(bank: Tensor, faint_rows: int) -> Tensor:
    """The summary of a bank; values of the first `faint_rows` binades are faint. Waits for nothing."""
    counts = bank[:, _COUNTS].sum(dim=0)
    return torch.stack([bank[:, _LARGEST].amax(), counts.sum(), counts[:faint_rows].sum()])


def join(summaries: Iterable[Tensor]) -> Tensor:
    """The summary of all together."""
    stacked = torch.stack(list(summaries))
    return torch.cat([stacked[:, :1].amax(dim=0), stacked[:, 1:].sum(dim=0)])


def look(summary: Sequence[int], overflowed: bool) -> Look:
    """The rule's view of a summary."""
    key, nonzero, faint = summary
    absmax = float(np.array([key], dtype=np.int64).view(np.float64)[0])
    return Look(overflowed=overflowed, absmax=absmax, nonzero=nonzero, faint=faint)


def parameter_name(optimizer: Any, group: int, index: int) -> str:
    """What the optimizer calls the parameter, or where it stands in it."""
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


def _reduce(summary: Tensor, group: Any) -> None:
    distributed = sys.modules["torch.distributed"]  # there is no group without it
    distributed.all_reduce(summary[:1], op=distributed.ReduceOp.MAX, group=group)
    distributed.all_reduce(summary[1:], op=distributed.ReduceOp.SUM, group=group)
