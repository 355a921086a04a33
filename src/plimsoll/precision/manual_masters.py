"""Master weights step by step, for loops that write every step out.

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

`MasterWeights` does the same with the same numbers.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.precision.weights.pair import in_float32
from plimsoll.precision.weights.stores import round_to


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
    if isinstance(scale, Tensor):
        inverse = scale.double().reciprocal().float()
    elif math.isfinite(scale) and scale > 0:
        inverse = torch.tensor(1.0 / scale)
    else:
        raise ArgumentError(
            f"model_gradients_to_masters: expected scale to be finite and above zero; got scale={scale}. Give the "
            "number that the loss was multiplied by."
        )
    for p, master in zip(model, masters, strict=True):
        if p is not master:
            master.grad = None if p.grad is None else in_float32(p.grad, inverse)
        elif p.grad is not None:
            p.grad.mul_(inverse.to(p.device))


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
