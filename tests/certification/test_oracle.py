"""What certificates compare with, next to references of their own: exact rational arithmetic and the specifications."""

import bisect
import math
from fractions import Fraction

import numpy as np
import pytest

from plimsoll.certification.blocks import RULES, blocks, expected_scales
from plimsoll.certification.elements.observed import Batch, Observed, inputs
from plimsoll.formats import BLOCKS, BlockFormat, get, get_element
from tests.support.cases import each
from tests.support.formats import scalar_reference as scalar


@each("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e5m2fnuz"])
def test_neighbours_and_classes_of_every_input(name: str) -> None:
    fmt, spec = get_element(name, "test"), scalar.CATALOGUE[name]
    tried = inputs(fmt, "bfloat16")
    y = np.zeros(len(tried.values))
    batch = Batch(
        carrier="bfloat16", dtype="float32", bits=tried.bits, x=tried.values, y=y, failed=y != 0, error=""
    )  # fmt: skip
    observed = Observed(fmt, [batch])
    table = sorted(v for v in (scalar.decode(spec, c) for c in range(2 ** (spec.bits - 1))) if math.isfinite(v))
    step = table[-1] - table[-2]
    expected = observed.expected("nearest_even", True)
    for index in np.random.default_rng(0).choice(len(tried.values), 1000, replace=False):
        x = float(tried.values[index])
        if not math.isfinite(x):
            assert observed.inf[index] == math.isinf(x) and observed.nan[index] == math.isnan(x)
            continue
        place = bisect.bisect_right(table, abs(x)) - 1
        below, above = table[place], [*table, table[-1] + step][place + 1]
        assert (observed.lower[index], observed.upper[index]) == (below, above)
        fraction = (Fraction(abs(x)) - Fraction(below)) / (Fraction(above) - Fraction(below))
        assert float(observed.fraction[index]) == float(fraction)
        in_range, half = abs(x) <= table[-1], Fraction(1, 2)
        assert observed.exact[index] == (in_range and fraction == 0)
        assert observed.tie[index] == (in_range and fraction == half)
        comes_back = fraction < half or (fraction == half and place % 2 == 0)
        assert observed.top[index] == (not in_range and comes_back)
        assert observed.overflow[index] == (not in_range and not comes_back)
        assert float(expected[index]) == scalar.round_value(spec, x, "nearest_even", saturate=True)


@pytest.mark.parametrize("fmt", [fmt for fmt in BLOCKS if not fmt.scale.signed], ids=lambda fmt: fmt.name)
@each("rule", RULES)
def test_scales_of_every_rule(fmt: BlockFormat, rule: str) -> None:
    element = scalar.CATALOGUE[fmt.element.name]
    for carrier in ("float32", "bfloat16"):
        absmax = blocks(fmt, carrier).absmax
        found = expected_scales(fmt, rule, absmax)
        for value, scale in zip(absmax[::3], found[::3], strict=True):
            exponent = scalar.mx_scale_exponent(Fraction(float(value)), element, rule)
            assert Fraction(float(scale)) == scalar.two(exponent), (float(value), rule)


def test_nvfp4_scales() -> None:
    fmt = get("nvfp4")
    absmax = blocks(fmt, "float32").absmax
    for rule in ("floor", "ceil"):
        for value, scale in zip(absmax, expected_scales(fmt, rule, absmax), strict=True):
            assert scale == scalar.quantize_nvfp4([float(value)], 1.0, rule).scale


@pytest.mark.parametrize("name", ["e4m3", "fp16"])
def test_boundaries_have_every_value_and_tie_with_its_neighbours(name: str) -> None:
    fmt = get_element(name, "test")
    tried = set(inputs(fmt, "float32").values.tolist())
    values = fmt.decode(np.arange(fmt.max_code + 1))
    ties = (values[1:] + values[:-1]) / 2
    for value in (*values[::7], *ties[::7], fmt.overflow_threshold):
        single = np.float32(value)
        assert {float(single), float(np.nextafter(single, np.float32(np.inf))), float(-single)} <= tried
