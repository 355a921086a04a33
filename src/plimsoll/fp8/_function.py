"""The three products of a linear layer in FP8, as one autograd function.

Forward ``x @ w.t()`` is E4M3 by E4M3; the gradient of the input, ``g @ w``, and that of the weight, ``g.t() @ x``, are
E5M2 by E4M3. Each tensor is cast once, in the layouts that its products read. What is kept for the backward is codes:
half of what bfloat16 would keep.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.formats import E5M2
from plimsoll.fp8._cast import Layout, cast_codes
from plimsoll.fp8._product import product
from plimsoll.fp8._scales import DTYPES, absmax_of, scale_for


class Held(NamedTuple):
    """A tensor in FP8: its codes by rows, those of its transpose by rows, and the scale they were made with."""

    rows: Tensor | None
    columns: Tensor | None
    scale: Tensor | None  # None: 1


class Constants(NamedTuple):
    """What the products are multiplied by, and how the gradient is scaled."""

    output: float
    input: float
    weight: float
    bias: float
    follows: bool  # whether the gradient's scale comes from the gradient itself
    margin: int


class Fp8Product(torch.autograd.Function):
    """``x @ weight.t() + bias``; see `apply_product`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        columns: Tensor | None,
        weight_scale: Tensor | None,
        input_scale: Tensor | None,
        gradient_scale: Tensor | None,
        seen: Tensor | None,
        constants: Constants,
    ) -> Tensor:
        """The product, in x's dtype."""
        keep = ctx.needs_input_grad[1]
        layout: Layout = "both" if keep else "rows"
        x_rows, x_columns = cast_codes(x, DTYPES["activations"], input_scale, layout)
        assert x_rows is not None
        ctx.save_for_backward(x_columns, columns, input_scale, weight_scale, gradient_scale, seen)
        ctx.constants, ctx.sizes = constants, (*x.shape, weight.shape[0])
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        scale_x, scale_w = _inverse(input_scale, constants.output, x), _inverse(weight_scale, 1.0, x)
        if bias is not None:
            bias = _made_up(bias if constants.output == 1 else bias * constants.output, rows.shape[0])
        found = product(x_rows, rows, scale_x, scale_w, bias, x.dtype, fast=True)
        return _cut(found, x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of x, weight and bias, each in its tensor's dtype."""
        x_columns, columns, input_scale, weight_scale, gradient_scale, seen = ctx.saved_tensors
        constants: Constants = ctx.constants
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        held = _cast_gradient(gradient, gradient_scale, seen, constants, of_input, of_weight)
        batch, width, height = ctx.sizes
        result: list[Tensor | None] = [None] * 10
        if held.rows is not None and columns is not None:
            scale_g, scale_w = _inverse(held.scale, constants.input, gradient), _inverse(weight_scale, 1.0, gradient)
            found = product(held.rows, columns, scale_g, scale_w, None, ctx.dtypes[0], fast=False)
            result[0] = _cut(found, batch, width)
        if held.columns is not None:
            scale_g, scale_x = _inverse(held.scale, constants.weight, gradient), _inverse(input_scale, 1.0, gradient)
            found = product(held.columns, x_columns, scale_g, scale_x, None, ctx.dtypes[1], fast=False)
            result[1] = _cut(found, height, width)
        if of_bias:
            result[2] = (gradient.sum(0, dtype=torch.float32) * constants.bias).to(ctx.dtypes[2])
        return tuple(result)


def _cast_gradient(
    gradient: Tensor, scale: Tensor | None, seen: Tensor | None, constants: Constants, of_input: bool, of_weight: bool
) -> Held:
    """The gradient's codes in the layouts that are needed; what was seen of it is noted."""
    if not (of_input or of_weight):
        return Held(None, None, None)
    if seen is not None:
        absmax = absmax_of(gradient)
        if constants.follows:
            scale = scale_for(absmax, E5M2, constants.margin)
        note_gradient(seen, absmax, scale)
    layout: Layout = "both" if of_input and of_weight else "rows" if of_input else "columns"
    return Held(*cast_codes(gradient, DTYPES["gradients"], scale, layout), scale)


def note_gradient(seen: Tensor, absmax: Tensor, scale: Tensor | None) -> None:
    """Notes the gradient's largest magnitude and its scale where the layer finds them: the last two of `seen`."""
    assert scale is not None
    seen.copy_(torch.stack((torch.maximum(seen[0], absmax), scale)))


def _inverse(scale: Tensor | None, factor: float, like: Tensor) -> Tensor:
    """What a product is multiplied by for an operand that was multiplied by `scale`, a power of two, times `factor`."""
    if scale is None:
        return torch.full((), factor, dtype=torch.float32, device=like.device)
    inverse = scale.reciprocal()
    return inverse if factor == 1 else inverse * factor


def _made_up(bias: Tensor, size: int) -> Tensor:
    return bias if bias.shape[0] == size else torch.nn.functional.pad(bias, (0, size - bias.shape[0]))


def _cut(found: Tensor, rows: int, columns: int) -> Tensor:
    """The part that is not made-up zeros, in one piece."""
    if found.shape[1] != columns:
        return found[:rows, :columns].contiguous()
    return found if found.shape[0] == rows else found[:rows]
