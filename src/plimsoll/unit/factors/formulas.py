"""Ideal factors of operations as functions of shapes, and their constraints.

An ideal factor makes one tensor's scale 1 if all incoming tensors have scale 1 and are independent: normal values, mean
zero, variance one. Forward, the scale is the standard deviation about the mean. Backward, the incoming gradient has
mean zero and is independent of the values, so the scale is the root of the second moment.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from plimsoll.checks import one_of

Constraint = Literal["gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale"]
_NAMES: tuple[str, ...] = get_args(Constraint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of an operation's output, inputs' gradients, and parameters.

    Args:
        output: Multiplies the output.
        inputs: Multiply the gradients of the inputs.
        weight: Multiplies the gradients of weight and bias. Default: ``rows ** -1/2`` of the batch at run time.
        moment: Root mean square of the input, 1 if its mean is 0. The weight's gradient is divided by it too.

    >>> linear(256, 64)
    Factors(output=0.0625, inputs=(0.125,), weight=None, moment=1.0)
    """

    output: float
    inputs: tuple[float, ...]
    weight: float | None = None
    moment: float = 1.0


# Sizes may be a compiler's symbols, so they are only multiplied, divided and raised to powers.
def root(terms: float) -> float:
    """Return ``terms ** -1/2``, the factor of a sum of independent terms.

    >>> root(16), root(0)
    (0.25, 1.0)
    """
    return terms**-0.5 if terms else 1.0


def linear(fan_in: int, fan_out: int) -> Factors:
    """Return the factors of a product with a weight of (fan_out, fan_in)."""
    return Factors(output=root(fan_in), inputs=(root(fan_out),))


def readout(fan_in: int, fan_out: int) -> Factors:
    """Return the factors of a model's last product."""
    # The forward factor is fan_in ** -1, u-muP's rule, so that outputs start small at any width.
    return Factors(output=1 / fan_in if fan_in else 1.0, inputs=(root(fan_out),))


def matmul(inner: int, left: int, right: int, out: int) -> Factors:
    """Return the factors of a product that sums over `inner`.

    The other arguments count the elements of both operands and of the result. An element of an operand receives
    ``out * inner / its elements`` gradients, for any broadcasting.

    >>> matmul(64, 8 * 64, 64 * 16, 8 * 16)  # (8, 64) by (64, 16)
    Factors(output=0.125, inputs=(0.25, 0.35...), weight=None, moment=1.0)
    """
    return Factors(
        output=root(inner), inputs=tuple(root(out * inner / size) if size else 1.0 for size in (left, right))
    )


def convolution(fan_in: int, fan_out: int, stride: int = 1) -> Factors:
    """Return the factors of a convolution, at positions away from the border.

    Args:
        fan_in: Terms of one output value: input channels of its group times the kernel's size.
        fan_out: Terms of one input's gradient without a stride: output channels of its group times the kernel's size.
        stride: Product of the strides, each of which skips terms of the gradient. Default: 1.
    """
    return Factors(output=root(fan_in), inputs=(root(fan_out / stride),))


def total(weights: tuple[float, ...], spread: tuple[float, ...]) -> Factors:
    """Return the factors of a weighted sum of independent terms.

    Args:
        weights: Weights, already divided by their norm.
        spread: Number of elements of the sum that one element of each term goes to, 1 without broadcasting.
    """
    return Factors(output=1.0, inputs=tuple(root(n) / abs(w) for w, n in zip(weights, spread, strict=True)))


def embedding(vocabulary: int, looked_up: int) -> float:
    """Return the factor of a table's gradient, by the look-ups of an average row."""
    return root(looked_up / vocabulary) if vocabulary else 1.0


def cross_entropy(classes: int) -> float:
    """Return the factor of the logits' gradient for s equally likely classes."""
    return classes / (classes - 1) ** 0.5 if classes > 1 else 1.0


# The gradient is 2 (x - y), and x - y has variance 2.
MSE = 8**-0.5
RELU = Factors(output=math.sqrt(2 / (1 - 1 / math.pi)), inputs=(math.sqrt(2.0),))
# Probability minus label is one half either way if both labels are equally likely.
BINARY = 2.0


def nll(classes: int) -> float:
    """Return the factor of a log-likelihood's gradient, -1 for one class in a row."""
    return classes**0.5 if classes else 1.0


def dropout(p: float) -> float:
    """Return the factor of both directions for a share p of dropped values."""
    return (1 - p) ** 0.5 if p < 1 else 1.0


def average_pool(window: int, stride: int) -> Factors:
    """Return the factors of a mean over a window, of which strides overlap some."""
    return Factors(output=window**0.5, inputs=((window * stride) ** 0.5,))


def maximum_pool(deviation: float, stride: int) -> Factors:
    """Return the factors of a maximum. One input in `stride` gets a gradient."""
    return Factors(output=1 / deviation, inputs=(stride**0.5,))


def softmax(length: int, mult: float, spread: float, slope: float) -> Factors:
    """Return the factors of a softmax with these moments (`softmax_moments`)."""
    return Factors(output=(length / spread) ** 0.5, inputs=((length / slope) ** 0.5 / mult,))


def log_softmax(length: int, mult: float, spread: float, variance: float) -> Factors:
    """Return the factors of a log-softmax, whose logarithms have this `variance`.

    Backward, a gradient loses the part along the probabilities.
    """
    return Factors(output=variance**-0.5, inputs=((1 - 1 / length + spread) ** -0.5 / mult,))


def attention(
    score: float, value_width: int, rows_per_key: float, keep: float, squares: float, slope: float, weighted: float
) -> Factors:
    """Return the factors of attention: of its output, query, key and value.

    Args:
        score: Multiplies the products of queries and keys.
        value_width: Width of the values.
        rows_per_key: Number of queries for each key.
        keep: Share of weights that dropout leaves.
        squares: Moment of `softmax_moments.attention_curves`.
        slope: Moment of `softmax_moments.attention_curves`.
        weighted: Moment of `softmax_moments.attention_curves`.
    """
    squares, slope, weighted = squares / keep, slope / keep, weighted / keep
    per_score = score * value_width**0.5
    query, key = per_score * slope**0.5, per_score * (weighted * rows_per_key) ** 0.5
    return Factors(output=squares**-0.5, inputs=(1 / query, 1 / key, (squares * rows_per_key) ** -0.5))


# An edge of the graph that is no cut edge has other paths around it. If its gradient had another factor than its value,
# the paths would add up in wrong proportions: a wrong gradient, not a scaled one. So a constraint makes the factors of
# such an operation one number.
def constrained(constraint: Constraint | None, output: float, *inputs: float) -> tuple[float, ...]:
    """Return the factors ``(output, *inputs)`` under a constraint: one number.

    With None they are unchanged.

    Args:
        constraint: `"gmean"`, `"hmean"` or `"amean"` take the geometric, harmonic or arithmetic mean of all factors.
            `"to_output_scale"` takes that of the output, `"to_grad_input_scale"` that of the first input's gradient.
        output: Ideal factor forward, above zero.
        inputs: Ideal factors of the inputs' gradients.

    Raises:
        ArgumentError: The constraint is unknown.

    >>> constrained("gmean", 0.25, 1.0), constrained(None, 0.25, 1.0), constrained("to_output_scale", 0.25, 1.0)
    ((0.5, 0.5), (0.25, 1.0), (0.25, 0.25))
    """
    check_constraint("constrained", constraint)
    factors = (output, *inputs)
    if constraint is None or not inputs:
        return factors
    return (_shared(constraint, factors),) * len(factors)


def check_constraint(operation: str, constraint: object) -> None:
    """Raise an error for an unknown constraint."""
    remedy = "Use 'gmean' if other paths lead around the operation, None if there are none."
    one_of(operation, "constraint", constraint, (None, *_NAMES), remedy=remedy)


def _shared(constraint: Constraint, factors: tuple[float, ...]) -> float:
    if constraint == "to_output_scale":
        return factors[0]
    if constraint == "to_grad_input_scale":
        return factors[1]
    if constraint == "hmean":
        return len(factors) / sum(1 / factor for factor in factors)
    if constraint == "amean":
        return sum(factors) / len(factors)
    # Products and powers only, since a compiler may keep the factors as symbols, which have no logarithm.
    return cast("float", math.prod(factors) ** (1 / len(factors)))
