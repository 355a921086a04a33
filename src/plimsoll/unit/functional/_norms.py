"""Normalisations at unit scale: their outputs are at unit scale already; the gradients of their parameters are sums."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit._formulas import root
from plimsoll.unit._scaled import check_floating, multiplied


def layer_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.layer_norm`, whose parameters' gradients are multiplied by rows^-1/2.

    Output and input's gradient need no factor, and so there is no constraint.

    Raises `UnsupportedTensorError` for tensors that are not floating point.
    """
    check_floating("layer_norm", input=input, weight=weight, bias=bias)
    weight, bias = (shared(each, input) for each in (weight, bias))
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def shared(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter that every row of `x` uses: its gradient, a sum over them, comes out at unit scale."""
    if parameter is None:
        return None
    return multiplied(parameter, 1.0, root(x.numel() // parameter.numel()) if x.numel() else 1.0)
