"""The comparison of spectra that tests use: another order of adding passes, another value does not."""

import dataclasses
import math

import torch

from plimsoll.spectrum import Spectrum, measure
from tests.support.spectra import same


def moved(s: Spectrum, name: str, ulps: int) -> Spectrum:
    value = getattr(s, name)
    for _ in range(ulps):
        value = math.nextafter(value, math.inf)
    return dataclasses.replace(s, **{name: value})


def test_sums_may_differ_by_their_rounding_and_nothing_else_may() -> None:
    s = measure(torch.randn(100))
    for name in ("abssum", "sumsq", "sumfourth"):
        assert same(s, moved(s, name, 1)) and not same(s, moved(s, name, 1000))
    for name in ("min", "max", "absmin", "absmax"):
        assert not same(s, moved(s, name, 1))
    assert not same(s, dataclasses.replace(s, zeros=1, count=101))
