"""Look-ups in a table at unit scale."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.factors import formulas
from plimsoll.unit.scaled_multiply import check_floating, multiplied


def embedding(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding`; the gradient of the table is multiplied by sqrt(vocabulary / tokens).

    The table has unit variance. Its gradient is at unit scale over the whole of it, however the tokens are
    distributed; the table is a cut edge, and there is no constraint. With
    `scale_grad_by_freq` torch divides by each token's count on top of it.

    Raises `UnsupportedTensorError` for a table that is not floating point.
    """
    check_floating("embedding", weight=weight)
    if max_norm is not None:  # here, since what is scaled below is a view that must not change in place
        with torch.no_grad():
            torch.embedding_renorm_(weight, input.contiguous(), max_norm, norm_type)
    weight = multiplied(weight, 1.0, formulas.embedding(weight.shape[0], input.numel()))
    return F.embedding(input, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
