"""Sums and products of a known order and accumulator, step by step in Python, with planted faults.

Every accumulator is exact until it is rounded: float64 holds the sum of two of its values, as long as these are
fewer than 53 binades apart; what is farther apart is rounded by hand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
Add = Callable[[Array, Array], Array]


def rounded(values: Array, bits: int, *, cut_off: bool = False, largest: float = math.inf) -> Array:
    """Values in so many bits: to nearest even, or cut off; beyond the largest one infinite."""
    mantissa, exponent = np.frexp(values)
    scaled = np.ldexp(mantissa, bits)
    whole = np.trunc(scaled) if cut_off else np.rint(scaled)
    found = np.where(np.isfinite(values), np.ldexp(whole, exponent - bits), values)
    return np.where(np.abs(found) > largest, np.copysign(math.inf, found), found)


@dataclass(frozen=True, kw_only=True)
class Accumulator:
    """Addition in so many bits."""

    bits: int = 24
    cut_off: bool = False
    largest: float = math.inf

    def __call__(self, a: Array, b: Array) -> Array:
        if a.size == b.size == 1:
            total = self._of_two(a.item(), b.item())
            if total is not None:
                return np.full(a.shape, total)
        with np.errstate(invalid="ignore"):
            total = a + b
            lost = b - (total - a)  # what float64 itself lost of the smaller one
            # One bit below the last one is enough to know to which side it was.
            nudged = np.where(lost != 0, np.nextafter(total, np.copysign(math.inf, lost)), total)
        return rounded(np.where(self.bits < 53, nudged, total), self.bits, cut_off=self.cut_off, largest=self.largest)

    def _of_two(self, a: float, b: float) -> float | None:
        """Return the sum of two numbers, which is faster than of arrays; None near Inf and for NaN."""
        total = a + b
        if total == 0 or self.bits == 53:
            return total
        lost = b - (total - a)
        if not abs(total) < 2.0**1000 or not math.isfinite(lost):
            return None
        mantissa, exponent = math.frexp(math.nextafter(total, math.copysign(math.inf, lost)) if lost else total)
        scaled = math.ldexp(mantissa, self.bits)
        whole = math.trunc(scaled) if self.cut_off else round(scaled)
        found = math.ldexp(whole, exponent - self.bits)
        return math.copysign(math.inf, found) if abs(found) > self.largest else found


IN_FP32, IN_FP16, IN_BF16 = Accumulator(), Accumulator(bits=11, largest=65504.0), Accumulator(bits=8)
IN_FP64 = Accumulator(bits=53)


def in_turn(terms: Sequence[Array], add: Add) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


def backward(terms: Sequence[Array], add: Add) -> Array:
    return in_turn(terms[::-1], add)


def pairwise(terms: Sequence[Array], add: Add) -> Array:
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return add(pairwise(terms[:half], add), pairwise(terms[half:], add))


def in_lanes(lanes: int, outer=in_turn) -> Callable[[Sequence[Array], Add], Array]:
    return lambda terms, add: outer([in_turn(terms[lane::lanes], add) for lane in range(min(lanes, len(terms)))], add)


def in_blocks(size: int, inner=in_turn) -> Callable[[Sequence[Array], Add], Array]:
    return lambda terms, add: in_turn([inner(terms[i : i + size], add) for i in range(0, len(terms), size)], add)


def kahan(terms: Sequence[Array], add: Add) -> Array:
    total, lost = np.zeros_like(terms[0]), np.zeros_like(terms[0])
    for term in terms:
        y = add(term, -lost)
        t = add(total, y)
        lost, total = add(add(t, -total), -y), t
    return total


@dataclass(frozen=True, kw_only=True)
class Summation:
    """A sum: right by default, in FP32 and one term after another."""

    order: Callable[[Sequence[Array], Add], Array] = in_turn
    add: Add = IN_FP32
    product: Callable[[Array], Array] = lambda terms: terms
    dtype: torch.dtype = torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.of(x.double().numpy()[:, None]))).reshape(()).to(self.dtype)

    def of(self, terms: Array) -> Array:
        """Return the sums along the first axis."""
        if not len(terms):
            return np.zeros(terms.shape[1:])
        return self.order(list(self.product(terms)), self.add)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product, one term after another: right by default, in FP32 with exact products."""

    accumulate: type = np.float32
    operand: Callable[[Tensor], Tensor] = lambda values: values
    product: Callable[[Array], Array] = lambda term: term

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.operand(a.double()).numpy(), self.operand(b.double()).numpy()
        total = np.zeros((a.shape[0], b.shape[1]), self.accumulate)
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(a.shape[1]):
                total = (total + self.product(left[:, k, None] * right[k])).astype(self.accumulate)
        return torch.from_numpy(total)
