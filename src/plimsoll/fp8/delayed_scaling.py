"""Delayed scaling: the largest magnitudes of the last N training steps, from which the next step's scales come.

Here a step is a forward with its backward: the first forward after a backward begins a new one. So micro-batches are
steps of their own, several uses of a layer in one forward are one step, and a forward that is repeated in the backward
(activation checkpointing) changes nothing, since the largest of the same values is the same.

What the forward writes the backward only reads, and the other way round: compiled code would otherwise lose one of the
two. Each keeps a history, the largest magnitude of the step that runs, and the number of that step; a forward whose
number the backward has reached begins the next. A magnitude that is not finite is not noted.

While there is no history yet (the first step) scales follow the tensor itself.
"""

import torch
from torch import Tensor, nn

from plimsoll.formats import E4M3, E5M2, Format
from plimsoll.fp8.scales import absmax_of, scale_for

BACKWARD = ("fp8_gradient_history", "fp8_gradient_absmax", "fp8_gradient_step")


def add_buffers(module: nn.Module, steps: int, device: torch.device) -> None:
    """Give the module the buffers of delayed scaling, which its state keeps; a call anew empties them."""
    module.register_buffer("fp8_history", torch.zeros(2, steps, device=device))
    module.register_buffer("fp8_absmax", torch.zeros(2, device=device))
    module.register_buffer("fp8_step", torch.zeros((), dtype=torch.int64, device=device))
    module.register_buffer("fp8_gradient_history", torch.zeros(1, steps, device=device))
    module.register_buffer("fp8_gradient_absmax", torch.zeros(1, device=device))
    module.register_buffer("fp8_gradient_step", torch.full((), -1, dtype=torch.int64, device=device))


def begin(history: Tensor, absmax: Tensor, new: Tensor) -> None:
    """Where `new` is true, moves the last step's magnitudes into the history and forgets them."""
    moved = torch.cat((absmax[:, None], history[:, :-1]), dim=1)
    history.copy_(torch.where(new, moved, history))
    absmax.copy_(torch.where(new, 0.0, absmax))


def note(held: Tensor, found: Tensor) -> None:
    """Note a magnitude of the step that runs, if it is finite."""
    held.copy_(torch.maximum(held, torch.where(found.isfinite(), found, 0.0)))


def delayed_scale(history: Tensor, absmax: Tensor, found: Tensor | None, fmt: Format, margin: int) -> Tensor:
    """Return the scale by a row of history; while that is empty, by the step's own magnitude: the one noted, and `found`."""
    known = history.amax()
    fallback = absmax if found is None else torch.maximum(absmax, found)
    return scale_for(torch.where(known > 0, known, fallback), fmt, margin)


def gradient_scale(
    history: Tensor, absmax: Tensor, step: Tensor, forward_step: Tensor, found: Tensor, first: bool, margin: int
) -> Tensor:
    """Return the gradient's scale in the step of that number; begins the step if need be, and notes the magnitude found."""
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
