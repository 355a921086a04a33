"""A loss scale for each parameter, as T7 names it among the remedies: built for the experiment `clip`, to be measured.

A weight's gradient is a product, of the gradient that comes down the chain and of the layer's input. Here each such
product is brought to a power of two of its own (beside the loss scale) before it is rounded to FP16, and the power is
undone in FP32: a factor in the product's epilogue. The scale is one for the whole tensor, or one for each of its
elements. What comes down the chain stays at the loss scale: a scale of the parameter's cannot reach what lies before.

- *Own back-off*: a scale is halved where its own rounding overflows, and doubled after some steps that had room.
- *Own skip*: a parameter whose gradient is not finite sits a step out, and the others take it. Of a gradient with some
  finite elements only those are used (each element has a scale of its own then, so each sits out by itself).
- The loss scale is halved, and the batch skipped, only where no gradient is finite.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plimsoll.errors import ArgumentError
from plimsoll.scaling import LossScaler

Each = Literal["tensor", "element"]

_ROOM = 2.0**11  # of 2^16: what is below it all the time can be carried at twice the scale
_FURTHEST = 24  # binades from the loss scale
_PATIENCE = 10  # steps with room before a scale is doubled


class Scales:
    """The scale of one parameter, or of each of its elements: an exponent, and how many steps had room since."""

    def __init__(self, parameter: Tensor, each: Each) -> None:
        self.each = each
        shape = parameter.shape if each == "element" else torch.Size(())
        self.exponent = torch.zeros(shape, dtype=torch.int8, device=parameter.device)
        self.clean = torch.zeros_like(self.exponent)

    @property
    def nbytes(self) -> int:
        """What they take."""
        return self.exponent.nbytes + self.clean.nbytes

    def gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """The weight's gradient in FP32, after it was FP16 at the present scale; sets the next one."""
        held = torch.ldexp(g.float().T @ x.float(), self.exponent).half().float()
        found = torch.ldexp(held, -self.exponent)
        if bool(g.isfinite().all()):  # else it broke further up, and no scale of this one is to blame
            self._follow(held)
        return torch.where(held.isfinite(), found, 0.0) if self.each == "element" and _some(held) else found

    def _follow(self, held: Tensor) -> None:
        size = held.abs() if self.each == "element" else held.abs().amax()
        over, room = ~size.isfinite(), size < _ROOM
        self.clean = torch.where(room, self.clean + 1, 0)
        up = self.clean >= _PATIENCE
        self.clean = self.clean.masked_fill(up, 0)
        self.exponent = (self.exponent + up.to(torch.int8) - over.to(torch.int8)).clamp(-_FURTHEST, _FURTHEST)


class ParameterScaler(LossScaler):
    """A loss scaler that also gives the gradient of each linear layer's weight (or each element of it) its own scale.

    For models whose linear layers have no biases; other parameters' gradients are FP32 in mixed precision, and stay at
    the loss scale. `close` takes its hooks off the model.
    """

    def __init__(
        self, model: nn.Module, device: str = "cpu", *, each: Each = "tensor", init_scale: float = 2.0**16
    ) -> None:
        if each not in ("tensor", "element"):
            raise ArgumentError(f"ParameterScaler: expected each to be 'tensor' or 'element'; got {each!r}.")
        super().__init__(device, init_scale, max_scale=init_scale)
        self.sat_out = 0
        self._clean = 0
        self._mode = _OwnProducts(each)
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    @property
    def scales(self) -> list["Scales"]:
        """Of each weight that a linear layer has used so far."""
        return [scales for _, scales in self._mode.known.values()]

    @property
    def state_bytes(self) -> int:
        """What all scales take, with what they need to follow."""
        return sum(scales.nbytes for scales in self.scales)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As every scaler's, after parameters whose gradients are not finite have been left out."""
        held = [p for group in optimizer.param_groups for p in cast("Sequence[Tensor]", group["params"])]
        held = [p for p in held if p.grad is not None]
        broken = [p for p in held if p.grad is not None and not bool(p.grad.isfinite().all())]
        if len(broken) < len(held):
            for parameter in broken:
                parameter.grad = None
            self.sat_out += len(broken)
        super().unscale_(optimizer)

    def close(self) -> None:
        """The model is as it was."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, *_: object) -> None:
        self._mode.__enter__()

    def _leave(self, *_: object) -> None:
        self._mode.__exit__(None, None, None)

    def _next_scale(self, found_inf: Tensor) -> float:
        if bool(found_inf.item()):
            self._clean = 0
            return self.get_scale() * self.get_backoff_factor()
        self._clean += 1
        return self.get_scale() * (self.get_growth_factor() if self._clean % _PATIENCE == 0 else 1.0)


class _OwnProducts(TorchFunctionMode):
    """While it is active, linear layers without a bias compute their weights' gradients at scales of their own."""

    def __init__(self, each: Each) -> None:
        super().__init__()
        self._each: Each = each
        self.known: dict[int, tuple[Tensor, Scales]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not kwargs and torch.is_grad_enabled():
            x, weight, *biases = args
            if isinstance(weight, nn.Parameter) and all(bias is None for bias in biases):
                return cast("Any", _Linear).apply(x, weight, self._scales_of(weight))
        return func(*args, **(kwargs or {}))

    def _scales_of(self, weight: Tensor) -> Scales:
        if id(weight) not in self.known:
            self.known[id(weight)] = weight, Scales(weight, self._each)
        return self.known[id(weight)][1]


class _Linear(torch.autograd.Function):
    """x W^T, in the arithmetic around; backward, in FP16, the input's gradient as ever and W's at its own scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
        y = functional.linear(x, weight)
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))
        ctx.scales, ctx.wide = scales, (x.dtype, weight.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        flat, inputs = g.flatten(0, -2), x.flatten(0, -2)
        own = g.dtype is torch.float16
        grad_w = ctx.scales.gradient(flat, inputs) if own else flat.T @ inputs
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat.float() @ weight.float()).to(g.dtype).view(x.shape).to(ctx.wide[0])
        return grad_x, grad_w.to(ctx.wide[1]), None


def _some(values: Tensor) -> bool:
    return bool(values.isfinite().any())
