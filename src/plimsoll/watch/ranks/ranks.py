"""Role of this process: which of its tensors are shards, replicas or local.

Nothing here communicates. Ranks write what they have; the run's reader adds shards up and counts replicas once.

- DTensors say it themselves: shards are added up, and of replicas one rank alone has values; so, too, along those
  dimensions of the model's device mesh that a parameter is not on.
- Under DistributedDataParallel all ranks hold the same parameters, gradients and optimizer state: the first rank of the
  group records them, the others do not look. Parameters that it is to ignore are each rank's own.
- Ranks that work on different parts of a batch have different activations, always added up. Their number and this
  rank's place among them, `data_parallel` and `data_index`, are in the manifest.
- Any other plain tensor (activations of tensor-parallel ranks; parameters of tensor or expert parallel ranks that use
  no DTensor) is recorded by every rank. The reader counts it once if its spectra are the same on all ranks that share a
  part of the batch, and adds them up otherwise.
- Each data-parallel rank's loss is a mean over its own part of the batch, so that activation gradients are as many
  times too large as there are ranks. They are recorded with this factor, which readers undo. So are those of a
  pipeline's micro-batches, once it tells their number (`microbatches`).
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.tensor_collections import OF_PARAMETERS
from plimsoll.watch.names import clean

PARAMETERS = frozenset(OF_PARAMETERS)


class Ranks:
    """This process's place among the ranks. `look` may be called again.

    It finds how the model is distributed.
    """

    def __init__(self) -> None:
        dist = _initialized()
        self.rank = dist.get_rank() if dist else int(os.environ.get("RANK", "0"))
        self.world = dist.get_world_size() if dist else int(os.environ.get("WORLD_SIZE", "1"))
        self.data_parallel, self.data_index = 1, 0  # ranks that have different parts of one batch, and which this is
        self.microbatches = 1  # of the last step, whose number a pipeline has divided the weights' gradients by
        self.wrapper: str | None = None
        self.mesh: dict[str, object] | None = None
        self._elsewhere: set[int] = set()  # parameters that another rank records
        self._first = True  # of the ranks that hold the same parameters

    def look(self, model: nn.Module) -> bool:
        """Find what distributes the model, and return True if that is new. May raise."""
        before = self.as_json()
        for module in model.modules():
            _check_flat(module)
        wrapper = ddp_around(model)
        if wrapper is not None:
            self._take_ddp(wrapper)
        else:
            self._take_fully_shard(model)
        mesh = _widest_mesh(model)
        if mesh is not None:
            self.mesh = _as_json(mesh)
            self._elsewhere |= {id(p) for p in model.parameters() if _is_replica(p, mesh)}
        return before != self.as_json()

    def shared(self, collection: str) -> bool:
        """Return True if the ranks' records of a plain tensor are simply added up."""
        return self.world == 1 or (collection not in PARAMETERS and self.data_parallel == self.world)

    def counts(self, parameter: Tensor) -> bool:
        """Return True if this rank records the parameter, and what belongs to it."""
        return id(parameter) not in self._elsewhere

    @property
    def counts_plain(self) -> bool:
        """True if non-finite values of plain gradients count on this rank.

        Beside DTensors plain gradients are replicas, which are counted once.
        """
        if self.mesh is None or self.wrapper is not None:
            return True
        return not any(cast("Iterable[int]", self.mesh["coordinate"] or ()))

    @property
    def alone(self) -> bool:
        """True if activation gradients are those of the whole batch as they are."""
        return self.data_parallel == self.microbatches == 1

    @property
    def factor(self) -> float:
        """Factor of recorded activation gradients: a power of two, which readers undo."""
        return float(self.data_parallel) if _is_power_of_two(self.data_parallel) else 1.0

    @property
    def divisor(self) -> int:
        """Divisor of activation gradients before measuring, which readers could not undo."""
        return math.prod(n for n in (self.data_parallel, self.microbatches) if not _is_power_of_two(n))

    def take_microbatches(self, count: int) -> int:
        """Note a pipeline's micro-batches; return the factor left on activation gradients."""
        known, self.microbatches = self.microbatches, count
        return 1 if known == count and not _is_power_of_two(count) else count

    def as_json(self) -> dict[str, object]:
        """This rank's place, for the manifest."""
        return {
            "wrapper": self.wrapper,
            "data_parallel": self.data_parallel,
            "data_index": self.data_index,
            "parameters": self._first,
            "mesh": self.mesh,
        }

    def _take_ddp(self, wrapper: Any) -> None:
        group = wrapper.process_group
        self.wrapper, self.data_parallel, self.data_index = "DistributedDataParallel", group.size(), group.rank()
        self._first = self.data_index == 0
        ignored = {clean(name) for name in wrapper.parameters_to_ignore}
        if not self._first:
            named = wrapper.module.named_parameters()
            self._elsewhere = {id(p) for name, p in named if clean(name) not in ignored}

    def _take_fully_shard(self, model: nn.Module) -> None:
        for mesh in fully_sharded(model):
            shards, replicas = getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "replicate_mesh_size", 1)
            shard, replica = getattr(mesh, "shard_mesh_rank", 0), getattr(mesh, "replicate_mesh_rank", 0)
            self.wrapper, self.data_parallel = "fully_shard", int(shards) * int(replicas)
            self.data_index = int(replica) * int(shards) + int(shard)
            return


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def _initialized() -> Any:
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def ddp_around(model: nn.Module) -> Any:
    """Return the DistributedDataParallel around or in the model, or running it."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    if kind is None:
        return None
    for module in model.modules():
        if isinstance(module, kind):
            return module
    running = getattr(kind, "_active_ddp_module", None)
    return running if running is not None and any(module is model for module in running.modules()) else None


def fully_sharded(model: nn.Module) -> Iterator[Any]:
    """Return the meshes of `fully_shard`, module by module."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:
        return
    for module in model.modules():
        if isinstance(module, kind):
            state = cast("Any", module)._get_fsdp_state()  # noqa: SLF001  (torch tells it nowhere else)
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # before torch 2.12 there was one
                groups = [getattr(state, "_fsdp_param_group", None)]
            yield from (group.mesh_info for group in groups if group is not None)


def _widest_mesh(model: nn.Module) -> Any:
    """Return the device mesh of most dimensions among the parameters' meshes."""
    meshes: list[Any] = [mesh for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def _is_replica(p: Any, widest: Any) -> bool:
    """Return True if p is a replica, whose first copy is on another rank.

    It then lies along only some of the mesh's dimensions, and this is not the first rank along the others.
    """
    names, mine = widest.mesh_dim_names, getattr(getattr(p, "device_mesh", None), "mesh_dim_names", None)
    coordinate = widest.get_coordinate()
    if not names or not mine or coordinate is None or not set(mine) < set(names):
        return False
    # A parameter that `parallelize_module` left alone, and `fully_shard` sharded, is the same along the other
    # dimension.
    return any(place and name not in mine for name, place in zip(names, coordinate, strict=True))


def _as_json(mesh: Any) -> dict[str, object]:
    coordinate = mesh.get_coordinate()
    return {
        "names": list(mesh.mesh_dim_names or ()),
        "shape": list(mesh.shape),
        "coordinate": None if coordinate is None else list(coordinate),
    }


def _check_flat(module: nn.Module) -> None:
    """Refuses the first generation of FSDP, whose parameters are pieces of flat ones."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and isinstance(module, kind):
        raise ArgumentError(
            "watch: expected a model whose parameters are separate; got one wrapped in FullyShardedDataParallel, "
            "which keeps them as pieces of flat tensors. Shard it with torch.distributed.fsdp.fully_shard instead."
        )
