"""Products with rounded operands.

Forward y = Q(a) Q(b), backward da = G(dy) Q(b)^T and db = Q(a)^T G(dy). Q rounds to the forward format, G to the
backward format, and the recipe sums. With block formats, each of the three products rounds the unrounded operand in its
own blocks, along the axis that it sums over, since blocks of one axis are not blocks of another. Biases, and the added
tensor of addmm and the like, are not operands: they are added afterwards, and their gradient is unrounded.

A 16-bit operand is widened (exact), and the result is rounded to its dtype once.
"""

import math
from typing import Any, cast as typed

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.emulate.dispatch import thread_frame
from plimsoll.emulate.operations.fp32_operations import narrow, widen
from plimsoll.emulate.recipe import Recipe
from plimsoll.formats import Role
from plimsoll.kernels.dtypes import FLOATING

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
        return {name: _rule(form) for name, form in forms.items()}

    def matmul(self, a: Tensor, b: Tensor, roles: tuple[Role, Role] | None = None) -> Tensor:
        """Return `torch.matmul` of wide operands, rounded by the recipe.

        Args:
            a: First operand.
            b: Second operand.
            roles: The roles of both. Default: a parameter, or a view of one, is a weight, all else an activation.
        """
        roles = (_role(a), _role(b)) if roles is None else roles
        a_row, b_column = a.dim() == 1, b.dim() == 1
        a, b = (a[None] if a_row else a), (b[:, None] if b_column else b)
        y: Tensor = self._batched(a, b, roles)
        y = y.squeeze(-2) if a_row else y
        return y.squeeze(-1) if b_column else y

    def _batched(self, a: Tensor, b: Tensor, roles: tuple[Role, Role]) -> Any:
        if b.dim() == 2:
            y: Any = self._product(a.reshape(-1, a.shape[-1]), b, roles)
            return y.reshape(*a.shape[:-1], b.shape[-1])
        batch = typed("tuple[int, ...]", torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        flat_a = a.expand(*batch, *a.shape[-2:]).reshape(math.prod(batch), *a.shape[-2:])
        flat_b = b.expand(*batch, *b.shape[-2:]).reshape(math.prod(batch), *b.shape[-2:])
        return self._product(flat_a, flat_b, roles).reshape(*batch, a.shape[-2], b.shape[-1])

    def _product(self, a: Tensor, b: Tensor, roles: tuple[Role, Role]) -> Any:
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


def _role(x: Tensor) -> Role:
    base = x._base  # noqa: SLF001  (torch has no public name for it)
    return "weights" if isinstance(x if base is None else base, torch.nn.Parameter) else "activations"


def _sum(added: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else alpha * product
    if beta == 0:
        return product.expand(typed("tuple[int, ...]", torch.broadcast_shapes(added.shape, product.shape)))
    return product + (added if beta == 1 else beta * added)


def _rule(form: Any) -> thread_frame.Rule:
    """Return the rule that computes `form` on FP32 tensors and rounds once."""

    def rule(op: Any, args: Any, kwargs: Any) -> Any:
        dtype = common_dtype(args, kwargs)
        if dtype is None or "dtype" in op._overloadname:  # noqa: SLF001
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
    """Rule for `scaled_dot_product_attention`.

    Softmax and mask are computed in FP32, both products by the recipe.
    """

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
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        # A row whose mask excludes every key has the result 0, as in torch. Softmax would give NaN.
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
        return self._products.matmul(torch.dropout(weights, dropout_p, train=dropout_p > 0), v)
