"""Counterexamples are the smallest: no shorter input fails, by a search that shares nothing with the product."""

import math
from fractions import Fraction

import torch

import plimsoll as pl
from plimsoll.certification.probing.arrays import shortest
from tests.support.cases import each
from tests.support.certification.cast_faults import CASTS
from tests.support.formats.scalar_reference import CATALOGUE, round_value

_BY_ID = {planted.id: planted for planted in CASTS}


def length(value: float) -> tuple[int, bool]:
    """Bits of the significand and an eighth of the distance of the exponent from that of 1; positive values first."""
    if value == 0:
        return 0, math.copysign(1, value) < 0
    numerator, denominator = abs(Fraction(value)).as_integer_ratio()
    odd = numerator >> ((numerator & -numerator).bit_length() - 1)
    exponent = math.frexp(value)[1] - 1
    assert denominator & (denominator - 1) == 0
    return 8 * odd.bit_length() + abs(exponent), value < 0


def bf16_values() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


# Each deviates in one row only, so that no other row has a shorter counterexample.
@each("name", ["subnormal results flushed", "negative subnormal results flushed", "overflow wraps", "464 becomes NaN"])
def test_no_shorter_bf16_value_fails(name: str) -> None:
    planted = _BY_ID[name]
    found = pl.certify(planted.function, planted.fmt)
    example = found.row(planted.rows[0]).counterexample
    assert example is not None and example.note.startswith("bfloat16")
    assert isinstance(example.input, float)

    spec = CATALOGUE[planted.fmt]
    x = bf16_values()
    finite = x[x.isfinite()].unique()  # -0 counts as 0 here
    candidates = sorted(finite.double().tolist(), key=length)
    shorter = [value for value in candidates if length(value) < length(example.input)]
    got = dict(zip(shorter, planted.function(torch.tensor(shorter)).tolist(), strict=True)) if shorter else {}
    for value, result in got.items():
        expected = round_value(spec, value, "nearest_even", saturate=False)
        agrees = result == expected or (math.isnan(result) and math.isnan(expected))
        assert agrees, (value, result, expected)


@each("name", [planted.id for planted in CASTS if planted.example is not None])
def test_a_counterexample_holds(name: str) -> None:
    """The reference gives what is expected, and the function gives what was got."""
    planted = _BY_ID[name]
    for example in pl.certify(planted.function, planted.fmt).counterexamples:
        if not isinstance(example.input, float) or example.requirement in ("odd-shapes", "scalar", "input-unchanged"):
            continue
        reference = [
            round_value(CATALOGUE[planted.fmt], example.input, "nearest_even", saturate=s) for s in (True, False)
        ]
        assert any(repr(value) == repr(example.expected) for value in reference), str(example)
        if not math.isnan(example.input):
            got = planted.function(torch.tensor([example.input] * 128).reshape(1, 128)).double()[0, 0].item()
            assert repr(got) == repr(example.got), str(example)


def test_certificates_are_the_same_every_time() -> None:
    planted = _BY_ID["noise of 8 bits"]
    first, second = (pl.certify(planted.function, planted.fmt).to_dict() for _ in range(2))
    for certificate in (first, second):
        del certificate["seconds"], certificate["date"]
    assert first == second


def test_the_shortest_of_several() -> None:
    import numpy as np

    assert shortest(np.array([1.3, 2.5, -2.5, 5.0, math.inf])) == 1
    assert shortest(np.array([math.nan, 2.0**100, 3.0])) == 2
    assert shortest(np.array([3.0, 3.0]), np.array([1, 0])) == 1
