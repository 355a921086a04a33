"""`MasterWeights`: float32 masters of 16-bit weights, around any optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.errors import ArgumentError
from plimsoll.precision.weights.base import CHUNK_BYTES, SixteenBitOptimizer, bare_step, refuse_changed
from plimsoll.precision.weights.stores import Compact, Full, Store


class MasterWeights(SixteenBitOptimizer):
    """FP32 master weights, with the model's 16-bit weights as rounded copies.

    The optimizer steps the masters. An update that is small compared with its weight is lost in 16 bits. In the master
    it adds up.

    Numerics. float16 weights are their masters rounded to nearest even, bfloat16 weights to nearest with ties away from
    zero. With `compact`, only the 16 bits that a bfloat16 weight lacks are stored: 4 bytes for both instead of 6.
    Training is the same bit for bit, because weight and low bits together are the master. NaNs become quiet ones.
    Gradients are converted to float32 exactly; a sparse one stays sparse. The inner optimizer's state is float32.

    If weights are changed from outside (clamped, pruned, loaded), the new values count. A full master follows exactly
    where the weight is no longer its rounded copy, and stays elsewhere. A compact one keeps its low bits, so it can
    differ from the new weight by less than rounding shows; `take_model_weights` drops them.

    Frozen parameters get a master when they get a gradient. Float32 parameters are stepped as they are.

    Args:
        optimizer: An optimizer of the model's parameters. From now on step, save and schedule this object instead. Its
            existing state becomes float32.
        compact: Store only the low bits of bfloat16 masters. Default: True for bfloat16 parameters, except with LBFGS,
            which reads all parameters at once. True with float16 is an error, because a float32 number is not a float16
            one and 16 bits.
        chunk_bytes: Memory for float32 values and gradients in a step of compact masters, in bytes. A parameter that
            needs more is stepped alone. An optimizer that counts steps in its groups needs compact=False.

    >>> model = torch.nn.Linear(2, 1, bias=False).bfloat16()
    >>> masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=1e-4))
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.0)
    >>> for _ in range(50):
    ...     model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    ...     masters.step()
    ...     masters.zero_grad()
    >>> model.weight.tolist(), masters.master_of(model.weight).tolist()
    ([[0.99609375, 0.99609375]], [[0.994999..., 0.994999...]])
    """

    update = "masters"

    def __init__(self, optimizer: Optimizer, *, compact: bool | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.compact = compact
        super().__init__(optimizer, chunk_bytes)

    def _new_store(self, weight: Tensor) -> Store:
        at_once = isinstance(self.optimizer, torch.optim.LBFGS)
        if self.compact and (at_once or weight.dtype is not torch.bfloat16):
            got = "LBFGS, which steps all parameters at once" if at_once else f"a parameter of {weight.dtype}"
            raise ArgumentError(
                f"{self.operation}: expected bfloat16 parameters and an optimizer that can step some at a time for "
                f"compact=True; got {got}. Use compact=None or False: masters of 4 bytes."
            )
        compact = weight.dtype is torch.bfloat16 and not at_once if self.compact is None else self.compact
        return Compact(weight) if compact else Full()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters, and write the model's weights.

        Parameters without a gradient stay as they are. A closure runs forward and backward of the model. If all masters
        are full, the optimizer may call it several times.
        """
        if not all(pair.store.whole for pair in self.pairs):
            return super().step(closure)
        refuse_changed(self.operation, self.pairs)
        loss = self._with_hooks(self._step_whole, *(() if closure is None else (self._evaluating(closure),)))
        self._end_step()
        return loss

    def _step_whole(self, optimizer: Optimizer, *closure: Callable[[], Any]) -> Any:
        """Step all masters at once, then write the weights."""
        for pair in () if closure else self.pairs:
            if pair.gradient is not None:
                pair.open(self._factor)
        loss = bare_step(optimizer, *closure)
        for pair in self.pairs:
            if pair.gradient is not None:
                pair.close(0)
        return loss

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure for the inner optimizer.

        Weights follow the masters before each call but the first.
        """
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            for pair in self.pairs:
                if calls:
                    pair.store.close(pair.weight.detach(), pair.master.data, 0)
                else:
                    pair.settle()
            calls += 1
            loss = closure()
            self.collect_gradients()
            return loss

        return evaluate
