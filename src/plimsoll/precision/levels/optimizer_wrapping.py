"""How a level's steps reach 16-bit weights: the optimizer wrapped, its FP32 values those that the weights had."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plimsoll.precision.levels.catalogue import Update
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.precision.weights.kahan import KahanWeights
from plimsoll.precision.weights.master_weights import MasterWeights
from plimsoll.precision.weights.stochastic import StochasticWeights

_SIXTEEN = (torch.float16, torch.bfloat16)
Optimizer = torch.optim.Optimizer


def wrapped(
    optimizers: Sequence[Optimizer], update: Update, originals: Mapping[Tensor, Tensor]
) -> tuple[Optimizer, ...]:
    """The optimizers that step the model's weights as the level says, from the values that the weights had in FP32."""
    return tuple(_wrapped(optimizer, number, update, originals) for number, optimizer in enumerate(optimizers))


def put_state_in_the_weights_dtype(optimizer: Optimizer) -> None:
    """Casts the state that the optimizer has already to what it would have made it for these weights."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape:
                state[name] = value.to(p.dtype)


def _wrapped(optimizer: Optimizer, number: int, update: Update, originals: Mapping[Tensor, Tensor]) -> Optimizer:
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.dtype in _SIXTEEN for p in parameters):
        return optimizer
    if update == "plain":
        put_state_in_the_weights_dtype(optimizer)
        return optimizer
    found = _KINDS[update](optimizer, number)
    for pair in found.pairs:
        original = originals.get(pair.weight)
        if original is not None and original.dtype == torch.float32:
            pair.store.load(pair.weight.detach(), {"master": original})
            pair.settle()
    return found


_KINDS: dict[str, Callable[[Optimizer, int], SixteenBitOptimizer]] = {
    "masters": lambda optimizer, _: MasterWeights(optimizer),
    "stochastic": lambda optimizer, number: StochasticWeights(optimizer, seed=number),  # no two draw alike
    "kahan": lambda optimizer, _: KahanWeights(optimizer),
}
