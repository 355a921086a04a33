"""The trend of a series against scipy.stats, which has the same slope and the same test."""

import itertools
import random

import numpy as np
import pytest
from scipy import stats

from plimsoll.diagnosis.tables.trend import mann_kendall, theil_sen, trend
from tests.support.cases import each


def series(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers over ascending steps: some with ties, some with a trend, some in order."""
    draw = random.Random(seed)
    count = draw.randrange(8, 65)
    x = np.cumsum([draw.randrange(1, 50) for _ in range(count)]).astype(np.float64)
    y = np.array([draw.gauss(0, 1) for _ in range(count)]) + draw.choice((0, 0, 0.01, -0.1, 1)) * x
    digits = draw.choice((None, None, 1, 0))
    y = y if digits is None else np.round(y, digits)
    return x, np.sort(y) if draw.random() < 0.1 else y


@each("seed", range(300))
def test_slope_and_test_are_those_of_scipy(seed: int) -> None:
    x, y = series(seed)
    if np.ptp(y) == 0:
        return
    expected = stats.theilslopes(y, x)
    assert theil_sen(x, y) == pytest.approx(tuple(expected), rel=1e-9, abs=1e-12)
    assert mann_kendall(y) == pytest.approx(stats.kendalltau(x, y).pvalue, rel=1e-9, abs=1e-15)


def test_the_exact_distribution_counts_all_orders() -> None:
    orders = list(itertools.permutations(range(6)))
    inversions = [sum(a > b for a, b in itertools.combinations(order, 2)) for order in orders]
    for order, count in zip(orders, inversions, strict=True):
        as_ordered = sum(other <= min(count, 15 - count) for other in inversions) / len(orders)
        assert mann_kendall(np.array(order, dtype=np.float64)) == pytest.approx(min(1.0, 2 * as_ordered))


def test_a_rising_line_is_sure_to_rise() -> None:
    found = trend(np.arange(40), np.arange(40) * 0.5)
    assert found is not None
    assert (found.slope, found.start, found.end) == pytest.approx((0.5, 0.0, 19.5)) and found.confidence > 0.999
    assert trend(np.arange(7), np.arange(7.0)) is None
