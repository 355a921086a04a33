"""Gradients of an optimizer, the agreement of ranks, and the reason of a skip."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import UnsupportedTensorError

_STRIDED = torch.strided


@dataclass(slots=True)  # not frozen, since thousands are created in a step
class Gradient:
    """Gradient of one parameter."""

    group: int  # of the optimizer's parameter groups
    index: int  # within the group
    parameter: Tensor
    values: Tensor  # plain and strided: the stored values of a sparse gradient, the local shard of a DTensor


class Gradients(NamedTuple):
    """All gradients of an optimizer, and the ranks that share them."""

    by_device: dict[torch.device, list[Gradient]]
    groups: dict[int, Any]  # process groups of DTensors' meshes, by their id


def gather(optimizer: Any, *, half: bool = True) -> Gradients:
    """Return all gradients. Without `half`, float16 ones are an error."""
    by_device: dict[torch.device, list[Gradient]] = {}
    meshes: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            values = parameter.grad
            if values is None:
                continue
            if type(values) is not Tensor or values.layout is not _STRIDED or values.is_complex():
                values = _values(parameter, meshes)
            if not half and values.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own message
            by_device.setdefault(values.device, []).append(Gradient(number, index, parameter, values))
    return Gradients(by_device, meshes)


def _values(parameter: Tensor, meshes: dict[int, Any]) -> Tensor:
    gradient: Any = parameter.grad
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if sharded is not None and isinstance(gradient, sharded):
        for group in gradient.device_mesh.get_all_groups():  # type: ignore[attr-defined]
            meshes[id(group)] = group
        gradient = gradient.to_local()  # type: ignore[attr-defined]
        gradient = gradient.wait() if hasattr(gradient, "wait") else gradient
    if gradient.layout is torch.sparse_coo:
        gradient = _stored(parameter, gradient)
    elif gradient.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"unscale_: expected dense gradients, or sparse ones of layout torch.sparse_coo; got {gradient.layout} "
            f"({gradient.dtype}, {tuple(gradient.shape)}). Convert it with grad.to_sparse_coo()."
        )
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return gradient if type(gradient) is Tensor else gradient.detach().as_subclass(Tensor)


def _stored(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a sparse gradient's values, which share memory with it."""
    # In float16 the sum of several values of one index may overflow, so they are added before the check.
    if gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()  # type: ignore[attr-defined]  # noqa: SLF001  (values() refuses what is not coalesced)


def agree(
    per_device: dict[torch.device, Tensor], found_inf: Tensor, meshes: dict[int, Any], process_group: Any
) -> dict[torch.device, Tensor]:
    """Write the largest flag of all ranks to each tensor of a dictionary.

    Ranks are those of `process_group` and of the meshes of sharded gradients. A rank without gradients takes part with
    `found_inf`, which is zero, on the scale's device. Without groups nothing is communicated.
    """
    groups = [group for group in (process_group, *meshes.values()) if group is not None]
    if not groups:
        return per_device
    common = combined(per_device.values(), found_inf.device) if per_device else found_inf
    for group in groups:
        all_reduce(common, "MAX", group)
    if not per_device:
        per_device[common.device] = common
    for flag in per_device.values():
        flag.copy_(common, non_blocking=flag.device.type != "cpu")
    return per_device


def combined(flags: Any, device: torch.device) -> Tensor:
    """Return the largest of several flags, as a new 0-d tensor on a device."""
    first, *others = [flag.to(device, non_blocking=device.type != "cpu").reshape(()) for flag in flags]
    if not others:
        return first.clone()
    return torch.stack([first, *others]).amax()


def all_reduce(x: Tensor, operation: str, group: Any) -> None:
    """Reduce a tensor in place over a group's ranks, by "MAX", "MIN" or "SUM"."""
    distributed = sys.modules["torch.distributed"]  # there is no group without it
    distributed.all_reduce(x, op=getattr(distributed.ReduceOp, operation), group=group)


def blame(optimizer: Any, losses: Iterable[Tensor]) -> str:
    """Return the reason of a skipped step in one sentence. Waits for the gradients."""
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
    """Return a remark if a loss itself was not finite, since no scale helps then."""
    values = [float(loss.item()) for loss in losses]
    bad = [value for value in values if not math.isfinite(value)]
    return f"; the loss itself was {bad[0]:g}, before scaling" if bad else ""
