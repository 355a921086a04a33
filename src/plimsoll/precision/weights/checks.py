"""What an optimizer over 16-bit weights refuses."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.precision.weights.pair import Pair
from plimsoll.rounding.dtensors import is_sharded


def refuse_changed(operation: str, pairs: Sequence[Pair]) -> None:
    """Raises if the model's gradients are others than those that were collected."""
    changed = sum(pair.changed for pair in pairs)
    if changed:
        raise ArgumentError(
            f"{operation}.step: expected the model's gradients as collect_gradients() found them; got {changed} that "
            "changed since. Collect after the last backward, and change the masters' gradients (of param_groups), not "
            "the model's."
        )


def check_optimizer(operation: str, optimizer: object, chunk_bytes: int) -> None:
    """Raises if the optimizer cannot be wrapped."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"{operation}: expected a torch.optim.Optimizer; got {type(optimizer).__name__}. "
            "Make the optimizer of the model's 16-bit parameters first."
        )
    if optimizer.defaults.get("differentiable"):
        raise ArgumentError(
            f"{operation}: expected an optimizer whose step is not differentiable, since rounding weights to 16 bits "
            "has no gradient; got differentiable=True. Leave it out."
        )
    if chunk_bytes <= 0:
        raise ArgumentError(f"{operation}: expected chunk_bytes above zero; got chunk_bytes={chunk_bytes}.")


def refuse_sharded(operation: str, weight: Tensor) -> None:
    """Raises for a DTensor."""
    if is_sharded(weight):
        raise UnsupportedTensorError(
            f"{operation}: expected parameters that are whole on each rank; got a DTensor of {weight.dtype}. Keep the "
            "sharded parameters in float32 and give fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            f"{weight.dtype})): the shards are then the masters."
        )
