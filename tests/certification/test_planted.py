"""Planted deviations: each is found, named by its row, inferred rightly, and no other row deviates."""

import math

from plimsoll.certification import certify
from plimsoll.certification.requirements import REQUIREMENTS
from tests.support.cases import each
from tests.support.certification.block_faults import BLOCKS
from tests.support.certification.cast_faults import CASTS
from tests.support.certification.code_faults import CODES
from tests.support.certification.planted import Planted
from tests.support.certification.reduction_faults import REDUCTIONS

PLANTED = [*CASTS, *BLOCKS, *CODES, *REDUCTIONS]
_NO_LIMIT = 1e6  # seconds: a busy machine tries as much as an idle one


@each("planted", PLANTED, ids=lambda planted: planted.id)
def test_a_planted_deviation_is_named(planted: Planted) -> None:
    found = certify(planted.function, planted.fmt, kind=planted.kind, seconds=_NO_LIMIT, **planted.arguments)
    assert sorted(row.requirement for row in found.deviations) == sorted(planted.rows), str(found)
    assert {row.requirement for row in found.rows if row.status == "refuses"} == {*planted.refused}
    assert found.conforms == (not planted.rows)
    assert {name: found.inferred[name] for name in planted.inferred} == planted.inferred
    assert [example.requirement for example in found.counterexamples] == [r.requirement for r in found.deviations]
    if planted.example is not None:
        example = found.row(planted.rows[0]).counterexample
        assert example is not None
        assert same((example.input, example.expected, example.got), planted.example), str(example)


def same(found: object, expected: object) -> bool:
    """Equality in which a NaN equals a NaN and -0 does not equal +0."""
    if isinstance(found, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, float) and isinstance(expected, float):
        return (math.isnan(found) and math.isnan(expected)) or repr(found) == repr(expected)
    return found == expected


def test_every_row_is_named_by_a_planted_deviation() -> None:
    """A row that no fault can reach would be a check that cannot fail."""
    named = {planted.rows[0] for planted in PLANTED if planted.rows} | {r for p in PLANTED for r in p.refused}
    assert set(REQUIREMENTS) - named == set()
