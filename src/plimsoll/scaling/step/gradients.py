"""The gradients of an optimizer's parameters, as plain tensors that can be multiplied in place, by device."""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError

_STRIDED = torch.strided


@dataclass(slots=True)
class Gradient:
    """One parameter's gradient; not frozen, as thousands are made in a step."""

    group: int  # of the optimizer's parameter groups
    index: int  # within the group
    parameter: Tensor
    values: Tensor  # plain and strided: the stored values of a sparse gradient, the local shard of a DTensor


class Gradients(NamedTuple):
    """All gradients of an optimizer, and over which ranks they are spread."""

    by_device: dict[torch.device, list[Gradient]]
    groups: dict[int, Any]  # process groups of DTensors' meshes, by their id


def gather(optimizer: Any, *, half: bool = True) -> Gradients:
    """The gradients that are there; without `half`, float16 ones are refused as `torch.amp.GradScaler` refuses them."""
    found: dict[torch.device, list[Gradient]] = {}
    meshes: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            values = parameter.grad
            if values is None:
                continue
            if type(values) is not Tensor or values.layout is not _STRIDED or values.is_complex():
                values = _values(parameter, meshes)
            if not half and values.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # as torch says it
            found.setdefault(values.device, []).append(Gradient(number, index, parameter, values))
    return Gradients(found, meshes)


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
