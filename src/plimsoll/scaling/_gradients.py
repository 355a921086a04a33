"""The gradients of an optimizer's parameters, as plain tensors that can be multiplied in place, by device."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import UnsupportedTensorError


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient."""

    group: int  # of the optimizer's parameter groups
    index: int  # within the group
    parameter: Tensor
    values: Tensor  # plain and strided: the stored values of a sparse gradient, the local shard of a DTensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """All gradients of an optimizer, and over which ranks they are spread."""

    by_device: dict[torch.device, list[Gradient]] = field(default_factory=dict[torch.device, list[Gradient]])
    groups: dict[int, Any] = field(default_factory=dict[int, Any])  # process groups of DTensors' meshes, by their id


def gather(optimizer: Any, *, half: bool = True) -> Gradients:
    """The gradients that are there; without `half`, float16 ones are refused as `torch.amp.GradScaler` refuses them."""
    found = Gradients()
    for gradient in _each(optimizer, found.groups):
        if not half and gradient.values.dtype is torch.float16:
            raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says it
        found.by_device.setdefault(gradient.values.device, []).append(gradient)
    return found


def _each(optimizer: Any, meshes: dict[int, Any]) -> Iterator[Gradient]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                yield Gradient(number, index, parameter, _values(parameter, meshes))


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
    """A sparse gradient's values, which share memory with it.

    In float16 the sum of several values of one index may overflow: they are added up first, as the check must see it.
    """
    if gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()  # type: ignore[attr-defined]  # noqa: SLF001  (values() refuses what is not coalesced)


def unscale(gradients: list[Gradient], inverse: Tensor, found: Tensor) -> None:
    """Multiplies them in place; where one is not finite, before or after, `found` becomes 1."""
    kernels.unscale_into([gradient.values for gradient in gradients], inverse, found)
