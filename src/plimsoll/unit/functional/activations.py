"""Activations, dropout and normalizations at unit scale."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.checks import one_of
from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.arguments import check_floating, check_mult, check_not_inplace, check_probability
from plimsoll.unit.formulas import RELU, Constraint, check_constraint, root
from plimsoll.unit.functional.ideal_factors import apply_checked, gated, nonlinear, times
from plimsoll.unit.scaled_multiply import multiplied

# -- activations and dropout (factors by `formulas.nonlinear`) ---------------------------------------------------------


def gelu(
    input: Tensor,  # noqa: A002  (torch's name)
    approximate: str = "none",
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.gelu` of `mult * input` at unit scale.

    The factors are 1.701 forward and 1.481 backward if `mult` is 1. The result has the dtype of `input`. NaN and Inf
    are handled as by torch.

    Args:
        input: Floating-point tensor.
        approximate: `"none"` or `"tanh"`, as in torch. Default: `"none"`.
        mult: Multiplies the input first. From 2**-32 to 2**32. With a small one the function is nearly linear, with a
            large one nearly a ReLU. Default: 1.
        constraint: How the two factors become one. None leaves each ideal. Default: `"gmean"`.

    Raises:
        ArgumentError: `approximate`, `mult` or `constraint` is not allowed.
        UnsupportedTensorError: The tensor is not floating point.

    >>> gelu(torch.tensor([1.0]), constraint=None)
    tensor([1.4311])
    """
    one_of("gelu", "approximate", approximate, ("none", "tanh"), remedy="Use 'none'.")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return _activation("gelu", name, lambda x: F.gelu(x, approximate=approximate), input, mult, constraint)


def silu(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """Return `torch.nn.functional.silu` of `mult * input` at unit scale.

    Arguments and errors are those of `gelu`.
    """
    return _activation("silu", "silu", F.silu, input, mult, constraint)


def relu(input: Tensor, *, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """Return `torch.nn.functional.relu` at unit scale.

    The factors are sqrt(2 / (1 - 1/pi)) forward and sqrt(2) backward. A multiplier would change nothing, so there is
    none. The other arguments and the errors are those of `gelu`.
    """
    return apply_checked("relu", F.relu, RELU, constraint, input=input)


def tanh(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """Return `torch.tanh` of `mult * input` at unit scale.

    The factors are 1.593 forward and 1.467 backward if `mult` is 1. Arguments and errors are those of `gelu`.
    """
    return _activation("tanh", "tanh", torch.tanh, input, mult, constraint)


def sigmoid(input: Tensor, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> Tensor:  # noqa: A002
    """Return `torch.sigmoid` of `mult * input` at unit scale.

    The factors are 4.801 forward and 4.723 backward if `mult` is 1. The values keep their mean, one half times the
    factor: their deviation from it is at unit scale. Arguments and errors are those of `gelu`.
    """
    return _activation("sigmoid", "sigmoid", torch.sigmoid, input, mult, constraint)


def silu_glu(
    input: Tensor,  # noqa: A002  (torch's name)
    gate: Tensor,
    *,
    mult: float = 1.0,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return ``input * silu(mult * gate)`` at unit scale, as in SwiGLU.

    The factors are 1.677 forward and for the input's gradient, and 1.623 for the gate's, if `mult` is 1.

    Args:
        input: Floating-point tensor that passes the gate.
        gate: Floating-point tensor of the same shape.
        mult: Multiplies the gate first. From 2**-32 to 2**32. Default: 1.
        constraint: How the three factors become one. None leaves each ideal. Default: `"gmean"`.

    Raises:
        ArgumentError: The shapes differ, or `mult` or `constraint` is not allowed.
        UnsupportedTensorError: A tensor is not floating point.
    """
    check_floating("silu_glu", input=input, gate=gate)
    if input.shape != gate.shape:
        raise ArgumentError(
            f"silu_glu: expected input and gate of one shape; got {tuple(input.shape)} and {tuple(gate.shape)}. Expand "
            "one of them first, if that is meant."
        )
    mult = check_mult("silu_glu", mult)

    def function(x: Tensor, g: Tensor) -> Tensor:
        return x * F.silu(times(g, mult))

    return apply_checked("silu_glu", function, gated("silu", mult), constraint, input=input, gate=gate)


def dropout(
    input: Tensor,  # noqa: A002  (torch's name)
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    constraint: Constraint | None = "gmean",
) -> Tensor:
    """Return `torch.nn.functional.dropout` at unit scale.

    Without training it is the input itself. The factor is sqrt(1 - p) both ways. Both ideal factors are the same
    number, so every constraint gives the same.

    Args:
        input: Floating-point tensor.
        p: Probability that a value is dropped, from 0 to 1. Default: 0.5.
        training: Whether values are dropped. Default: True.
        inplace: Must be False, since the result has another scale than its input.
        constraint: Accepted as in the other functions. Default: `"gmean"`.

    Raises:
        ArgumentError: `p` is no probability, `inplace` is True, or `constraint` is unknown.
        UnsupportedTensorError: The tensor is not floating point.
    """
    check_floating("dropout", input=input)
    check_constraint("dropout", constraint)
    check_probability("dropout", p)
    check_not_inplace("dropout", inplace)
    factor = formulas.dropout(p) if training else 1.0
    return multiplied(F.dropout(input, p, training), factor, factor)


def _activation(
    operation: str,
    name: str,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    mult: float,
    constraint: Constraint | None,
) -> Tensor:
    check_floating(operation, input=x)
    mult = check_mult(operation, mult)

    def multiplied_first(x: Tensor) -> Tensor:
        return function(times(x, mult))

    return apply_checked(operation, multiplied_first, nonlinear(name, mult), constraint, input=x)


# -- normalizations: factors only for parameters' gradients ------------------------------------------------------------


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
