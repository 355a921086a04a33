"""The three products of a linear layer in FP8, as one autograd function.

Forward ``x @ w.t()`` is E4M3 by E4M3. The gradient of the input, ``g @ w``, and that of the weight, ``g.t() @ x``, are
E5M2 by E4M3. Each tensor is cast once, in the layouts that its products read. Autograd saves the codes, half the size
of bfloat16. The gradient of the bias is a float32 sum of the uncast gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.formats import E5M2
from plimsoll.fp8.casting import Codes, to_codes
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
    gradient: float = 1.0  # constant scale of the gradient


class Marks(NamedTuple):
    """Buffers that the backward writes to, and the number of its step.

    None for those that the layer lacks. Autograd does not save these tensors, since a second forward may change them
    before the backward of the first.
    """

    scale: Tensor | None = None
    history: Tensor | None = None
    absmax: Tensor | None = None
    step: Tensor | None = None
    forward_step: Tensor | None = None
    bank: Tensor | None = None
    row: int = 0


class Fp8Product(torch.autograd.Function):
    """``x @ weight.t() + bias`` of two matrices, with a weight already in FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_codes: Codes,
        scale: Tensor | None,
        bank: Tensor | None,
        row: int,
        marks: Marks,
        constants: Constants,
    ) -> Tensor:
        """Return the product, times the factor of unit scaling, in the constants' dtype."""
        ctx.constants, ctx.marks, ctx.sizes = constants, marks, (*x.shape, weight.shape[0])
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        layout: Layout = "both" if constants.keep and ctx.needs_input_grad[1] else "rows"
        codes = to_codes(x, DTYPES["activations"], scale, layout, bank, row)
        assert codes.rows is not None
        assert weight_codes.rows is not None
        if constants.keep:
            ctx.save_for_backward(codes.columns, weight_codes.columns, scale, weight_codes.scale)
        if bias is not None:
            bias = _padded(_times(bias, constants.output), weight_codes.rows.shape[0])
        scales = _inverse(scale, constants.output, x), _inverse(weight_codes.scale, 1.0, x)
        y = product(codes.rows, weight_codes.rows, *scales, bias, constants.dtype, fast=True)
        return _cut(y, x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x, weight and bias, each in its tensor's dtype."""
        x_columns, columns, x_scale, weight_scale = ctx.saved_tensors
        constants: Constants = ctx.constants
        batch, width, height = ctx.sizes
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        codes = _gradient_codes(gradient, ctx.marks, constants, of_input, of_weight)
        result: list[Tensor | None] = [None] * 9
        if codes.rows is not None:
            scales = _inverse(codes.scale, constants.input, gradient), _inverse(weight_scale, 1.0, gradient)
            product_of_rows = product(codes.rows, columns, *scales, None, ctx.dtypes[0], fast=False)
            result[0] = _cut(product_of_rows, batch, width)
        if codes.columns is not None:
            scales = _inverse(codes.scale, constants.weight, gradient), _inverse(x_scale, 1.0, gradient)
            product_of_columns = product(codes.columns, x_columns, *scales, None, ctx.dtypes[1], fast=False)
            result[1] = _cut(product_of_columns, height, width)
        if of_bias:
            result[2] = _times(gradient.sum(0, dtype=torch.float32), constants.bias).to(ctx.dtypes[2])
        return tuple(result)


def _gradient_codes(gradient: Tensor, marks: Marks, constants: Constants, of_input: bool, of_weight: bool) -> Codes:
    """Return the codes of the gradient in the layouts that are needed."""
    if not (of_input or of_weight):
        return Codes()
    layout: Layout = "both" if of_input and of_weight else "rows" if of_input else "columns"
    scale = _scale_gradient(gradient, marks, constants)
    return to_codes(gradient, DTYPES["gradients"], scale, layout, marks.bank, marks.row)


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
    """Return `factor` divided by the scale of an operand, a power of two."""
    if scale is None:
        return torch.full((), factor, dtype=torch.float32, device=like.device)
    return _times(scale.reciprocal(), factor)


def _times(x: Tensor, factor: float) -> Tensor:
    is_one = factor == 1.0  # never true for a symbol, which a compiler has for a dynamic batch size
    return x if is_one else x * factor


def _padded(bias: Tensor, size: int) -> Tensor:
    return bias if bias.shape[0] == size else torch.nn.functional.pad(bias, (0, size - bias.shape[0]))


def _cut(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix without its padding, contiguous."""
    if x.shape[1] != columns:
        return x[:rows, :columns].contiguous()
    return x if x.shape[0] == rows else x[:rows]
