"""Scales that tensors are multiplied by before a cast: powers of two, so that multiplying is exact.

A power of two also has an exact inverse, which the product is multiplied by. This costs up to one binade at the top of
the format, of the 18 (E4M3) or 32 (E5M2) that it has. Delayed scaling takes the scale from the largest magnitudes of
the last N training steps.
"""

from collections.abc import Iterable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from plimsoll.formats import E4M3, E5M2, Format
from plimsoll.kernels.dtypes import dtype_of

Role = Literal["activations", "weights", "gradients"]
ROLES: tuple[Role, ...] = ("activations", "weights", "gradients")
FORMATS: dict[Role, Format] = {"activations": E4M3, "weights": E4M3, "gradients": E5M2}
DTYPES: dict[Role, torch.dtype] = {role: dtype_of(fmt) for role, fmt in FORMATS.items()}

_BIAS = 127
_FRACTION = (1 << 23) - 1
_TOP_FIELD = 255  # of NaN and Inf
_LEAST, _MOST = 1, 253  # exponent fields of a normal float32 whose inverse is normal too
_TOPS = {fmt: int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32)) for fmt in (E4M3, E5M2)}


def absmax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude as a 0-d float32; NaN where there is one, 0 where there are no values."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    lowest, highest = torch.aminmax(x)
    return torch.maximum(-lowest, highest).to(torch.float32)


def scale_for(absmax: Tensor, fmt: Format, margin: int) -> Tensor:
    """Return the largest power of two that leaves `margin` binades above a float32 absmax before `fmt` saturates.

    It is 1 where absmax is 0, or is not finite and so says nothing; and always between 2**-126 and 2**126. By integers:
    a logarithm would round values just below a power of two up to it.
    """
    bits = absmax.view(torch.int32)
    field, fraction = bits >> 23, bits & _FRACTION
    top = _TOPS[fmt]
    shift = (top >> 23) - field - (fraction > (top & _FRACTION)).to(torch.int32) - margin
    scale = ((shift + _BIAS).clamp(_LEAST, _MOST) << 23).view(torch.float32)
    return torch.where((bits == 0) | (field == _TOP_FIELD), 1.0, scale)


# Delayed scaling: the scale of a step comes from the largest magnitudes of the last N steps.
#
# A step is a forward with its backward: the first forward after a backward starts a new one. So micro-batches are steps
# of their own, several uses of a layer in one forward are one step, and a forward repeated in the backward (activation
# checkpointing) changes nothing, since the largest of the same values is the same.
#
# The backward only reads what the forward writes, and vice versa: compiled code would otherwise lose one of the two
# writes. Each side keeps a history, the largest magnitude of the current step, and that step's number. A forward whose
# number the backward has reached starts the next step. Magnitudes that are not finite are not recorded. Without a
# history, in the first step, scales follow the tensor itself.

BACKWARD = ("fp8_gradient_history", "fp8_gradient_absmax", "fp8_gradient_step")


def add_buffers(module: nn.Module, steps: int, device: torch.device) -> None:
    """Add the buffers of delayed scaling to a module, which its state keeps. A second call empties them."""
    module.register_buffer("fp8_history", torch.zeros(2, steps, device=device))
    module.register_buffer("fp8_absmax", torch.zeros(2, device=device))
    module.register_buffer("fp8_step", torch.zeros((), dtype=torch.int64, device=device))
    module.register_buffer("fp8_gradient_history", torch.zeros(1, steps, device=device))
    module.register_buffer("fp8_gradient_absmax", torch.zeros(1, device=device))
    module.register_buffer("fp8_gradient_step", torch.full((), -1, dtype=torch.int64, device=device))


def begin(history: Tensor, absmax: Tensor, new: Tensor) -> None:
    """Move the last step's magnitudes into the history where `new` is true, and reset them."""
    moved = torch.cat((absmax[:, None], history[:, :-1]), dim=1)
    history.copy_(torch.where(new, moved, history))
    absmax.copy_(torch.where(new, 0.0, absmax))


def note(held: Tensor, found: Tensor) -> None:
    """Note a magnitude of the step that runs, if it is finite."""
    held.copy_(torch.maximum(held, torch.where(found.isfinite(), found, 0.0)))


def delayed_scale(history: Tensor, absmax: Tensor, found: Tensor | None, fmt: Format, margin: int) -> Tensor:
    """Return the scale by a row of history. An empty history uses this step's own magnitude."""
    known = history.amax()
    fallback = absmax if found is None else torch.maximum(absmax, found)
    return scale_for(torch.where(known > 0, known, fallback), fmt, margin)


def gradient_scale(
    history: Tensor, absmax: Tensor, step: Tensor, forward_step: Tensor, found: Tensor, first: bool, margin: int
) -> Tensor:
    """Return the gradient's scale in a step, starting the step if necessary. Records the magnitude."""
    begin(history, absmax, forward_step > step)
    step.copy_(torch.maximum(step, forward_step))
    scale = delayed_scale(history[0], absmax[0], found if first else None, E5M2, margin)
    note(absmax[0], found)
    return scale


def forward_scale(module: nn.Module, index: int, x: Tensor, training: bool, first: bool, margin: int) -> Tensor:
    """Return the scale of activations (0) or weights (1); in training their magnitude is noted."""
    history, noted = module.get_buffer("fp8_history")[index], module.get_buffer("fp8_absmax")[index]
    found = absmax_of(x) if first or training else None
    scale = delayed_scale(history, noted, found if first else None, E4M3, margin)
    if training and found is not None:
        note(noted, found)
    return scale


def begin_forward(module: nn.Module) -> None:
    """Start the next step if the backward of the last one has come."""
    step = module.get_buffer("fp8_step")
    new = module.get_buffer("fp8_gradient_step") == step
    begin(module.get_buffer("fp8_history"), module.get_buffer("fp8_absmax"), new)
    step.add_(new)


_NAMES = ("fp8_history", "fp8_absmax", "fp8_gradient_history", "fp8_gradient_absmax")


def agree(model: nn.Module, process_group: object = None) -> None:
    """Give every rank the largest magnitudes of all ranks, in the histories of delayed scaling.

    Ranks see different batches, so their histories differ, and so do their scales; each rank undoes its own, and
    nothing else depends on them. Yet a checkpoint that one rank writes for all holds one history alone: call this
    before, and training resumed equals training not interrupted. One collective for the whole model; none without
    histories, or where there is no process group. All ranks must call it.
    """
    buffers = cast("Iterable[tuple[str, Tensor]]", model.named_buffers())
    found = [buffer for name, buffer in buffers if name.rpartition(".")[2] in _NAMES]
    if not found or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    together = torch.cat([buffer.flatten() for buffer in found])
    torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group=process_group)  # pyright: ignore[reportArgumentType]
    parts = cast("tuple[Tensor, ...]", together.split([buffer.numel() for buffer in found]))
    for buffer, part in zip(found, parts, strict=True):
        buffer.copy_(part.view_as(buffer))
