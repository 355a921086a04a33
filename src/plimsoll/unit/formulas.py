"""Ideal factors of operations: functions of shapes, integrals, and constraints.

An ideal factor makes one tensor's scale 1 if all incoming tensors have scale 1 and are independent: normal values, mean
zero, variance one. Forward, the scale is the standard deviation about the mean. Backward, the incoming gradient has
mean zero and is independent of the values, so the scale is the root of the second moment.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

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

    `fan_in` counts the terms of one output value: input channels of its group times the kernel's size. `fan_out` counts
    those of one input's gradient: output channels of its group times the kernel's size. Of these `stride`, a product of
    strides, skips some.
    """
    return Factors(output=root(fan_in), inputs=(root(fan_out / stride),))


def total(weights: tuple[float, ...], spread: tuple[float, ...]) -> Factors:
    """Return the factors of a weighted sum of independent terms.

    Weights are divided by their norm already. `spread` has the number of elements of the sum that one element of each
    term goes to, 1 without broadcasting.
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
    """Return the factors of a softmax with these moments (`moments`)."""
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

    `score` multiplies the products of queries and keys, and `keep` is the share of weights that dropout leaves. The
    last three are the moments of `attention_curves`.
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

    With None they are unchanged. `"gmean"`, `"hmean"` and `"amean"` take the geometric, harmonic or arithmetic mean of
    all factors, which are above zero. `"to_output_scale"` takes that of the output, `"to_grad_input_scale"` that of the
    first input's gradient.

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


# -- functions of one number, integrated over normal values ------------------------------------------------------------

# For x normal they are ``1 / std f(m x)`` forward, about the mean, and ``1 / sqrt(E (m f'(m x))^2)`` backward.

Reals = NDArray[np.float64]
# The trapezoid rule converges faster than any power for smooth functions times a normal density. So many points give 12
# digits.
_X = np.linspace(-12.0, 12.0, 16_001)
_DENSITY = np.exp(-(_X**2) / 2) / math.sqrt(2 * math.pi) * (_X[1] - _X[0])
# As many, dense around 0: there the slopes of f(m x) are no wider than 1 / m.
_U = np.linspace(-22.0, 22.0, 16_001)
_DENSE = 12 * np.sinh(_U) / math.sinh(22)
_DENSE_DENSITY = np.exp(-(_DENSE**2) / 2) / math.sqrt(2 * math.pi) * 12 * np.cosh(_U) / math.sinh(22) * (_U[1] - _U[0])


def _nodes(mult: float) -> tuple[Reals, Reals]:
    """Return the points and weights for a function of ``m x``."""
    return (_X, _DENSITY) if mult <= _SHARP else (_DENSE, _DENSE_DENSITY)


def _erf(x: Reals) -> Reals:
    return np.vectorize(math.erf)(x)


def _gelu(x: Reals) -> tuple[Reals, Reals]:
    below = (1 + _erf(x / math.sqrt(2))) / 2
    return x * below, below + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Reals) -> tuple[Reals, Reals]:
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t**2) / 2 * c * (1 + 3 * 0.044715 * x**2)


def _silu(x: Reals) -> tuple[Reals, Reals]:
    s = (1 + np.tanh(x / 2)) / 2
    return x * s, s * (1 + x * (1 - s))


def _tanh(x: Reals) -> tuple[Reals, Reals]:
    t = np.tanh(x)
    return t, 1 - t**2


def _sigmoid(x: Reals) -> tuple[Reals, Reals]:
    s = (1 + np.tanh(x / 2)) / 2
    return s, s * (1 - s)


_FUNCTIONS: dict[str, Callable[[Reals], tuple[Reals, Reals]]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
}


@functools.cache
def nonlinear(name: str, mult: float = 1.0) -> Factors:
    """Return the factors of ``f(mult * x)`` for a named activation.

    >>> factors = nonlinear("gelu")
    >>> round(factors.output, 3), round(factors.inputs[0], 3)
    (1.701, 1.481)
    """
    if name == "relu":
        return Factors(output=RELU.output / mult, inputs=(RELU.inputs[0] / mult,))
    x, density = _nodes(mult)
    value, slope = _FUNCTIONS[name](mult * x)
    mean = float(value @ density)
    variance, squared = float((value - mean) ** 2 @ density), float((mult * slope) ** 2 @ density)
    return Factors(output=variance**-0.5, inputs=(squared**-0.5,))


def _relu(x: Reals) -> tuple[Reals, Reals]:
    return np.maximum(x, 0), (x > 0).astype(np.float64)


@functools.cache
def off_centre(name: str, mean: float = 0.0) -> tuple[Factors, float]:
    """Return the factors of ``f(mean + x)``, and its mean over its deviation.

    >>> factors, mean = off_centre("relu")
    >>> round(factors.output, 3), round(mean, 3)
    (1.713, 0.683)
    """
    value, slope = _relu(mean + _X) if name == "relu" else _FUNCTIONS[name](mean + _X)
    centre, squared = float(value @ _DENSITY), float(slope**2 @ _DENSITY)
    deviation = float((value - centre) ** 2 @ _DENSITY) ** 0.5
    return Factors(output=1 / deviation, inputs=(squared**-0.5,)), centre / deviation


@functools.cache
def gated(name: str, mult: float = 1.0) -> Factors:
    """Return the factors of ``x * f(mult * g)``: output, gradients of x and g."""
    x, density = _nodes(mult)
    value, slope = _FUNCTIONS[name](mult * x)
    squared, steep = float(value**2 @ density), float((mult * slope) ** 2 @ density)
    return Factors(output=squared**-0.5, inputs=(squared**-0.5, steep**-0.5))


@functools.cache
def largest(count: int) -> float:
    """Return the standard deviation of the largest of so many normal values.

    >>> round(largest(2) ** 2, 6) == round(1 - 1 / math.pi, 6)
    True
    """
    density = count * _DENSITY * ((1 + _erf(_X / math.sqrt(2))) / 2) ** (count - 1)
    mean = float(_X @ density)
    return math.sqrt(float((_X - mean) ** 2 @ density))


# -- moments of a softmax of normal values: exact, and as curves over the length ---------------------------------------

# For x_i normal and independent, ``p_i = exp(m x_i) / Z`` with ``Z = sum exp(m x_i)``. Since ``Z^-j`` is the integral
# of ``t^(j-1) exp(-t Z) / (j-1)!`` over t, the mean of a product of probabilities is one integral of products of
# ``phi_j(t) = E exp(j m x - t exp(m x))``. No step is asymptotic: two classes are as exact as a million.

Curve = tuple[float, ...]

LONGEST = 2**20  # the curves are fitted from 2 to here
_DEGREE = 10
_FACTORIALS = (1.0, 1.0, 1.0, 2.0, 6.0)
_GRID = np.linspace(-10.0, 10.0, 321)
_GRID_DENSITY = np.exp(-(_GRID**2) / 2) / math.sqrt(2 * math.pi) * (_GRID[1] - _GRID[0])
_SHARP, _SHARPEST = 8.0, 2.0**20  # multipliers above which the integrals are taken otherwise, or extrapolated
_BUMP = np.linspace(-42.0, 4.0, 185)  # where exp(j v - exp(v)) is no rounding error
_LENGTHS = np.unique(np.round(np.geomspace(2, LONGEST, 33)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of the probabilities of one softmax."""

    squares: float  # mean of ``sum p_i^2``, one over the number of classes that count
    spread: float  # `squares` - 1/n, n times the variance of a probability
    slope: float  # mean of ``sum_ij (dp_i / d(m x_j))^2``, the second moment that a unit gradient becomes


def moments(length: int, mult: float) -> Moments:
    """Return a softmax's moments, with a relative error below 1e-6.

    >>> round(moments(2, 1.0).squares, 4), round(moments(65536, 1.0).squares * 65536, 3)  # e for many
    (0.6368, 2.718)
    """
    squares, slope = (float(v[0]) for v in _integrals(np.array([float(length)]), mult))
    return Moments(squares=squares, spread=squares - 1 / length, slope=slope)


def log_variance(lengths: Reals, mult: float) -> Reals:
    """Return the variance of ``log p_i`` about its mean, at each length."""
    # The variance is `m^2 (1 - 2/n)` plus the variance of `log Z`. For an exponential variable T, `P(log T - log Z >
    # u)` is `phi_0(e^u)^n`, and log T alone has a variance of pi^2 / 6.
    points = 1200 + math.ceil(300 * min(mult, _SHARP))
    log_t = np.linspace(-10 * mult - math.log(float(lengths[-1])) - 30, 10 * mult + 5, points)
    step = log_t[1] - log_t[0]
    (phi,) = _phi(log_t, mult, 0)
    survival = np.exp(lengths[:, None] * np.log(np.maximum(phi, 1e-300)))
    ends = step * (survival[:, 0] + survival[:, -1]) / 2
    first = survival.sum(1) * step - ends
    # The trapezoid rule misses step^2 / 6 where the integrand 2 (u - u_0) P begins with a slope of 2.
    second = (2 * (log_t - log_t[0]) * survival).sum(1) * step + step**2 / 6
    return mult**2 * (1 - 2 / lengths) + second - first**2 - math.pi**2 / 6


@functools.cache
def softmax_curves(mult: float) -> tuple[Curve, Curve, Curve]:
    """Return the curves of `spread`, `slope` and a logarithm's variance."""
    # Towards 0 the variances are proportional to the multiplier's square, and get lost in the integrals' rounding.
    least = max(mult, 2.0**-8)
    squares, slope = _integrals(_LENGTHS, least)
    return (
        _fitted((squares - 1 / _LENGTHS) * (mult / least) ** 2),
        _fitted(slope),
        _fitted(log_variance(_LENGTHS, least) / _LENGTHS * (mult / least) ** 2),
    )


Attention = tuple[Curve, Curve, Curve]


@functools.cache
def attention_curves(mult: float, width: int, causal: bool) -> Attention:
    """Return the curves of attention's moments, averaged over queries.

    `mult` is the scale of the scores, `width` that of the queries, which are unit normal. If causal, the average is
    over all rows, the i-th of which attends to i keys.
    """
    totals = np.zeros((3, len(_LENGTHS)))
    for length, weight in _lengths_of_normal_vectors(width):
        # The moments are those of the sum of squared weights, of the slope, and of the slope weighted by a query's
        # squared length, since long queries have sharper weights.
        squares, slope = _integrals(_LENGTHS, mult * length)
        totals += weight * np.stack([squares, slope, slope * length**2])
    if causal:
        first = (1.0, 0.0, 0.0)  # of a row with one key
        totals = np.stack([_causal(total, start) for total, start in zip(totals, first, strict=True)])
    return _fitted(totals[0]), _fitted(totals[1]), _fitted(totals[2])


def along(curve: Curve, length: float) -> float:
    """Return a curve's value at a length from 2 (or a symbol) over the length."""
    at, power = length**-0.25, 0.0
    for coefficient in curve:
        power = power * at + coefficient
    return math.e**power / length


def _integrals(lengths: Reals, mult: float) -> tuple[Reals, Reals]:
    """Return the means of ``sum p^2``, and of the slope: ``sum p^2 - 2 sum p^3 + (sum p^2)^2``."""
    # Far up one probability is 1. The slope falls as 1 / mult, and gets lost in the difference.
    at = min(mult, _SHARPEST)
    points = 40 * math.ceil(10 + 2.5 * min(at, _SHARP))
    log_t = np.linspace(-10 * at - math.log(float(lengths[-1])) - 9, 10 * at + 5, points)
    width = log_t[1] - log_t[0]
    phi = _phi(log_t, at, 0, 2, 3, 4)
    log_rest = np.log(np.maximum(phi[0], 1e-300))
    n = lengths[:, None]
    others, without_pair = np.exp((n - 1) * log_rest), np.exp((n - 2) * log_rest)
    sums = [lengths * (others @ phi[j - 1]) * width / _FACTORIALS[j] for j in (2, 3, 4)]
    pairs = lengths * (lengths - 1) * (without_pair @ phi[1] ** 2) * width / _FACTORIALS[4]
    return sums[0], (sums[0] - 2 * sums[1] + sums[2] + pairs) * (at / mult)


def _phi(log_t: Reals, mult: float, *powers: int) -> list[Reals]:
    """Return ``phi_j(t) t^j``, where no factor becomes too large, for these j."""
    if mult <= _SHARP:
        product = np.exp(np.minimum(log_t[:, None] + mult * _GRID, 14.0))  # from there on the kernel is 0
        kernel = np.exp(-product) * _GRID_DENSITY
        return [np.einsum("tx,tx->t", kernel, product**j) for j in powers]
    # As functions of x the kernels get steeper than the grid. Of ``v = m x + log t`` they are the same for every m, and
    # the density is a wide one. The step `phi_0` is integrated by parts.
    x = (_BUMP - log_t[:, None]) / mult
    density = np.exp(-(x**2) / 2) / (math.sqrt(2 * math.pi) * mult)
    below = (1 + _erf(x / math.sqrt(2))) / 2
    step = _BUMP[1] - _BUMP[0]
    return [(density if j else below) @ np.exp(max(j, 1) * _BUMP - np.exp(_BUMP)) * step for j in powers]


def _lengths_of_normal_vectors(width: int) -> list[tuple[float, float]]:
    """Return nodes and weights for a normal vector's length over sqrt(width)."""
    # Gauss's rule for a density that is sampled finely: the eigenvalues of its Jacobi matrix, by Stieltjes' recurrence.
    root = math.sqrt(width)
    r = np.linspace(max(root - 9, 1e-6), root + 9, 4001)
    log_density = (width - 1) * np.log(r) - r**2 / 2
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    r = r / root
    before, now, norm = np.zeros_like(r), np.ones_like(r), 1.0
    a: list[float] = []
    b: list[float] = [0.0]
    for _ in range(5):
        a.append(float(density @ (r * now**2)) / norm)
        before, now = now, (r - a[-1]) * now - b[-1] * before
        norm, last = float(density @ now**2), norm
        b.append(norm / last)
    off_diagonal = np.diag(np.sqrt(b[1:5]), 1)
    values, vectors = np.linalg.eigh(np.diag(a) + off_diagonal + off_diagonal.T)
    return [(float(v), float(w)) for v, w in zip(values, vectors[0] ** 2, strict=True)]


def _causal(values: Reals, first: float) -> Reals:
    """Return the mean over all lengths from 1 to each of `_LENGTHS`."""
    from scipy.interpolate import CubicSpline  # pyright: ignore[reportMissingTypeStubs]

    spline = CubicSpline(np.log(_LENGTHS), np.log(values))  # between the lengths that were integrated
    interpolated = np.exp(spline(np.log(np.arange(2, LONGEST + 1))))
    running = np.cumsum(np.concatenate([[first], interpolated]))
    return running[_LENGTHS.astype(int) - 1] / _LENGTHS


# A length may be a compiler's symbol, of which only powers can be taken. So each quantity, times the length n, is also
# a curve `exp(polynomial in n^(-1/4))`, which is fitted to the integrals once for every multiplier.
def _fitted(values: Reals) -> Curve:
    """Return the polynomial's coefficients, the highest power first."""
    at, logarithms = _LENGTHS**-0.25, np.log(values * _LENGTHS)
    return tuple(float(c) for c in np.polyfit(at, logarithms, _DEGREE))
