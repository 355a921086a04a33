"""Casts with one planted fault each, made from a table of the format's values. They share nothing with the product."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.support.formats.scalar_reference import CATALOGUE, decode

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class TableCast:
    """A cast that looks its values up: right by default, and wrong in the fields that are changed.

    `goes_up(fraction, lower_is_odd, negative)` says which values take the larger neighbour, `overflow`, `infinities`
    and `nan` what becomes of these. `before` changes the input, and `after` the result.
    """

    name: str = "e4m3"
    goes_up: Callable[[Array, Array, Array], Array] = lambda f, odd, _: (f > 0.5) | ((f == 0.5) & odd)
    overflow: float = math.nan
    infinities: float = math.nan
    nan: float = math.nan
    before: Callable[[Array], Array] = lambda x: x
    after: Callable[[Array, Array], Array] = lambda y, _: y

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.rounded(x.detach().to(torch.float64).numpy())).float()

    def rounded(self, given: Array) -> Array:
        table = _table(self.name)
        x = self.before(given)
        magnitude = np.where(np.isfinite(x), np.abs(x), 0.0)
        beyond = 2 * table[-1] - table[-2]
        ends = np.append(table, beyond)
        lower = np.minimum(np.searchsorted(table, magnitude, side="right") - 1, len(table) - 1)
        fraction = (magnitude - ends[lower]) / (ends[lower + 1] - ends[lower])
        index = lower + self.goes_up(fraction, lower % 2 == 1, np.signbit(x))
        y = np.where(index >= len(table), self.overflow, ends[np.minimum(index, len(table))])
        y = np.where(np.isinf(x), self.infinities, y)
        y = np.copysign(y, x)
        y = np.where(np.isnan(x), self.nan, y)
        return np.asarray(self.after(y, given))


@functools.cache
def _table(name: str) -> Array:
    """The format's magnitudes, ascending."""
    spec = CATALOGUE[name]
    values = [decode(spec, code) for code in range(2 ** (spec.bits - 1))]
    return np.array([value for value in values if math.isfinite(value)])


def at_random(bits: int, *, strictly: bool = True, seed: int | None = None, shared: bool = False):
    """Stochastic rounding with so many bits of noise: up where noise < fraction, or where noise <= fraction."""

    def goes_up(fraction: Array, _odd: Array, _negative: Array) -> Array:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        shape = (1,) if shared else fraction.shape
        noise = torch.randint(0, 1 << bits, shape, generator=generator).numpy() / 2.0**bits
        inside = np.floor(fraction * 2.0**bits) / 2.0**bits
        return noise < inside if strictly else noise <= inside

    return goes_up


def flushed(least: float, sign: float | None = None) -> Callable[[Array, Array], Array]:
    """Results below a magnitude become zero; with a sign, only those of that sign."""

    def after(y: Array, _: Array) -> Array:
        small = (np.abs(y) < least) & (np.sign(y) == sign if sign is not None else True)
        return np.where(small, np.copysign(0.0, y), y)

    return after


def through(dtype: torch.dtype) -> Callable[[Array], Array]:
    """Inputs are rounded to a dtype first."""
    return lambda x: torch.from_numpy(x).float().to(dtype).double().numpy()
