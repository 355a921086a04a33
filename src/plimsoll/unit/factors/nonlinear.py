"""Ideal factors of functions of one number, integrated over normal values.

For x normal they are ``1 / std f(m x)`` forward, about the mean, and ``1 / sqrt(E (m f'(m x))^2)`` backward.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plimsoll.unit.factors.formulas import RELU, Factors

Reals = NDArray[np.float64]
# The trapezoid rule converges faster than any power for smooth functions times a normal density. So many points give 12
# digits.
_X = np.linspace(-12.0, 12.0, 16_001)
_DENSITY = np.exp(-(_X**2) / 2) / math.sqrt(2 * math.pi) * (_X[1] - _X[0])


def _erf(x: Reals) -> Reals:
    return np.array([math.erf(value) for value in x])


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
    value, slope = _FUNCTIONS[name](mult * _X)
    mean = float(value @ _DENSITY)
    variance, squared = float((value - mean) ** 2 @ _DENSITY), float((mult * slope) ** 2 @ _DENSITY)
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
    value, slope = _FUNCTIONS[name](mult * _X)
    squared, steep = float(value**2 @ _DENSITY), float((mult * slope) ** 2 @ _DENSITY)
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
