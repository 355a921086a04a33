"""Normalizations at unit scale: factors only for parameters' gradients."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.arguments import check_floating
from plimsoll.unit.formulas import root
from plimsoll.unit.scaled_multiply import multiplied


def layer_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return `torch.nn.functional.layer_norm`.

    The gradients of weight and bias are multiplied by rows^-1/2. Output and input's gradient are at unit scale without
    a factor, so there is no constraint. (The gradient is at sqrt(1 - 2/n), since a norm removes two of its n
    directions.) The same holds for the other norms.

    Raises:
        UnsupportedTensorError: A tensor is not floating point.
    """
    check_floating("layer_norm", input=input, weight=weight, bias=bias)
    return F.layer_norm(input, normalized_shape, _shared(weight, input), _shared(bias, input), eps)


def rms_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return `torch.nn.functional.rms_norm`, with factors as `layer_norm`."""
    check_floating("rms_norm", input=input, weight=weight)
    return F.rms_norm(input, normalized_shape, _shared(weight, input), eps)


def group_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return `torch.nn.functional.group_norm`, as `layer_norm`.

    The gradients of weight and bias are multiplied by positions^-1/2.
    """
    check_floating("group_norm", input=input, weight=weight, bias=bias)
    return F.group_norm(input, num_groups, _shared(weight, input), _shared(bias, input), eps)


def batch_norm(
    input: Tensor,  # noqa: A002  (torch's name)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return `torch.nn.functional.batch_norm`, as `layer_norm`.

    The gradients of weight and bias are multiplied by positions^-1/2.
    """
    check_floating("batch_norm", input=input, weight=weight, bias=bias)
    weight, bias = _shared(weight, input), _shared(bias, input)
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _shared(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a parameter with a factor for its gradient, a sum over rows of `x`."""
    if parameter is None:
        return None
    terms = x.numel() // parameter.numel() if x.numel() and parameter.numel() else 0
    return multiplied(parameter, 1.0, root(terms))
