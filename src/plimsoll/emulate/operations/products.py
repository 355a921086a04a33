"""Products and convolutions with rounded operands.

Forward y = Q(a) Q(b), backward da = G(dy) Q(b)^T and db = Q(a)^T G(dy). Q rounds to the forward format, G to the
backward format, and the recipe sums. With block formats, each of the three products rounds the unrounded operand in its
own blocks, along the axis that it sums over, since blocks of one axis are not blocks of another. Biases, and the added
tensor of addmm and the like, are not operands: they are added afterwards, and their gradient is unrounded.

A 16-bit operand is widened (exact), and the result is rounded to its dtype once.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast as typed

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.emulate.dispatch import thread_frame
from plimsoll.emulate.operations.fp32_operations import narrow, widen
from plimsoll.emulate.recipe import Multiply, Recipe
from plimsoll.formats import Role
from plimsoll.kernels.dtypes import FLOATING
from plimsoll.kernels.operators.checks import refuse_transforms

_OF_LAYER: tuple[Role, Role] = ("activations", "weights")


class _Product(torch.autograd.Function):
    """Product of a, (batch x) M x K, and b, (batch x) K x N."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, recipe: Recipe, roles: tuple[Role, Role]) -> Tensor:
        cast_a, cast_b = recipe.operand(a, -1, roles[0]), recipe.operand(b, -2, roles[1])
        ctx.recipe, ctx.roles = recipe, roles
        ctx.save_for_backward(*((a, b) if recipe.in_blocks else (cast_a, cast_b)))
        return recipe.multiply(cast_a, cast_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            cast_b = recipe.operand(b, -1, ctx.roles[1]) if recipe.in_blocks else b
            grad_a = recipe.multiply(recipe.gradient(g, -1), cast_b.mT)
        if ctx.needs_input_grad[1]:
            cast_a = recipe.operand(a, -2, ctx.roles[0]) if recipe.in_blocks else a
            grad_b = recipe.multiply(cast_a.mT, recipe.gradient(g, -2))
        return grad_a, grad_b, None, None


class Products:
    """Rules for torch's products by one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def rules(self) -> dict[str, thread_frame.Rule]:
        """Return the rules by name."""
        forms = dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul"), self._matmul)
        forms |= dict.fromkeys(("addmm", "baddbmm", "addmv"), self._add)
        forms |= {"addbmm": self._add_batches, "addr": self._add_outer}
        forms |= {"linear": self._linear, "bilinear": self._bilinear}
        return {name: _rule(form, _DIMENSIONS.get(name)) for name, form in forms.items()}

    def matmul(self, a: Tensor, b: Tensor, roles: tuple[Role, Role] | None = None) -> Tensor:
        """Return `torch.matmul` of wide operands, rounded by the recipe.

        By default a parameter, or a view of one, has the role of a weight, all else that of an activation.
        """
        roles = (_role(a), _role(b)) if roles is None else roles
        a_row, b_column = a.dim() == 1, b.dim() == 1
        a, b = (a[None] if a_row else a), (b[:, None] if b_column else b)
        y: Tensor = self._batched(a, b, roles)
        y = y.squeeze(-2) if a_row else y
        return y.squeeze(-1) if b_column else y

    def _batched(self, a: Tensor, b: Tensor, roles: tuple[Role, Role]) -> Any:
        if b.dim() == 2:
            y: Any = self._product(a.flatten(0, -2), b, roles)
            return y.reshape(*a.shape[:-1], b.shape[-1])
        batch = typed("tuple[int, ...]", torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        flat_a = a.expand(*batch, *a.shape[-2:]).reshape(math.prod(batch), *a.shape[-2:])
        flat_b = b.expand(*batch, *b.shape[-2:]).reshape(math.prod(batch), *b.shape[-2:])
        return self._product(flat_a, flat_b, roles).reshape(*batch, a.shape[-2], b.shape[-1])

    def _product(self, a: Tensor, b: Tensor, roles: tuple[Role, Role]) -> Any:
        _refuse_transforms()
        return typed("Any", _Product).apply(a, b, self._recipe.acting(), roles)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.matmul(a, b)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.matmul(x, weight.mT if weight.dim() > 1 else weight, _OF_LAYER)
        return y if bias is None else y + bias

    def _add(self, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return _sum(added, self.matmul(a, b), beta, alpha)

    def _add_batches(self, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        flat_a = a.transpose(0, 1).reshape(a.shape[1], -1)
        return _sum(added, self.matmul(flat_a, b.reshape(-1, b.shape[2])), beta, alpha)

    def _add_outer(self, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return _sum(added, self.matmul(a[:, None], b[None]), beta, alpha)

    def _bilinear(self, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs, a_size, b_size = weight.shape
        wide = self.matmul(a, weight.transpose(0, 1).reshape(a_size, -1), _OF_LAYER)
        half = typed("Any", wide).unflatten(-1, (outputs, b_size))
        y = self.matmul(half, b.unsqueeze(-1)).squeeze(-1)
        return y if bias is None else y + bias


def _refuse_transforms() -> None:
    refuse_transforms("emulate", "Take gradients with backward() or torch.autograd.grad, and run a batch as a loop.")


def _role(x: Tensor) -> Role:
    base = x._base  # noqa: SLF001  (torch has no public name for it)
    return "weights" if isinstance(x if base is None else base, torch.nn.Parameter) else "activations"


def _sum(added: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else alpha * product
    added = added.expand(product.shape)  # torch does not expand the product
    return product if beta == 0 else product + (added if beta == 1 else beta * added)


# Dimensions that torch demands of the two operands. `_batched` would take others.
_DIMENSIONS = {
    "mm": (2, 2), "addmm": (2, 2), "bmm": (3, 3), "baddbmm": (3, 3), "addbmm": (3, 3), "mv": (2, 1), "addmv": (2, 1),
    "dot": (1, 1), "vdot": (1, 1), "addr": (1, 1),
}  # fmt: skip


def _rule(form: Any, dimensions: tuple[int, int] | None) -> thread_frame.Rule:
    """Return the rule that computes `form` on FP32 tensors and rounds once.

    Where torch would refuse the operands' dimensions, it is left to torch.
    """

    def rule(op: Any, args: Any, kwargs: Any) -> Any:
        dtype = common_dtype(args, kwargs)
        if dtype is None or "dtype" in op._overloadname:  # noqa: SLF001
            return NotImplemented
        if dimensions is not None:
            a, b = args[-2:]
            if (a.dim(), b.dim()) != dimensions or (dimensions == (3, 3) and a.shape[0] != b.shape[0]):
                return NotImplemented
        return narrow(form(*widen(args), **widen(kwargs)), dtype) if dtype.itemsize == 2 else form(*args, **kwargs)

    return rule


def common_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the floating dtype that all tensors have, or None."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    dtypes = {x.dtype for x in tensors}
    # None also for tensors that are not dense. torch itself raises for mixed dtypes.
    if len(dtypes) != 1 or not dtypes <= set(FLOATING) or any(x.layout is not torch.strided for x in tensors):
        return None
    return dtypes.pop()


class Attention:
    """Rule for `scaled_dot_product_attention`: softmax in FP32, products by the recipe."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (signature of a rule)
        """Run the operation."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        q, k, v, mask = (arguments.get(name) for name in names[:4])
        dtype = common_dtype((q, k, v), {})
        if dtype is None:
            return NotImplemented
        if dtype.itemsize == 2:
            q, k, v, mask = widen((q, k, v, mask))
        rest = {name: arguments[name] for name in names[4:] if name in arguments}
        y = self._attend(q, k, v, mask, **rest)
        return narrow(y, dtype) if dtype.itemsize == 2 else y

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = self._products.matmul(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        # A row whose mask excludes every key has the result 0, as in torch. Softmax would give NaN.
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
        return self._products.matmul(torch.dropout(weights, dropout_p, train=dropout_p > 0), v)


# -- convolutions, plain or transposed, with groups --------------------------------------------------------------------

# A convolution in any number of dimensions and its backward consist of three linear maps: `correlate` (x, w -> y), its
# adjoint `spread` (y, w -> x), and `weigh` (x, y -> w). A transposed convolution exchanges the first two. Without an
# accumulator torch computes them. With one, each is a matrix product over unfolded windows:
#
# - correlate sums over channels, then window, of one output;
# - spread correlates y, with zeros between its values where the stride skips, with the mirrored window;
# - weigh sums over the batch, then the positions.

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Geometry of the windows: one number per dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def correlate(self, x: Tensor, w: Tensor, multiply: Multiply) -> Tensor:
        """Return y (N, O, ...) from x (N, C, ...) and w (O, C/groups, ...)."""
        windows = self._windows(_padded(x, self.padding), w.shape[2:])
        spatial = windows.shape[2 : 2 + len(self.stride)]
        columns = self._columns(windows, x.shape[0])  # (N * groups, C/groups * window, positions)
        rows = w.reshape(1, self.groups, w.shape[0] // self.groups, -1).expand(x.shape[0], -1, -1, -1).flatten(0, 1)
        return multiply(rows, columns).reshape(x.shape[0], w.shape[0], *spatial)

    def spread(self, y: Tensor, w: Tensor, size: Sequence[int], multiply: Multiply) -> Tensor:
        """Return x (N, C, *size) from y (N, O, ...) and w: `correlate`'s adjoint in x."""
        inner = [(n - 1) * s + 1 for n, s in zip(y.shape[2:], self.stride, strict=True)]
        sparse = y.new_zeros((*y.shape[:2], *inner))
        sparse[(..., *(slice(None, None, s) for s in self.stride))] = y
        # With this many zeros around y, each of the `size` values starts one window of the mirrored correlation.
        reach = [d * (k - 1) for d, k in zip(self.dilation, w.shape[2:], strict=True)]
        before = [r - p for r, p in zip(reach, self.padding, strict=True)]
        after = [n + r - i - b for n, r, i, b in zip(size, reach, inner, before, strict=True)]
        sparse = _padded(sparse, before, after)
        mirrored = (
            typed("Any", w.flip(tuple(range(2, w.dim())))).unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        )
        still = Geometry(stride=(1,) * len(size), padding=(0,) * len(size), dilation=self.dilation, groups=self.groups)
        return still.correlate(sparse, mirrored, multiply)

    def weigh(self, x: Tensor, y: Tensor, window: Sequence[int], multiply: Multiply) -> Tensor:
        """Return w (O, C/groups, *window) from x and y: `correlate`'s adjoint in w."""
        windows = self._windows(_padded(x, self.padding), window)
        windows = windows[(slice(None), slice(None), *(slice(0, n) for n in y.shape[2:]))]
        columns = typed("Any", self._columns(windows, x.shape[0])).unflatten(0, (x.shape[0], self.groups))
        columns = columns.permute(1, 0, 3, 2).flatten(1, 2)  # (groups, N * positions, C/groups * window)
        rows = typed("Any", y.flatten(2)).unflatten(1, (self.groups, -1)).permute(1, 2, 0, 3).flatten(2)
        return multiply(rows, columns).reshape(y.shape[1], x.shape[1] // self.groups, *window)

    def _windows(self, x: Tensor, window: Sequence[int]) -> Tensor:
        """Return a view of x with the shape (N, C, positions..., window...)."""
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, window, strict=True)]
        counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, self.stride, strict=True)]
        steps = [n * s for n, s in zip(x.stride()[2:], self.stride, strict=True)]
        inner = [n * d for n, d in zip(x.stride()[2:], self.dilation, strict=True)]
        return x.as_strided((*x.shape[:2], *counts, *window), (*x.stride()[:2], *steps, *inner), x.storage_offset())

    def _columns(self, windows: Tensor, batch: int) -> Tensor:
        dims = len(self.stride)
        positions = tuple(range(2, 2 + dims))
        order = (0, 1, *range(2 + dims, 2 + 2 * dims), *positions)
        window, count = math.prod(windows.shape[2 + dims :]), math.prod(windows.shape[2 : 2 + dims])
        channels = windows.shape[1] // self.groups
        return windows.permute(order).reshape(batch * self.groups, channels * window, count)


def _padded(x: Tensor, before: Sequence[int], after: Sequence[int] | None = None) -> Tensor:
    pairs = list(zip(before, before if after is None else after, strict=True))
    return torch.nn.functional.pad(x, [size for pair in reversed(pairs) for size in pair])


class _Convolution(torch.autograd.Function):
    """``aten.convolution`` without its bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, geometry: Geometry, transposed: bool, extra: tuple[int, ...], recipe: Recipe
    ) -> Tensor:
        # The sum runs over the channels: of w, those of the first axis if transposed, otherwise those of the second.
        cast_x = _by_group(recipe.operand, x, geometry.groups)
        weight = functools.partial(recipe.operand, role="weights")
        cast_w = _by_group(weight, w, geometry.groups, axis=0) if transposed else weight(w, 1)
        ctx.save_for_backward(*((x, w) if recipe.in_blocks else (cast_x, cast_w)))
        ctx.geometry, ctx.transposed, ctx.extra, ctx.recipe = geometry, transposed, extra, recipe
        if not recipe.sums_apart:
            rest = (geometry.stride, geometry.padding, geometry.dilation, transposed, extra, geometry.groups)
            return torch.convolution(cast_x, cast_w, None, *rest)
        if transposed:
            return geometry.spread(cast_x, cast_w, _transposed_size(x, w, geometry, extra), recipe.multiply)
        return geometry.correlate(cast_x, cast_w, recipe.multiply)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        grad_x = _grad_x(ctx, g, x, w) if ctx.needs_input_grad[0] else None
        grad_w = _grad_w(ctx, g, x, w) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None, None, None


def _grad_x(ctx: Any, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    geometry, recipe = ctx.geometry, ctx.recipe
    g = _by_group(recipe.gradient, g, geometry.groups)
    if recipe.in_blocks:
        weight = functools.partial(recipe.operand, role="weights")
        w = weight(w, 1) if ctx.transposed else _by_group(weight, w, geometry.groups, axis=0)
    if not recipe.sums_apart:
        return _native_backward(ctx, g, x, w, 0)
    if ctx.transposed:
        return geometry.correlate(g, w, recipe.multiply)
    return geometry.spread(g, w, x.shape[2:], recipe.multiply)


def _grad_w(ctx: Any, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    geometry, recipe = ctx.geometry, ctx.recipe
    g = recipe.gradient(g, 0)  # the sum runs over batch and positions, so blocks run along the batch
    x = recipe.operand(x, 0) if recipe.in_blocks else x
    if not recipe.sums_apart:
        return _native_backward(ctx, g, x, w, 1)
    inside, outside = (g, x) if ctx.transposed else (x, g)
    return geometry.weigh(inside, outside, w.shape[2:], recipe.multiply)


def _native_backward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, which: int) -> Tensor:
    geometry = ctx.geometry
    places = (geometry.stride, geometry.padding, geometry.dilation, ctx.transposed, ctx.extra, geometry.groups)
    return _aten.convolution_backward(g, x, w, None, *places, [which == 0, which == 1, False])[which]


def _transposed_size(x: Tensor, w: Tensor, geometry: Geometry, extra: Sequence[int]) -> list[int]:
    parts = zip(x.shape[2:], geometry.stride, geometry.padding, geometry.dilation, w.shape[2:], extra, strict=True)
    return [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in parts]


def _by_group(rounded: Any, x: Tensor, groups: int, axis: int = 1) -> Tensor:
    """Return x rounded along a channel axis, with no block across two groups."""
    if groups == 1:
        return rounded(x, axis)
    return rounded(x.unflatten(axis, (groups, -1)), axis + 1).flatten(axis, axis + 1)


class Convolutions:
    """torch's convolutions by one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def rules(self) -> dict[str, thread_frame.Rule]:
        """Return the rules by name."""
        # conv2d and the like call `convolution`, which is intercepted.
        return {"convolution": self._convolution, "_convolution": self._convolution, "conv_tbc": self._conv_tbc}

    def _convolution(self, op: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (signature of a rule)
        x, w, bias, stride, padding, dilation, transposed, extra, groups = args[:9]
        dtype = common_dtype((x, w), {}) if bias is None else common_dtype((x, w, bias), {})
        if dtype is None or kwargs:
            return NotImplemented
        dims = x.dim() - 2
        places = Geometry(
            stride=_each(stride, dims), padding=_each(padding, dims), dilation=_each(dilation, dims), groups=groups
        )
        wide_x, wide_w, wide_bias = widen((x, w, bias)) if dtype.itemsize == 2 else (x, w, bias)
        _refuse_transforms()
        y = typed("Any", _Convolution).apply(
            wide_x, wide_w, places, transposed, _each(extra, dims), self._recipe.acting()
        )
        y = y if wide_bias is None else y + wide_bias.reshape(-1, *(1,) * dims)
        return narrow(y, dtype) if dtype.itemsize == 2 else y

    def _conv_tbc(self, op: Any, args: Any, kwargs: Any) -> Any:
        x, w, bias, padding = args if len(args) == 4 else (*args, 0)
        args = (x.permute(1, 2, 0), w.permute(2, 1, 0), bias, [1], [padding], [1], False, [0], 1)
        result = self._convolution(op, args, kwargs)
        return result if result is NotImplemented else result.permute(2, 0, 1)


def _each(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * dims if len(values) == 1 else tuple(values)
