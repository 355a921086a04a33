"""DTensors: each rank casts its own part, where that gives what casting the whole would."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast as typed

from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.formats import BlockFormat

if TYPE_CHECKING:
    from plimsoll.rounding.arguments import Plan


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor; without loading torch.distributed where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def map_local(x: Tensor, operation: Callable[[Tensor], Tensor], plan: "Plan") -> Tensor:
    """A DTensor like `x` of `operation` over the local part."""
    whole = typed("Any", x)
    _check_placements(whole, plan)
    local = operation(whole.to_local().detach())
    sharded = typed("Any", sys.modules["torch.distributed.tensor"]).DTensor
    shape, stride = whole.shape, whole.stride()
    return sharded.from_local(local, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride)


def _check_placements(whole: Any, plan: "Plan") -> None:
    blocks = plan.format if isinstance(plan.format, BlockFormat) else None
    for placement in whole.placements:
        if placement.is_partial():
            raise UnsupportedTensorError(
                f"cast: expected a DTensor of shards or replicas; got {placement}, values that await their sum. "
                "Call x.redistribute(...) first."
            )
        if blocks is None or not placement.is_shard():
            continue
        if blocks.tensor_scale:
            raise UnsupportedTensorError(
                f"cast: expected a whole tensor for {blocks.name}, whose tensor scale needs the largest value of all "
                f"shards; got {placement}. Gather it, or cast to mxfp4."
            )
        if placement.dim == plan.axis % whole.dim():
            raise UnsupportedTensorError(
                f"cast: expected blocks along an axis that is not sharded; got {placement} and axis={plan.axis}. "
                "Choose another axis or redistribute."
            )
