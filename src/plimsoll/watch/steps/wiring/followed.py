"""A few weights of an optimizer and their gradients, from step to step."""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue, number

_VALUES = 256  # of a weight or a gradient that is followed


class FollowedGradient:
    """A parameter's gradient, from one step of its optimizer to the next."""

    __slots__ = (
        "after_backward",
        "after_step",
        "before",
        "before_backward",
        "carried",
        "kept",
        "left",
        "param",
        "size",
    )

    def __init__(self, p: Tensor) -> None:
        self.param = weakref.ref(p)
        self.kept: weakref.ref[Tensor] | None = None  # the gradient that the last step has left
        self.after_step = self.before_backward = self.after_backward = -1  # versions
        self.before: weakref.ref[Tensor] | None = None  # the gradient that the last backward has found
        self.left: weakref.ref[Tensor] | None = None  # and the one that it has left
        self.carried = False  # the last backward was added to it
        self.size: float | DeviceValue | None = None  # its largest magnitude before that

    def gradient(self) -> Tensor | None:
        """The gradient as it is now; None for one that has no versions."""
        p = self.param()
        g = None if p is None else p.grad
        return g if g is not None and g.layout == torch.strided and not g.is_inference() else None

    def step_ends(self) -> None:
        """Notes the gradient that the step has left."""
        g = self.gradient()
        self.kept = None if g is None else weakref.ref(g)
        self.after_step = -1 if g is None else g._version  # noqa: SLF001  (public in all but name)
        self.carried = False

    def backward_begins(self, measure: bool) -> None:
        """Notes the gradient that the backward finds, and asks for its size if `measure`."""
        g = self.gradient()
        self.before = None if g is None else weakref.ref(g)
        self.before_backward = -1 if g is None else g._version  # noqa: SLF001
        same = g is not None and self.kept is not None and self.kept() is g
        if g is None or not same or self.before_backward != self.after_step:  # set to None or zero, or changed
            # Set to None, so gradients that another model's backward adds later are not carried over.
            self.kept, self.carried = None, False
        elif measure and not self.carried:
            # `.data.zero_()` leaves no other trace: the value itself is asked for, and read when it is there.
            plain = g.detach()
            self.size = number(plain.abs().amax()) if plain.numel() and not hasattr(plain, "placements") else 0.0

    def backward_ends(self) -> bool:
        """Notes what the backward has done; whether it reached the parameter."""
        g = self.gradient()
        self.after_backward = -1 if g is None else g._version  # noqa: SLF001
        if g is None:
            return False
        reached = self.after_backward != self.before_backward or self.before is None or self.before() is not g
        if reached and self.kept is not None and self.kept() is g:
            self.carried, self.after_step = True, self.after_backward
        self.left = weakref.ref(g)
        return reached

    def was_cleared(self) -> bool:
        """Return True if the gradient was written since the last backward and is all zero on a CPU."""
        g = self.gradient()
        if g is None or g.device.type != "cpu" or g._version == self.after_backward:  # noqa: SLF001
            return g is None
        return not g.detach().any()

    def is_as_backward_left_it(self) -> bool:
        """Return True if nothing has changed the gradient since the last backward."""
        g = self.gradient()
        left = None if self.left is None else self.left()
        return g is not None and g is left and g._version == self.after_backward  # noqa: SLF001


def living(weights: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """Return the weights that are still there."""
    return [p for ref in weights if (p := ref()) is not None]


def gradients_of(weights: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """Return the gradients of the weights that have one that can be read."""
    return [p.grad for p in living(weights) if p.grad is not None and is_plain(p.grad)]


def is_plain(x: Tensor) -> bool:
    """Return True for a tensor that can be read as it lies in memory."""
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta and not x.is_inference()
    if not plain or not x.numel() or not x.is_contiguous():
        return False
    return x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.element_size()  # FSDP frees some


def some_values(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return first values of tensors, or None if not readable on one device."""
    if not tensors or len({x.device for x in tensors}) > 1 or not all(map(is_plain, tensors)):
        return None
    return torch.cat([x.detach().reshape(-1)[:_VALUES].float() for x in tensors])
