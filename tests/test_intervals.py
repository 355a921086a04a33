"""`Interval` as a number: conversion, format, comparison, equality and hash."""

import copy
import math
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import plimsoll as pl
from plimsoll import ArgumentError, Interval
from tests.support.cases import each

wide = Interval(low=0.25, high=0.5, estimate=0.3)
half = Interval(low=0.5, high=0.5, estimate=0.5)
zero = Interval(low=0.0, high=0.0, estimate=0.0)
unknown = Interval(low=0.0, high=math.nan, estimate=0.0)
KINDS = [float, Fraction, Decimal, np.float16, np.float32, np.float64, np.array, torch.tensor]


def undecided(what: str = "") -> object:
    return pytest.raises(ArgumentError, match=rf"Interval: expected a comparison.*{what}.*Compare \.low or \.high")


def test_as_a_number_it_is_its_estimate() -> None:
    assert float(wide) == 0.3
    assert np.array([wide, half], dtype=float).tolist() == [0.3, 0.5]
    assert math.log2(half) == -1


def test_formats_take_the_estimate_and_text_shows_the_ends() -> None:
    assert f"{wide:.1%}" == "30.0%" and f"{wide:>8.2f}" == "    0.30"
    assert f"{wide}" == str(wide) == "0.3 (0.25 to 0.5)"
    assert f"{half}" == "0.5" and repr(wide) == "Interval(low=0.25, high=0.5, estimate=0.3)"
    assert f"{pl.measure(torch.ones(4)).fit('fp16').lost:.1%}" == "0.0%"


@each("kind", KINDS)
def test_comparison_where_every_value_of_the_interval_agrees(kind: type) -> None:
    below, low, high, above = (kind(value) for value in (0.125, 0.25, 0.5, 0.75))
    assert wide > below and wide >= below and wide >= low and wide < above and wide <= above and wide <= high
    assert not wide < below and not wide <= below and not wide < low and not wide > above and not wide > high
    assert below < wide and below <= wide and low <= wide and above > wide and above >= wide and high >= wide
    assert not below > wide and not below >= wide and not low > wide and not above < wide and not high < wide


@each("kind", KINDS)
def test_comparison_that_the_interval_does_not_decide(kind: type) -> None:
    low, inside, high = (kind(value) for value in (0.25, 0.375, 0.5))
    undecidable = [
        lambda: wide > inside, lambda: wide >= inside, lambda: wide < inside, lambda: wide <= inside,
        lambda: wide > low, lambda: wide <= low, lambda: wide < high, lambda: wide >= high,
        lambda: inside > wide, lambda: inside <= wide, lambda: low < wide, lambda: high <= wide,
        lambda: wide == inside, lambda: wide != low, lambda: high == wide,
    ]  # fmt: skip
    for ask in undecidable:
        with undecided():
            ask()


def test_the_error_shows_the_comparison() -> None:
    with undecided(r"got 0\.3 \(0\.25 to 0\.5\) > 0\.4\. "):
        wide > 0.4  # noqa: B015  (raises)


def test_arrays_compare_each_of_their_numbers() -> None:
    assert (np.array([0.1, 0.6]) < wide).tolist() == [True, False]
    assert (wide > np.array([0.1, 0.6])).tolist() == [True, False]
    with undecided():
        np.array([0.1, 0.3]) < wide  # noqa: B015  (raises)


def test_intervals_compare_where_they_do_not_overlap() -> None:
    later = Interval(low=0.5, high=0.75, estimate=0.6)
    assert wide <= later and not wide > later and zero < wide < Interval(low=0.6, high=0.7, estimate=0.65)
    assert sorted([half, zero]) == [zero, half] and max(zero, wide) is wide
    with undecided():
        wide < later  # noqa: B015  (raises)
    assert sorted([later, wide], key=float) == [wide, later]


def test_equality_with_a_number() -> None:
    assert zero == 0 and zero != 0.5 and zero == 0 and half == 0.5 and wide != 0
    assert not (wide == 0.75)  # noqa: SIM201  (== itself is tested)
    nothing = float("nan")
    assert wide != nothing
    assert nothing != zero


def test_equality_with_another_interval_is_that_of_the_fields() -> None:
    same = Interval(low=0.25, high=0.5, estimate=0.3)
    assert same == wide and hash(same) == hash(wide) and wide != Interval(low=0.25, high=0.5, estimate=0.4)
    assert pickle.loads(pickle.dumps(wide)) == copy.deepcopy(wide) == wide


def test_what_is_equal_has_one_hash() -> None:
    assert hash(zero) == hash(0) == hash(Fraction(0)) and hash(half) == hash(0.5)
    assert {0.5: "half"}[half] == "half" and half in {0.5, 1.0} and wide in {wide, half}


def test_truth_is_that_of_a_number() -> None:
    assert not zero and wide and half
    with undecided("== 0"):
        bool(Interval(low=0.0, high=0.1, estimate=0.0))


def test_nothing_is_decided_where_an_end_is_nan() -> None:
    for ask in (lambda: unknown < 5, lambda: unknown > -1, lambda: unknown == 7, lambda: bool(unknown)):
        with undecided():
            ask()
    assert math.isnan(float(Interval(low=0.0, high=1.0, estimate=math.nan)))


def test_nothing_is_above_or_below_nan() -> None:
    nothing = float("nan")
    assert not wide < nothing and not wide > nothing and not wide <= torch.tensor(nothing)


@each("other", ["0.1", None, 1j, [0.1], torch.tensor([0.1])])
def test_what_is_no_number_is_not_compared(other: object) -> None:
    with pytest.raises(TypeError, match="not supported between instances"):
        wide < other  # type: ignore[operator]  # noqa: B015  (raises)


def test_what_is_no_number_is_not_equal() -> None:
    assert wide not in ("0.3", None, [0.3])
