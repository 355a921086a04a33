"""The three products of a linear layer in FP8, as one autograd function.

Forward ``x @ w.t()`` is E4M3 by E4M3; the gradient of the input, ``g @ w``, and that of the weight, ``g.t() @ x``, are
E5M2 by E4M3. Each tensor is cast once, in the layouts that its products read. What is kept for the backward is codes:
half of what bfloat16 would keep. The bias's gradient is a sum in float32 of the gradient as it comes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.formats import E5M2
from plimsoll.fp8.casting import Held, hold
from plimsoll.fp8.products import product
from plimsoll.fp8.scales import DTYPES, absmax_of, gradient_scale, scale_for
from plimsoll.kernels.operators.fp8_cast import Layout


class Constants(NamedTuple):
    """Factors of a call's products, and the settings known before it runs."""

    output: float
    input: float
    weight: float
    dtype: torch.dtype  # of the result
    keep: bool  # whether a backward may follow
    margin: int = 0
    first: bool = False  # no history yet
    bias: float = 1.0
    gradient: float = 1.0  # its scale, where that is a constant


class Marks(NamedTuple):
    """Buffers that the backward writes to, and the number of its step; None for those that the layer lacks.

    These tensors are kept beside what autograd saves: a second forward may change them before the first one's backward.
    """

    scale: Tensor | None = None
    history: Tensor | None = None
    absmax: Tensor | None = None
    step: Tensor | None = None
    forward_step: Tensor | None = None
    bank: Tensor | None = None
    row: int = 0


class Fp8Product(torch.autograd.Function):
    """``x @ weight.t() + bias`` of two matrices, of which the weight is in FP8 already."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_held: Held,
        scale: Tensor | None,
        bank: Tensor | None,
        row: int,
        marks: Marks,
        constants: Constants,
    ) -> Tensor:
        """Return the product in the dtype of `constants`, unit scaling's factor on it."""
        ctx.constants, ctx.marks, ctx.sizes = constants, marks, (*x.shape, weight.shape[0])
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        layout: Layout = "both" if constants.keep and ctx.needs_input_grad[1] else "rows"
        held = hold(x, DTYPES["activations"], scale, layout, bank, row)
        assert held.rows is not None
        assert weight_held.rows is not None
        if constants.keep:
            ctx.save_for_backward(held.columns, weight_held.columns, scale, weight_held.scale)
        if bias is not None:
            bias = _made_up(_times(bias, constants.output), weight_held.rows.shape[0])
        found = product(
            held.rows, weight_held.rows, _inverse(scale, constants.output, x), _inverse(weight_held.scale, 1.0, x),
            bias, constants.dtype, fast=True,
        )  # fmt: skip
        return _cut(found, x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, weight and bias, each in its tensor's dtype."""
        x_columns, columns, x_scale, weight_scale = ctx.saved_tensors
        constants: Constants = ctx.constants
        batch, width, height = ctx.sizes
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        held = _hold_gradient(gradient, ctx.marks, constants, of_input, of_weight)
        result: list[Tensor | None] = [None] * 9
        if held.rows is not None:
            scales = _inverse(held.scale, constants.input, gradient), _inverse(weight_scale, 1.0, gradient)
            found = product(held.rows, columns, *scales, None, ctx.dtypes[0], fast=False)
            result[0] = _cut(found, batch, width)
        if held.columns is not None:
            scales = _inverse(held.scale, constants.weight, gradient), _inverse(x_scale, 1.0, gradient)
            found = product(held.columns, x_columns, *scales, None, ctx.dtypes[1], fast=False)
            result[1] = _cut(found, height, width)
        if of_bias:
            result[2] = _times(gradient.sum(0, dtype=torch.float32), constants.bias).to(ctx.dtypes[2])
        return tuple(result)


def _hold_gradient(gradient: Tensor, marks: Marks, constants: Constants, of_input: bool, of_weight: bool) -> Held:
    """Return the gradient's codes in the layouts that are needed."""
    if not (of_input or of_weight):
        return Held()
    layout: Layout = "both" if of_input and of_weight else "rows" if of_input else "columns"
    scale = _scale_gradient(gradient, marks, constants)
    return hold(gradient, DTYPES["gradients"], scale, layout, marks.bank, marks.row)


def _scale_gradient(gradient: Tensor, marks: Marks, constants: Constants) -> Tensor | None:
    if marks.scale is None:
        is_one = constants.gradient == 1.0
        return None if is_one else torch.full((), constants.gradient, dtype=torch.float32, device=gradient.device)
    absmax = absmax_of(gradient)
    if marks.history is None or marks.absmax is None or marks.step is None or marks.forward_step is None:
        scale = scale_for(absmax, E5M2, constants.margin)
    else:
        scale = gradient_scale(
            marks.history, marks.absmax, marks.step, marks.forward_step, absmax, constants.first, constants.margin
        )
    marks.scale.copy_(scale)
    return scale


def _inverse(scale: Tensor | None, factor: float, like: Tensor) -> Tensor:
    """Return the factor of a product for an operand multiplied by `scale`, a power of two, times `factor`."""
    if scale is None:
        return torch.full((), factor, dtype=torch.float32, device=like.device)
    return _times(scale.reciprocal(), factor)


def _times(x: Tensor, factor: float) -> Tensor:
    is_one = factor == 1.0  # a symbol, where a compiler keeps batches open, is never known to be
    return x if is_one else x * factor


def _made_up(bias: Tensor, size: int) -> Tensor:
    return bias if bias.shape[0] == size else torch.nn.functional.pad(bias, (0, size - bias.shape[0]))


def _cut(found: Tensor, rows: int, columns: int) -> Tensor:
    """Return the part that is not made up, in one piece."""
    if found.shape[1] != columns:
        return found[:rows, :columns].contiguous()
    return found if found.shape[0] == rows else found[:rows]
