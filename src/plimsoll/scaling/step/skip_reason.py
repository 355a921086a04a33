"""Why a step was skipped: which loss, and which parameters' gradients, were not finite."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from plimsoll import kernels
from plimsoll.scaling.step.gradients import Gradient, gather


def blame(optimizer: Any, losses: Iterable[Tensor]) -> str:
    """One sentence; reads the gradients, and waits for them, so it is for steps that are known to be skipped."""
    counts = [(gradient, _nonfinite(gradient.values)) for gradient in _all(optimizer)]
    bad = [(gradient, count) for gradient, count in counts if count]
    name = type(optimizer).__name__
    if not bad:
        return f"non-finite gradients on another rank; those of {name} are finite here"
    (worst, count), *others = bad
    place = f"{count} of {worst.values.numel()} values of {_parameter(optimizer, worst)} of {name}"
    more = f" and in {len(others)} more of its {len(counts)} gradients" if others else ""
    return f"non-finite gradients in {place}{more}{_of_loss(losses)}"


def _all(optimizer: Any) -> list[Gradient]:
    return [gradient for these in gather(optimizer).by_device.values() for gradient in these]


def _nonfinite(values: Tensor) -> int:
    counts = kernels.new_counts(1, values.device)
    kernels.count_nonfinite_into([values.detach()], counts, 0)
    return int(counts.item())


def _parameter(optimizer: Any, gradient: Gradient) -> str:
    names = optimizer.param_groups[gradient.group].get("param_names")
    named = f" ({names[gradient.index]})" if names else ""
    return f"parameter {gradient.index}{named} in group {gradient.group}"


def _of_loss(losses: Iterable[Tensor]) -> str:
    """What to add if a loss itself was not finite: no scale helps then."""
    values = [float(loss.item()) for loss in losses]
    bad = [value for value in values if not math.isfinite(value)]
    return f"; the loss itself was {bad[0]:g}, before scaling" if bad else ""
