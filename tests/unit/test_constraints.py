"""`constrained`: which factors become one."""

import pytest

from plimsoll.errors import ArgumentError
from plimsoll.unit.formulas import constrained
from tests.support.cases import each


@each(
    ("constraint", "shared"),
    [("gmean", 2.0), ("hmean", 12 / 7), ("amean", 7 / 3), ("to_output_scale", 1.0), ("to_grad_input_scale", 4.0)],
)
def test_all_factors_become_one(constraint: str, shared: float) -> None:
    assert constrained(constraint, 1.0, 4.0, 2.0) == pytest.approx((shared,) * 3)


def test_none_leaves_them() -> None:
    assert constrained(None, 1.0, 4.0, 2.0) == (1.0, 4.0, 2.0)


@each("constraint", [None, "gmean", "to_grad_input_scale"])
def test_an_output_alone_stays(constraint: str | None) -> None:
    assert constrained(constraint, 3.0) == (3.0,)


@each("constraint", ["mean", "GMEAN", "", 1])
def test_other_names_are_refused(constraint: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"constrained: expected constraint to be None, 'gmean', 'hmean', 'amean', .*got"
    ):
        constrained(constraint, 1.0, 2.0)
