"""The ideal factors of every operation, as functions of its shapes: numbers in, numbers out, no tensors.

An ideal factor makes one tensor's scale 1 where all tensors that come in have scale 1 and are independent: normal
values, mean zero, variance one. Forward, the scale is the standard deviation about the mean. Backward, the gradient
that comes in has mean zero and is independent of the values, so the scale is the root of the second moment.

Sizes may be a compiler's symbols, so they are only multiplied, divided and raised to powers.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What multiplies an operation's tensors: its output, the gradient of each input, those of its parameters.

    - `weight`: for the gradients of weight and bias; None: ``rows ** -1/2`` at run time, whatever batch comes.
    - `moment`: the root mean square of the input, 1 where its mean is 0: the weight's gradient is divided by it too.

    >>> linear(256, 64)
    Factors(output=0.0625, inputs=(0.125,), weight=None, moment=1.0)
    """

    output: float
    inputs: tuple[float, ...]
    weight: float | None = None
    moment: float = 1.0


def root(terms: float) -> float:
    """``terms ** -1/2``, the factor of a sum of so many independent terms; 1 where there are none.

    >>> root(16), root(0)
    (0.25, 1.0)
    """
    return terms**-0.5 if terms else 1.0


def linear(fan_in: int, fan_out: int) -> Factors:
    """A product with a weight of (fan_out, fan_in): sums over the one forward, over the other backward."""
    return Factors(output=root(fan_in), inputs=(root(fan_out),))


def readout(fan_in: int, fan_out: int) -> Factors:
    """The last product of a model: fan_in ** -1 forward, so that outputs start small at any width, alike in u-muP."""
    return Factors(output=1 / fan_in if fan_in else 1.0, inputs=(root(fan_out),))


def matmul(inner: int, left: int, right: int, out: int) -> Factors:
    """A product that sums over `inner`; the others are numbers of elements: of both operands and of the result.

    An element of an operand meets ``out * inner / its elements`` gradients, whatever is broadcast.

    >>> matmul(64, 8 * 64, 64 * 16, 8 * 16)  # (8, 64) by (64, 16)
    Factors(output=0.125, inputs=(0.25, 0.35...), weight=None, moment=1.0)
    """
    return Factors(
        output=root(inner), inputs=tuple(root(out * inner / size) if size else 1.0 for size in (left, right))
    )


def convolution(fan_in: int, fan_out: int, stride: int = 1) -> Factors:
    """A convolution, at positions away from the border.

    `fan_in` is of one output value (input channels of its group times the kernel's size), `fan_out` of one input value
    (output channels of its group times the kernel's size), of which a stride leaves one in so many.
    """
    return Factors(output=root(fan_in), inputs=(root(fan_out / stride),))


def total(weights: tuple[float, ...], spread: tuple[float, ...]) -> Factors:
    """A weighted sum of independent terms, its weights made one in norm before.

    `spread`: how many elements of the sum one of a term goes to, 1 where nothing is broadcast.
    """
    return Factors(output=1.0, inputs=tuple(root(n) / abs(w) for w, n in zip(weights, spread, strict=True)))


def embedding(vocabulary: int, looked_up: int) -> float:
    """The factor of a table's gradient: of so many gradients an average row gets looked_up / vocabulary."""
    return root(looked_up / vocabulary) if vocabulary else 1.0


def cross_entropy(classes: int) -> float:
    """The factor of the logits' gradient, probability minus one-hot: s / sqrt(s - 1) where all are equally likely."""
    return classes / (classes - 1) ** 0.5 if classes > 1 else 1.0


MSE = 8**-0.5  # the gradient is 2 (x - y), and x - y has variance 2
RELU = Factors(output=math.sqrt(2 / (1 - 1 / math.pi)), inputs=(math.sqrt(2.0),))
BINARY = 2.0  # probability less label is one half either way, where both labels are equally likely


def nll(classes: int) -> float:
    """The factor of a log-likelihood's gradient: one in so many elements is -1."""
    return classes**0.5 if classes else 1.0


def dropout(p: float) -> float:
    """The factor of both directions: what is kept was divided by 1 - p, and is one in 1 / (1 - p)."""
    return (1 - p) ** 0.5 if p < 1 else 1.0


def average_pool(window: int, stride: int) -> Factors:
    """A mean over so many; a stride leaves one mean in so many, and an input is part of window / stride."""
    return Factors(output=window**0.5, inputs=((window * stride) ** 0.5,))


def maximum_pool(deviation: float, stride: int) -> Factors:
    """The largest of some, of such a standard deviation: every gradient goes to one input, one in `stride` has one."""
    return Factors(output=1 / deviation, inputs=(stride**0.5,))


def softmax(length: int, mult: float, spread: float, slope: float) -> Factors:
    """A softmax over so many: `spread` and `slope` are its moments (`softmax_moments`)."""
    return Factors(output=(length / spread) ** 0.5, inputs=((length / slope) ** 0.5 / mult,))


def log_softmax(length: int, mult: float, spread: float, variance: float) -> Factors:
    """A log-softmax: `variance` is of a logarithm; backward a gradient loses the part along the probabilities."""
    return Factors(output=variance**-0.5, inputs=((1 - 1 / length + spread) ** -0.5 / mult,))


def attention(
    score: float, value_width: int, rows_per_key: float, keep: float, squares: float, slope: float, weighted: float
) -> Factors:
    """Attention's output, and the gradients of query, key and value.

    - `score`: what multiplies the products of queries and keys. `rows_per_key`: how many queries there are for a key.
    - `keep`: the share of weights that dropout leaves. The others: moments (`softmax_moments.attention_curves`).
    """
    squares, slope, weighted = squares / keep, slope / keep, weighted / keep
    per_score = score * value_width**0.5
    query, key = per_score * slope**0.5, per_score * (weighted * rows_per_key) ** 0.5
    return Factors(output=squares**-0.5, inputs=(1 / query, 1 / key, (squares * rows_per_key) ** -0.5))
