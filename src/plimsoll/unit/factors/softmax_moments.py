"""Moments of a softmax of normal values: exact, and as curves over the length.

For x_i normal and independent, ``p_i = exp(m x_i) / Z`` with ``Z = sum exp(m x_i)``. Since ``Z^-j`` is the integral of
``t^(j-1) exp(-t Z) / (j-1)!`` over t, the mean of a product of probabilities is one integral of products of
``phi_j(t) = E exp(j m x - t exp(m x))``. No step is asymptotic: two classes are as exact as a million.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Curve = tuple[float, ...]

LONGEST = 2**20  # the curves are fitted from 2 to here
_DEGREE = 10
_FACTORIALS = (1.0, 1.0, 1.0, 2.0, 6.0)
_X = np.linspace(-10.0, 10.0, 321)
_DENSITY = np.exp(-(_X**2) / 2) / math.sqrt(2 * math.pi) * (_X[1] - _X[0])
_LENGTHS = np.unique(np.round(np.geomspace(2, LONGEST, 33)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of the probabilities of one softmax.

    Attributes:
        squares: Mean of ``sum p_i^2``, one over the number of classes that count.
        spread: `squares` - 1/n, n times the variance of a probability.
        slope: Mean of ``sum_ij (dp_i / d(m x_j))^2``, the second moment that a unit gradient becomes.
    """

    squares: float
    spread: float
    slope: float


def moments(length: int, mult: float) -> Moments:
    """Return a softmax's moments, with a relative error below 1e-6.

    >>> round(moments(2, 1.0).squares, 4), round(moments(65536, 1.0).squares * 65536, 3)  # e for many
    (0.6368, 2.718)
    """
    squares, cubes, pairs = (float(v[0]) for v in _integrals(np.array([float(length)]), mult))
    return Moments(squares=squares, spread=squares - 1 / length, slope=squares - 2 * cubes + pairs)


def log_variance(lengths: Reals, mult: float) -> Reals:
    """Return the variance of ``log p_i`` about its mean, at each length."""
    # The variance is `m^2 (1 - 2/n)` plus the variance of `log Z`. For an exponential variable T, `P(log T - log Z >
    # u)` is `phi_0(e^u)^n`, and log T alone has a variance of pi^2 / 6.
    log_t = np.linspace(-10 * mult - math.log(float(lengths[-1])) - 30, 10 * mult + 5, 1200 + math.ceil(300 * mult))
    step = log_t[1] - log_t[0]
    phi = np.exp(-np.outer(np.exp(log_t), np.exp(mult * _X))) @ _DENSITY
    survival = np.exp(lengths[:, None] * np.log(np.maximum(phi, 1e-300)))
    ends = step * (survival[:, 0] + survival[:, -1]) / 2
    first = survival.sum(1) * step - ends
    # The trapezoid rule misses step^2 / 6 where the integrand 2 (u - u_0) P begins with a slope of 2.
    second = (2 * (log_t - log_t[0]) * survival).sum(1) * step + step**2 / 6
    return mult**2 * (1 - 2 / lengths) + second - first**2 - math.pi**2 / 6


@functools.cache
def softmax_curves(mult: float) -> tuple[Curve, Curve, Curve]:
    """Return the curves of `spread`, `slope` and a logarithm's variance."""
    squares, cubes, pairs = _integrals(_LENGTHS, mult)
    return (
        _fitted(squares - 1 / _LENGTHS),
        _fitted(squares - 2 * cubes + pairs),
        _fitted(log_variance(_LENGTHS, mult) / _LENGTHS),
    )


Attention = tuple[Curve, Curve, Curve]


@functools.cache
def attention_curves(mult: float, width: int, causal: bool) -> Attention:
    """Return the curves of attention's moments, averaged over queries.

    Args:
        mult: Scale of the scores.
        width: Width of the queries, which are unit normal.
        causal: Whether to average over all rows, the i-th of which attends to i keys.
    """
    totals = np.zeros((3, len(_LENGTHS)))
    for length, weight in _lengths_of_normal_vectors(width):
        # The moments are those of the sum of squared weights, of the slope, and of the slope weighted by a query's
        # squared length, since long queries have sharper weights.
        squares, cubes, pairs = _integrals(_LENGTHS, mult * length)
        slope = squares - 2 * cubes + pairs
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


def _integrals(lengths: Reals, mult: float) -> tuple[Reals, Reals, Reals]:
    """Return the means of ``sum p^2``, ``sum p^3`` and ``(sum p^2)^2``."""
    log_t = np.linspace(-10 * mult - math.log(float(lengths[-1])) - 9, 10 * mult + 5, 40 * math.ceil(10 + 2.5 * mult))
    width = log_t[1] - log_t[0]
    product = np.exp(np.minimum(log_t[:, None] + mult * _X, 14.0))  # from there on the kernel is 0; avoids overflow
    kernel = np.exp(-product) * _DENSITY
    # phi_j times t^j, so that neither becomes too large.
    phi = [kernel.sum(1)] + [np.einsum("tx,tx->t", kernel, product**j) for j in (2, 3, 4)]
    log_rest = np.log(np.maximum(phi[0], 1e-300))
    n = lengths[:, None]
    others, without_pair = np.exp((n - 1) * log_rest), np.exp((n - 2) * log_rest)
    sums = [lengths * (others @ phi[j - 1]) * width / _FACTORIALS[j] for j in (2, 3, 4)]
    pairs = lengths * (lengths - 1) * (without_pair @ phi[1] ** 2) * width / _FACTORIALS[4]
    return sums[0], sums[1], sums[2] + pairs


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
