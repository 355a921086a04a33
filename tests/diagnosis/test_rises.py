"""Levels and rises of a loss, each part alone: courses of whole runs hide what one of them does."""

import numpy as np
import pytest

from plimsoll.diagnosis.tables.trend import Rise, beginning, comes_back, gradual_rise, levels, rises
from tests.support.cases import each

ONES = np.ones(60)


def test_a_run_begins_at_its_first_loss_or_below() -> None:
    assert beginning(np.array([40.0, 2.0, 2.1, 1.9, 2.0, 0.1])) == 2.0
    assert beginning(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == 1.0


@each(
    ("loss", "level"),
    [
        (np.ones(30), 1.5),  # without noise so much of the median
        (np.array([1.0, 1.0, 1.0, 1.0, 4.0] * 6), 64.0),  # an upper tenth of four times: four times cubed
        (np.array([-1.0, -1.0, -1.0, -1.0, 2.0] * 6), 8.0),  # below zero there are no ratios
        (np.array([9.0, 11.0, 9.0, 11.0, 10.0] * 6), 20.0),  # ten deviations of one
    ],
)
def test_the_level_is_the_farthest_reach_of_the_noise(loss: np.ndarray, level: float) -> None:
    _, found = levels(loss, window=20, least=20, deviations=10, rise=0.5)
    assert np.isnan(found[:20]).all()
    assert found[-1] == pytest.approx(level)


def test_a_rise_that_lasts_is_one_rise() -> None:
    loss = np.concatenate([ONES, np.full(30, 9.0), ONES])
    usual, level = levels(loss, window=50, least=20, deviations=10, rise=0.5)
    (found,) = rises(loss, usual, level, lasting=20, share=0.6)
    assert (found.first, found.last, found.lasts, found.open) == (60, 89, True, False)


@each(
    ("loss", "height", "back"),
    [
        (np.linspace(10, 6, 40), 6.0, False),  # less than half of it is gone
        (np.linspace(10, 3, 40), 3.0, True),
        (np.tile([10.0, 0.1], 20), 0.1, False),  # it does not fall
    ],
)
def test_a_rise_comes_back_once_half_of_it_is_gone(loss: np.ndarray, height: float, back: bool) -> None:
    rise = Rise(first=0, last=39, peak=0, usual=0.0, level=1.0, height=height, lasts=True, open=True)
    assert comes_back(loss, rise) == back


def test_a_gradual_rise_is_above_at_the_end() -> None:
    assert gradual_rise(ONES, beyond=5.0, window=20, lasting=20, share=0.6) is None
    found = gradual_rise(np.concatenate([ONES, 9 * ONES]), beyond=5.0, window=20, lasting=20, share=0.6)
    assert found is not None and 60 <= found.first <= 70 and found.open
