"""Scaled dot-product attention as its two products and the softmax between them: each product can be rounded."""

import math
from typing import Any

import torch
from torch import Tensor

from plimsoll.emulate.operations.fp32_operations import narrow, widen
from plimsoll.emulate.operations.products import Products, common_dtype


class Attention:
    """The rule for `scaled_dot_product_attention`: softmax and mask in FP32, both products by the recipe."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def __call__(self, op: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (a rule's signature)
        """Stand in for the operation."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, args, strict=False)) | kwargs
        q, k, v, mask = (given.get(name) for name in names[:4])
        dtype = common_dtype((q, k, v), {})
        if dtype is None:
            return NotImplemented
        if dtype.itemsize == 2:
            q, k, v, mask = widen((q, k, v, mask))
        rest = {name: given[name] for name in names[4:] if name in given}
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
        nothing = (scores == -torch.inf).all(-1, keepdim=True)  # rows that attend to nothing have a result of 0
        weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
        return self._products.matmul(torch.dropout(weights, dropout_p, train=dropout_p > 0), v)
