"""Shadow steps on several ranks: each repeats its part, and they agree on results.

The model itself is repeated, without what distributes it: DistributedDataParallel is a wrapper around it, and the hooks
of `fully_shard`, which would gather the real weights, are left out. Weights are gathered into full leaves instead. The
repetition's gradients are averaged over the ranks as the real ones were, and each rank keeps the part that it has of
the real gradient.
"""

import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.watch.ranks.ranks import Ranks, ddp_around, fully_sharded
from plimsoll.watch.shadow.replay import leaf

UNKNOWN = (
    "the ranks share the model in a way that is not DistributedDataParallel's or fully_shard's, and one that cannot "
    "repeat its part would keep the others waiting"
)
ABSENT = "not all ranks take it: give each of them the same watch and the same shadow_every"
MEETING_SECONDS = 30.0  # that a rank waits for the others at the beginning of a shadow step
UNEVEN = "ranks join with uneven inputs, and those that have ended would not repeat the step"


class DataParallel:
    """The ranks that train one model on different parts of each batch."""

    def __init__(self, groups: list[Any], device: torch.device, wrapper: Any = None) -> None:
        self._groups, self._device, self._wrapper = groups, device, wrapper

    @property
    def averages(self) -> bool:
        """True if the present backward averages gradients.

        It does not where the script adds several up first.
        """
        return self._wrapper is None or bool(self._wrapper.require_backward_grad_sync)

    def agrees(self, *, able: bool) -> bool:
        """Return True if all ranks are able; all must ask."""
        import torch.distributed as dist

        answer = torch.tensor([float(able)], device=self._device)
        for group in self._groups:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
        return bool(answer.item())

    def mean(self, local: Tensor) -> Tensor:
        """Return the mean of the ranks' tensors, in a new one."""
        import torch.distributed as dist

        total = local.clone()
        for group in self._groups:
            dist.all_reduce(total, group=group)
            total /= group.size()
        return total


def of(root: nn.Module, ranks: Ranks) -> DataParallel | str | None:
    """Return a model's ranks, None for one, or why it has no shadow steps."""
    if ranks.world == 1:
        return None
    wrapper = ddp_around(root)
    if wrapper is not None:
        if wrapper._join_config.enable:  # noqa: SLF001  (torch tells it nowhere else)
            return UNEVEN
        return DataParallel([wrapper.process_group], next(wrapper.module.parameters()).device, wrapper)
    sizes = {mesh.shard_mesh_size * getattr(mesh, "replicate_mesh_size", 1) for mesh in fully_sharded(root)}
    meshes: list[Any] = [mesh for p in root.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None]
    # A mesh with more ranks than share the batch has another dimension, of tensor parallelism.
    if sizes != {ranks.world} or any(mesh.size() != ranks.world for mesh in meshes) or not meshes:
        return UNKNOWN
    groups = [meshes[0].get_group(dim) for dim in range(meshes[0].ndim)]
    return DataParallel(groups, torch.device(meshes[0].device_type))


# These are the only collectives of a watch in a training step. Ranks meet in the process group's store before, since
# one that does not watch would keep the others waiting in a collective. One that cannot repeat its part says so, and
# then none compares.
def meet(name: str, world: int) -> bool:
    """Return whether all ranks have come here; the same on each that has.

    Args:
        name: Name of the meeting, which no other has.
        world: Number of ranks.
    """
    store = _store(name)
    # The last rank to come answers "all", or the first to lose patience "not all": whichever is first in the store.
    if store.add("ranks", 1) == world:
        return store.compare_set("answer", "", "all") == b"all"
    try:
        store.wait(["answer"], timedelta(seconds=MEETING_SECONDS))
    except RuntimeError:  # it took too long
        return _store(name).compare_set("answer", "", "not all") == b"all"
    return store.get("answer") == b"all"


def _store(name: str) -> Any:
    """Return the process group's store over a new connection: a timeout spoils one."""
    distributed: Any = torch.distributed.distributed_c10d
    connection = distributed._get_default_store().clone()  # noqa: SLF001  (torch offers it under no other name)
    return distributed.PrefixStore(f"plimsoll/shadow/{name}", connection)


def leaves_of(root: nn.Module) -> dict[int, Tensor]:
    """Return the parameters' leaves by identity, whole for those that ranks share."""
    return {id(p): leaf(whole(p)) for p in root.parameters()}


def whole(p: Tensor) -> Tensor:
    """Return the whole parameter of which a rank has a part."""
    return cast("Any", p).full_tensor() if _placements(p) else p


def part_of(full: Tensor, p: Tensor) -> Tensor:
    """Return the part of a full tensor that a rank has of the parameter."""
    if not _placements(p):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    mesh = cast("Any", p).device_mesh
    spread = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread.redistribute(placements=_placements(p))


def hooks_of_sharding(root: nn.Module) -> set[int]:
    """Return the identities of the hooks of `fully_shard` in the model."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return set()
    states = [cast("Any", module)._get_fsdp_state() for module in root.modules() if isinstance(module, kind)]  # noqa: SLF001
    names = ("_pre_forward_hook_handle", "_post_forward_hook_handle")
    handles = [getattr(state, name, None) for state in states for name in names]
    return {number for handle in handles for number in _numbers(handle)}


def without_hooks(root: nn.Module, left_out: set[int]) -> None:
    """Take these forward hooks away; the model is borrowed, and gets them back."""
    for module in root.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks: Mapping[int, Any] = vars(module)[kind]
            if left_out & hooks.keys():
                remaining = [(number, hook) for number, hook in hooks.items() if number not in left_out]
                vars(module)[kind] = type(hooks)(remaining)  # type: ignore[call-arg]


def _numbers(handle: Any) -> Iterable[int]:
    """Return the numbers of a handle, or of several in one."""
    if handle is None:
        return
    if hasattr(handle, "id"):
        yield handle.id
    for inner in getattr(handle, "handles", ()):
        yield from _numbers(inner)


def _placements(p: Tensor) -> tuple[Any, ...]:
    return tuple(getattr(p, "placements", ()))
