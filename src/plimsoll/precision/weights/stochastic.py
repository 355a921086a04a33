"""`StochasticWeights`: bfloat16 weights without masters, rounded at random so that small updates count on average."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.errors import ArgumentError
from plimsoll.precision.weights.base import CHUNK_BYTES, SixteenBitOptimizer
from plimsoll.precision.weights.stores import Entry, Store, round_to, value_of
from plimsoll.rounding import cast

_WORD = (1 << 64) - 1


class StochasticWeights(SixteenBitOptimizer):
    """bfloat16 weights with no masters: each step is computed in float32 and rounded up or down at random.

    The chance of rounding up is the part of the way up that the value has come, so the mean is right: an update too
    small for bfloat16 is made now and then, whole. Weights take 2 bytes and nothing beside them.

    Numerics. The step is the inner optimizer's in float32, with float32 state, from the bfloat16 weight. The noise is a
    fixed function (Philox) of seed, step, and the parameter's and the value's index: the same on every rank and
    backend, and after a checkpoint, which holds the seed. Gradients go to float32 exactly.

    Args:
        optimizer: of the model's parameters, as for `MasterWeights`. Those of other dtypes are stepped as they are.
        seed: of the noise.
        chunk_bytes: how much memory float32 values and gradients may take in a step.

    >>> weight = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    >>> optimizer = StochasticWeights(torch.optim.SGD([weight], lr=1e-4))
    >>> for _ in range(50):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> abs(weight.double().mean().item() - 0.995) < 1e-3
    True
    """

    update = "stochastic"

    def __init__(self, optimizer: Optimizer, *, seed: int = 0, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.seed = seed
        super().__init__(optimizer, chunk_bytes)

    def _new_store(self, weight: Tensor) -> Store:
        refuse_float16(self.operation, weight)
        return Stochastic()

    def state_dict(self) -> dict[str, Any]:
        """As `MasterWeights` has it, and the seed."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `MasterWeights` does it, and the seed, if the checkpoint has one."""
        super().load_state_dict(state_dict)
        self.seed = int(state_dict.get("seed", self.seed))

    def _key(self, number: int) -> int:
        return mixed(mixed(mixed(self.seed) + self.steps) + number)


class Stochastic:
    """Nothing beside the weight: it is rounded at random."""

    whole = False
    kept = ()

    def open(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """The weight in float32."""
        return weight.to(torch.float32) if out is None else out.copy_(weight)

    def close(self, weight: Tensor, value: Tensor, key: int) -> None:
        """Rounds up or down."""
        cast(value, "bf16", rounding="stochastic", generator=key, out=weight)

    def peek(self, weight: Tensor) -> Tensor:
        """The weight in float32."""
        return weight.to(torch.float32)

    def restart(self, weight: Tensor) -> None:
        """There is nothing to drop."""

    def entry(self, weight: Tensor) -> Entry:
        """The weight."""
        return {"weight": weight.detach()}

    def load(self, weight: Tensor, entry: Entry) -> None:
        """Sets the weight, to the nearest where the checkpoint has more."""
        round_to(value_of(entry, weight), weight)


def refuse_float16(operation: str, weight: Tensor) -> None:
    """Raises for a float16 parameter."""
    if weight.dtype is not torch.bfloat16:
        raise ArgumentError(
            f"{operation}: expected 16-bit parameters to be bfloat16; got one of {weight.dtype}, shape "
            f"{tuple(weight.shape)}. Use MasterWeights for float16."
        )


def mixed(x: int) -> int:
    """The 64 bits of x stirred (the finisher of SplitMix64, Steele et al., OOPSLA 2014), so that near keys are far."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
