"""Look-ups in a table at unit scale."""

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit import _formulas
from plimsoll.unit._scaled import check_floating, multiplied


def embedding(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding` in a table of unit variance; its gradient is multiplied by sqrt(vocabulary / tokens).

    So the gradient is at unit scale over the whole table, however the tokens are distributed: the table is a cut edge
    and needs no constraint. `scale_grad_by_freq` is torch's own mean by token on top of it.

    Raises `UnsupportedTensorError` for a table that is not floating point.
    """
    check_floating("embedding", weight=weight)
    weight = multiplied(weight, 1.0, _formulas.embedding(weight.shape[0], input.numel()))
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
