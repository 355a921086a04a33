"""bfloat16 weights without masters: rounded at random, or with a bfloat16 compensation."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError
from plimsoll.precision.weights.base import CHUNK_BYTES, SixteenBitOptimizer
from plimsoll.precision.weights.stores import Entry, Store, in_blocks, round_to, value_of
from plimsoll.rounding import cast

# -- `StochasticWeights` -----------------------------------------------------------------------------------------------

_WORD = (1 << 64) - 1


class StochasticWeights(SixteenBitOptimizer):
    """bfloat16 weights without masters, rounded up or down at random.

    Each step is computed in float32. The chance of rounding up is the value's distance from the lower number, in units
    of the spacing. The mean is therefore right: an update too small for bfloat16 is sometimes applied as a whole step.
    Weights take 2 bytes.

    Numerics. The inner optimizer steps in float32, with float32 state, from the bfloat16 weight. The noise is a fixed
    function (Philox) of seed, step, and the indices of parameter and value. It is the same on every rank and backend,
    and after a checkpoint, which contains the seed. Gradients are converted to float32 exactly.

    Args:
        optimizer: An optimizer of the model's parameters, as for `MasterWeights`. Parameters of other dtypes are
            stepped as they are.
        seed: Seed of the noise.
        chunk_bytes: Memory for float32 values and gradients in a step, in bytes.

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
        self.seed = integer(type(self).__name__, "seed", seed, remedy="Use 0.")
        super().__init__(optimizer, chunk_bytes)

    def _new_store(self, weight: Tensor) -> Store:
        refuse_float16(self.operation, weight)
        return Stochastic()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `MasterWeights` does, and the seed."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as `MasterWeights` does, and the seed if the checkpoint has one."""
        super().load_state_dict(state_dict)
        self.seed = int(state_dict.get("seed", self.seed))

    def _key(self, number: int) -> int:
        return mixed(mixed(mixed(self.seed) + self.steps) + number)


class Stochastic:
    """Store that keeps nothing: the weight is rounded at random."""

    whole = False
    kept = ()

    def open(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the weight in float32."""
        return weight.to(torch.float32) if out is None else out.copy_(weight)

    def close(self, weight: Tensor, value: Tensor, key: int) -> None:
        """Round up or down at random."""
        cast(value, "bf16", rounding="stochastic", generator=key, out=weight)

    def peek(self, weight: Tensor) -> Tensor:
        """Return the weight in float32."""
        return weight.to(torch.float32)

    def restart(self, weight: Tensor) -> None:
        """Do nothing: there is no state to drop."""

    def entry(self, weight: Tensor) -> Entry:
        """Return the weight."""
        return {"weight": weight.detach()}

    def load(self, weight: Tensor, entry: Entry) -> None:
        """Set the weight, rounded to nearest if the checkpoint has more digits."""
        round_to(value_of(entry, weight), weight)


def refuse_float16(operation: str, weight: Tensor) -> None:
    """Raise for a float16 parameter."""
    if weight.dtype is not torch.bfloat16:
        raise ArgumentError(
            f"{operation}: expected 16-bit parameters to be bfloat16; got one of {weight.dtype}, shape "
            f"{tuple(weight.shape)}. Use MasterWeights for float16."
        )


def mixed(x: int) -> int:
    """Mix 64 bits, so that close keys differ a lot."""
    # SplitMix64's finisher (Steele et al., OOPSLA 2014).
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


# -- `KahanWeights` ----------------------------------------------------------------------------------------------------


class KahanWeights(SixteenBitOptimizer):
    """bfloat16 weights, each with its last rounding error in bfloat16.

    The error is added back in the next step. This is Kahan's summation, as used for training in bfloat16 alone by
    Zamirai et al. (2020). Weight and compensation take 4 bytes together and have about 16 bits of precision. Compact
    `MasterWeights` take as many bytes and have all 24.

    Numerics. A step begins with the sum of weight and compensation in float32. The inner optimizer steps that sum, so
    everything that it does to a weight is compensated, decay included. The weight becomes the result rounded to nearest
    (ties away from zero). The compensation becomes their difference, which is exact in float32, rounded to nearest
    even. A weight that is not finite has a compensation of zero.

    If weights are changed from outside, the compensation is still added to the new ones: it is at most half the spacing
    of bfloat16 numbers at the old ones. `take_model_weights` drops it.

    Args:
        optimizer: An optimizer of the model's parameters, as for `MasterWeights`. Parameters of other dtypes are
            stepped as they are.
        chunk_bytes: Memory for float32 values and gradients in a step, in bytes.

    >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = KahanWeights(torch.optim.SGD([weight], lr=1e-4))
    >>> for _ in range(50):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> weight.item(), round(optimizer.master_of(weight).item(), 4)
    (0.99609375, 0.995)
    """

    update = "kahan"

    def __init__(self, optimizer: Optimizer, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(optimizer, chunk_bytes)

    def _new_store(self, weight: Tensor) -> Store:
        refuse_float16(self.operation, weight)
        return Compensation(weight)


class Compensation:
    """Store of the weight's rounding error in bfloat16."""

    whole = False

    def __init__(self, weight: Tensor) -> None:
        self._cut = torch.zeros_like(weight, requires_grad=False)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Compensation."""
        return (self._cut,)

    def open(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the sum of weight and compensation."""
        value = weight.to(torch.float32) if out is None else out.copy_(weight)
        for part, cut in in_blocks(value, self._cut):
            part.add_(cut.to(torch.float32))
        return value

    def close(self, weight: Tensor, value: Tensor, key: int) -> None:  # noqa: ARG002  (the interface's)
        """Round to the weight, and keep the rounding error."""
        round_to(value, weight)
        for part, rounded, cut in in_blocks(value, weight, self._cut):
            cut.copy_(part.sub_(rounded.to(torch.float32)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    def peek(self, weight: Tensor) -> Tensor:
        """Return the sum of weight and compensation."""
        return self.open(weight)

    def restart(self, weight: Tensor) -> None:  # noqa: ARG002  (the interface's)
        """Set the compensation to zero."""
        self._cut.zero_()

    def entry(self, weight: Tensor) -> Entry:
        """Return weight and compensation."""
        return {"weight": weight.detach(), "compensation": self._cut}

    def load(self, weight: Tensor, entry: Entry) -> None:
        """Set both; from an entry of another kind, as if its value had just been stepped."""
        if "compensation" in entry:
            weight.copy_(entry["weight"])
            self._cut.copy_(entry["compensation"])
        else:
            self.close(weight, value_of(entry, weight), 0)
