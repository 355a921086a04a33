"""The first way to find a format out: numbers go into `plimsoll.cast`, and what comes back tells."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plimsoll.rounding import cast
from plimsoll_lab.experiments.formats.published_facts import Fact

_Into = Callable[[Tensor], Tensor]
_POWERS = torch.ldexp(torch.ones(2098, dtype=torch.float64), torch.arange(-1074, 1024))  # all that FP64 holds


def by_cast(fact: Fact, device: str) -> float:
    """The figure, by casting float64 values to the format and looking at what is left of them."""

    def into(values: Tensor) -> Tensor:
        return cast(values.to(device), fact.format).cpu()

    if fact.asks == "rounds":
        return float(into(torch.tensor([fact.value], dtype=torch.float64)))
    return float(_ANSWERS[fact.asks](into))


def _largest(into: _Into) -> Tensor:
    """Of the powers of two with all places of the mantissa set, the largest that is kept."""
    full = _POWERS * (2 - 2.0 ** -_mantissa(into))
    return full[(into(full) == full) & full.isfinite()].max()


def _smallest(into: _Into) -> Tensor:
    powers = into(_POWERS)
    return powers[powers > 0].min()


def _flushed(into: _Into) -> Tensor:
    """Zero where every power is kept."""
    return torch.where(into(_POWERS) == 0, _POWERS, 0.0).max()


def _swallowed(into: _Into) -> Tensor:
    small = _POWERS[_POWERS <= 0.5]
    return small[into(1 + small) == 1].max()


def _exponent(into: _Into) -> float:
    """Two codes of the exponent stand for zero with the subnormals, and for Inf with NaN."""
    return math.log2(len(_normal(into)) + 2)


def _mantissa(into: _Into) -> int:
    """The last place of 1: 1 + 2^-k is kept up to it."""
    steps = torch.ldexp(torch.ones(52, dtype=torch.float64), -torch.arange(1, 53))
    return int((into(1 + steps) == 1 + steps).sum())


def _normal(into: _Into) -> Tensor:
    """The powers of two that are kept with the last place set."""
    odd = _POWERS * (1 + 2.0 ** -_mantissa(into))
    # Where float64 itself has no place left for the last one, the product is the power again: subnormal there.
    return _POWERS[(into(odd) == odd) & (odd != _POWERS) & odd.isfinite()]


_ANSWERS: Mapping[str, Callable[[_Into], Tensor | float]] = {
    "max": _largest,
    "smallest": _smallest,
    "smallest_normal": lambda into: _normal(into).min(),
    "flushed": _flushed,
    "swallowed": _swallowed,
    "exponent_bits": _exponent,
    "mantissa_bits": _mantissa,
    "bits": lambda into: 1 + _exponent(into) + _mantissa(into),
}
