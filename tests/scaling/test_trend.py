"""The robust line against scipy's, what it shrugs off, and the errors that are remembered."""

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy import stats

from plimsoll.scaling.spectral.rule import ERRORS, FEW, UNKNOWN, VALUES, Trend
from tests.support.cases import each

FINITE = st.floats(-200, 200, allow_subnormal=False)


def filled(values: list[float]) -> Trend:
    trend = Trend()
    for value in values:
        trend.add(value)
    return trend


@given(st.lists(FINITE, min_size=2, max_size=VALUES))
def test_forecast_is_scipys_slope_with_the_median_of_what_is_left(values: list[float]) -> None:
    slope = stats.theilslopes(values)[0]
    intercept = np.median(np.array(values) - slope * np.arange(len(values)))
    expected = max(intercept + slope * len(values), np.median(values))
    assert filled(values).forecast == pytest.approx(expected, abs=1e-9)


def test_nothing_and_one_value() -> None:
    assert Trend().forecast is None and Trend().latest is None and len(Trend()) == 0
    assert filled([3.5]).forecast == filled([3.5]).latest == 3.5
    assert filled([0.0, 9.0, 2.0, 3.0]).latest == 3.0


@each("slope", [0.0, 0.125, 0.5])
def test_a_quarter_of_the_values_may_be_anything(slope: float) -> None:
    line = [slope * step for step in range(VALUES)]
    spoilt = [1e6 if step % 4 == 1 else value for step, value in enumerate(line)]
    assert filled(spoilt).forecast == pytest.approx(slope * VALUES, abs=2 * abs(slope) + 1e-9)


def test_only_the_latest_values_count() -> None:
    assert filled([1000.0] * 50 + [2.0] * VALUES).forecast == 2.0


def test_usual_error_is_a_quantile_of_what_forecasts_missed_by() -> None:
    noise = np.random.default_rng(0).normal(size=2000)
    trend = filled(noise.tolist())
    share = np.mean([abs(trend.usual_error(q) - stats.norm.ppf(q)) for q in (0.5, 0.9, 0.95)])
    assert share < 0.25
    assert trend.usual_error(1.0) == max(trend._errors)


def test_falling_values_are_not_expected_below_their_median() -> None:
    assert filled([-float(step) for step in range(VALUES)]).forecast == -(VALUES - 1) / 2


def test_of_few_errors_the_unknown_is_a_part() -> None:
    assert Trend().usual_error(0.5) == UNKNOWN
    assert filled([0.0] * (1 + FEW // 2)).usual_error(0.98) == UNKNOWN / 2
    assert filled([0.0] * (1 + FEW)).usual_error(0.98) == 0.0 == filled([0.0] * 200).usual_error(0.98)


def test_values_taken_without_learning_leave_the_errors_alone() -> None:
    trend, twin = filled([0.0] * 100), filled([0.0] * 100)
    trend.add(30.0, learn=False)
    assert trend._errors == twin._errors and trend._values != twin._values


def test_errors_are_forgotten() -> None:
    trend = filled([0.0] * 20 + [50.0] + [0.0] * (ERRORS - 1))
    assert trend.usual_error(1.0) == 50.0
    trend.add(0.0)
    assert trend.usual_error(1.0) < 50.0


def test_a_restored_trend_goes_on_bit_for_bit() -> None:
    values = np.random.default_rng(1).normal(size=400).cumsum().tolist()
    trend = filled(values[:300])
    again = Trend.from_dict(json.loads(json.dumps(trend.to_dict())))
    for value in values[300:]:
        assert trend.forecast == again.forecast and trend.usual_error(0.98) == again.usual_error(0.98)
        trend.add(value)
        again.add(value)
    assert math.isfinite(trend.forecast or math.nan) and trend.to_dict() == again.to_dict()
