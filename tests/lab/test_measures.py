"""What experiments measure alike: bounds of ratios, and that no number is never taken for a good one."""

import math
from pathlib import Path

import numpy as np
import torch

import plimsoll as pl
from plimsoll.runs import RunWriter, Scalars
from plimsoll_lab.experiments.unit.experiment import headroom
from plimsoll_lab.statistics import columns, largest, median, ratio
from tests.support.cases import each

ONES = np.ones(3)


def test_one_seed_without_a_number_says_nothing_of_the_others() -> None:
    one, all_of_them = ratio(np.array([1.0, math.inf, 1.0]), ONES), ratio(np.full(3, math.nan), ONES)
    assert one.mean == one.high == math.inf and math.isnan(one.low)
    assert all_of_them.mean == all_of_them.low == all_of_them.high == math.inf
    beside = ratio(ONES, np.array([1.0, math.inf, 1.0]))  # else it would be 0 of it, and as good as any
    assert math.isnan(beside.mean) and math.isnan(beside.low) and math.isnan(beside.high)


def test_the_largest_of_numbers_and_none_is_none() -> None:
    assert largest([1.0, 3.0, 2.0]) == 3.0 and math.isnan(largest([0.0, math.nan, 2.0]))


def test_a_loss_that_is_mostly_no_number_has_no_good_median() -> None:
    assert median(np.array([1.0, 2.0, math.nan])) == 2.0
    assert median(np.array([1.0, math.nan, math.inf])) == math.inf
    assert math.isnan(median(np.array([])))


@each("count", [1, 20, 21, 22, 23, 100])
def test_a_curve_of_any_length_is_at_most_22_means(count: int) -> None:
    loss = np.arange(count, dtype=np.float64)
    found = columns(np.arange(count), loss)
    assert len(found) == min(count, 22) and found[0] >= 0.0 and found[-1] <= count - 1
    assert list(found) == sorted(found)


def test_headroom_of_nothing_is_no_number_and_what_is_not_finite_has_none(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "empty") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    assert all(math.isnan(value) for value in headroom(pl.Run(tmp_path / "empty")).values())
    for name, value in (("sound", 1.0), ("broken", math.inf)):
        model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4, bias=False)})
        with pl.watch(model, run=tmp_path / name, every=1, collect=("weights", "activations")) as seen:
            model["up"](torch.tensor([[1.0, 2.0, 3.0, value]])).sum().backward()
            seen.step()
    sound, broken = headroom(pl.Run(tmp_path / "sound")), headroom(pl.Run(tmp_path / "broken"))
    assert sound["operands_overflow"] == 0.0 and 0 < sound["operands_room"] < 20
    assert broken["operands_overflow"] >= 0.25 and broken["operands_room"] == -math.inf
