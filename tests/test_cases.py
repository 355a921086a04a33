"""Cases in one test: all run, each failure has its case's name, skips and marks are those of the cases."""

import pytest
import torch

from tests.support.cases import each


def test_every_combination_runs_with_the_same_seeds() -> None:
    seen: list[tuple[int, str, float]] = []

    @each("letter", ["a", "b"])
    @each("number", [1, 2])
    def run(number: int, letter: str, extra: list[int]) -> None:
        seen.append((number, letter, torch.rand(()).item()))
        extra.append(number)

    counted: list[int] = []
    run(extra=counted)
    assert [case[:2] for case in seen] == [(1, "a"), (2, "a"), (1, "b"), (2, "b")] and counted == [1, 2, 1, 2]
    assert len({case[2] for case in seen}) == 1


def test_one_failure_is_raised_itself_and_named() -> None:
    @each("value", [1, 2, 3])
    def fails(value: int) -> None:
        assert value != 2

    with pytest.raises(AssertionError) as error:
        fails()
    assert error.value.__notes__ == ["case: value=2"]


def test_several_failures_are_all_raised_and_named() -> None:
    ran = []

    @each(("low", "high"), [(0, 1), (2, 1), (3, 1)], ids=["right", "wrong", "worse"])
    def fails(low: int, high: int) -> None:
        ran.append(low)
        assert low < high

    with pytest.raises(ExceptionGroup, match="2 of 3 cases failed") as group:
        fails()
    assert [error.__notes__ for error in group.value.exceptions] == [["case: wrong"], ["case: worse"]]
    assert ran == [0, 2, 3]


def test_a_test_is_skipped_if_all_of_its_cases_are() -> None:
    @each("value", [1, 2])
    def some(value: int) -> None:
        if value == 1:
            pytest.skip("no 1")

    @each("value", [1, 2])
    def none(value: int) -> None:
        pytest.skip("nothing")

    some()
    with pytest.raises(pytest.skip.Exception, match="nothing"):
        none()


@pytest.mark.parametrize("outer", ["x", "y"])
@each("value", [1, 2])
def test_it_stands_below_parametrize(value: int, outer: str) -> None:
    assert value in (1, 2) and outer in ("x", "y")


@each("value", [1, 2])
@pytest.mark.parametrize("inner", ["x", "y"])
def test_and_above_it(value: int, inner: str) -> None:
    assert value in (1, 2) and inner in ("x", "y")
