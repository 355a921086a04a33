"""`MasterWeights`: float32 masters of 16-bit weights, around any optimizer.

A loop that writes every step out does the same, with the same numbers, by three functions:

    model, masters = model_and_master_parameters(net.parameters())
    optimizer = torch.optim.AdamW(masters)                  # steps float32
    for batch in data:
        (loss_of(net, batch) * scale).backward()            # 16-bit gradients of the scaled loss
        model_gradients_to_masters(model, masters, scale)   # float32 gradients of the loss
        norm = torch.nn.utils.clip_grad_norm_(masters, 1.0)
        if norm.isfinite():
            optimizer.step()
            masters_to_model_parameters(masters, model)     # rounded to 16 bits
        net.zero_grad()
"""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plimsoll.errors import ArgumentError
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.precision.weights.base import CHUNK_BYTES, SixteenBitOptimizer, refuse_changed
from plimsoll.precision.weights.stores import Compact, Full, Store, in_float32, round_to
from plimsoll.unit.optim.optimizers import unhooked


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
        loss = unhooked(type(optimizer))(optimizer, *closure)
        for pair in self.pairs:
            if pair.gradient is not None:
                pair.close(0)
        return loss

    def _evaluating(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure before whose calls, but the first, weights follow the masters."""
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


# -- master weights step by step, for loops that write every step out --------------------------------------------------


def model_and_master_parameters(parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trainable parameters, and their masters for the optimizer.

    The master of a 16-bit parameter is a new float32 parameter of the same values. The master of any other parameter is
    the parameter itself. Frozen parameters are in neither list.

    >>> model, masters = model_and_master_parameters(nn.Linear(2, 1).half().parameters())
    >>> [p.dtype for p in model], [p.dtype for p in masters]
    ([torch.float16, torch.float16], [torch.float32, torch.float32])
    """
    model = [p for p in parameters if p.requires_grad]
    if not model:
        raise ArgumentError(
            "model_and_master_parameters: expected parameters of which one needs a gradient; got none that does. Give "
            "model.parameters(), as a new iterator."
        )
    return model, [nn.Parameter(p.detach().to(torch.float32)) if p.dtype in SIXTEEN_BIT else p for p in model]


@torch.no_grad()
def model_gradients_to_masters(model: Sequence[Tensor], masters: Sequence[Tensor], scale: float | Tensor = 1.0) -> None:
    """Set the masters' gradients to the model's in float32, over the loss scale.

    Gradients are multiplied by 1 / scale in float32. For a scale that is a power of two this is exact, except for
    subnormal results. A parameter without a gradient leaves its master without one. A gradient that a parameter shares
    with its master (float32 in the model) is divided in place.
    """
    _check("model_gradients_to_masters", model, masters)
    if isinstance(scale, Tensor) and scale.numel() == 1 and not scale.is_cpu:
        inverse = scale.double().reciprocal().float()  # not read, which would wait for the device
    elif isinstance(scale, Tensor | Real) and _is_scale(scale):
        inverse = torch.tensor(1.0 / float(scale), device="cpu")
    else:
        raise ArgumentError(
            f"model_gradients_to_masters: expected scale to be finite and above zero, and one number; got "
            f"scale={scale}. Give the number that the loss was multiplied by."
        )
    for p, master in zip(model, masters, strict=True):
        if p is not master:
            master.grad = None if p.grad is None else in_float32(p.grad, inverse)
        elif p.grad is not None:
            p.grad.mul_(inverse.to(p.device))


def _is_scale(scale: Any) -> bool:
    return (not isinstance(scale, Tensor) or scale.numel() == 1) and 0 < float(scale) < math.inf


@torch.no_grad()
def masters_to_model_parameters(masters: Sequence[Tensor], model: Sequence[Tensor]) -> None:
    """Write the masters to the model's parameters, rounded to nearest.

    Ties go to even in float16, away from zero in bfloat16.
    """
    _check("masters_to_model_parameters", model, masters)
    for p, master in zip(model, masters, strict=True):
        if p is not master:
            round_to(master.detach(), p.detach())


def _check(operation: str, model: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    shapes, expected = [tuple(p.shape) for p in masters], [tuple(p.shape) for p in model]
    swapped = any(p is not q and q.dtype != torch.float32 for p, q in zip(model, masters, strict=False))
    if shapes != expected or swapped:
        raise ArgumentError(
            f"{operation}: expected the two lists of model_and_master_parameters; got {len(model)} model parameters "
            f"and {len(masters)} masters, of other shapes or dtypes. Give each list in its place, whole and in order."
        )
