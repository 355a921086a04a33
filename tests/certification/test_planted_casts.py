"""Planted faults of casts: each is found, named by its row, and nothing else is."""

import math

import pytest

from plimsoll.certification import certify
from tests.support.certification.planted import CASTS, Planted


def judge(planted: Planted) -> None:
    found = certify(planted.function, planted.fmt, kind=planted.kind, **planted.arguments)
    assert sorted(row.requirement for row in found.deviations) == sorted(planted.rows), str(found)
    assert {row.requirement for row in found.rows if row.status == "refuses"} == {*planted.refused}
    assert found.conforms == (not planted.rows)
    assert {name: found.inferred[name] for name in planted.inferred} == planted.inferred
    if planted.example is not None:
        example = found.row(planted.rows[0]).counterexample
        for value, expected in zip((example.input, example.expected, example.got), planted.example, strict=True):
            assert value == expected or (math.isnan(value) and math.isnan(expected)), str(example)


@pytest.mark.parametrize("planted", CASTS, ids=lambda planted: planted.id)
def test_a_planted_fault_is_named(planted: Planted) -> None:
    judge(planted)
