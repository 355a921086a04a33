"""The spectral rule alone, on made-up gradients: no tensors, every step a few numbers."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from benchmarks._traces import FOLDER, Trace
from plimsoll.formats import FP16
from plimsoll.scaling.spectral.rule import (
    CALM,
    DROPS,
    MANY,
    PROBES,
    PROOF,
    REFUSALS,
    MeasuredStep,
    Memory,
    SpectralRule,
)
from tests.support.cases import each

LINE = math.log2(FP16.overflow_threshold)
RULE = SpectralRule(line=LINE, margin=0.5, lowest=-14, highest=32)


@dataclass
class Life:
    """A rule on gradients whose largest, and largest hidden one, are given as exponents."""

    rule: SpectralRule = RULE
    exponent: int = 10
    memory: Memory = field(default_factory=Memory)
    exponents: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def live(self, levels: Iterable[float | None], hidden: float = -math.inf, faint: float = 0.0) -> "Life":
        """Steps of such levels; None for a step that overflows at any scale."""
        for level in levels:
            self.exponents.append(self.exponent)
            overflowed = level is None or max(level, level + hidden) + self.exponent >= LINE
            if overflowed:
                self.skipped.append(len(self.exponents) - 1)
            seen = 0.0 if level is None or overflowed else 2.0 ** (level + self.exponent)
            look = MeasuredStep(overflowed=overflowed, absmax=seen, nonzero=1000, faint=round(1000 * faint))
            self.exponent = self.rule.next_exponent(self.memory, look, 2.0**self.exponent)
        return self


def noise(steps: int, spread: float = 0.3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, steps)


def test_the_second_step_has_the_right_scale() -> None:
    for level in (-40.0, -20.0, -5.0, 0.0, 4.0):
        life = Life().live([level] * 40)
        assert not life.skipped
        assert life.exponents[1] == min(math.floor(LINE - level - 1 - 0.5), 32)
        assert life.exponent == min(math.floor(LINE - level - 0.5), 32)


@each("margin", [0.0, 1.0, 3.0])
def test_the_margin_is_kept_in_whole_binades(margin: float) -> None:
    life = Life(SpectralRule(line=LINE, margin=margin, lowest=-14, highest=32)).live([-3.5] * 100)
    assert LINE - (-3.5 + life.exponent) == pytest.approx(margin, abs=1.0) and LINE + 3.5 - life.exponent >= margin


@each("slope", [-0.02, 0.01, 0.05, 0.2])
def test_a_ramp_never_overflows_nor_lags(slope: float) -> None:
    steps = int(24 / abs(slope))
    levels = (0.0 if slope < 0 else -24.0) + slope * np.arange(steps) + noise(steps, 0.2)
    life = Life().live(levels)
    assert len(life.skipped) <= 1
    room = LINE - (levels + np.array(life.exponents))
    assert np.median(room[50:]) < 3


def test_usual_jumps_are_covered_once_they_are_known() -> None:
    levels = np.random.default_rng(0).choice([-8.0, -2.0], size=3000, p=[0.9, 0.1])
    life = Life().live(levels)
    assert len([step for step in life.skipped if step > 100]) == 0
    assert np.median(life.exponents) == math.floor(LINE + 2 - 0.5)


def test_the_trend_avoids_what_a_scale_without_margin_meets() -> None:
    levels = -10 + np.cumsum(noise(2000, 0.05)) + noise(2000, 0.3, seed=1)
    bare = SpectralRule(line=LINE + 3, margin=0.0, lowest=-14, highest=32)
    assert len(Life().live(levels).skipped) <= 2 < len(Life(bare).live(levels).skipped)


def test_a_burst_of_twenty_is_recovered_from_at_once() -> None:
    life = Life().live([*[-6.0] * 200, *[None] * 20, *[-6.0] * 200])
    before, low = life.exponents[200], min(life.exponents)
    assert life.exponents[220] == low == -14
    assert life.exponents[200:204] == [before, before - DROPS[0], before - sum(DROPS[:2]), max(before - 17, -14)]
    back = next(step for step in range(220, 420) if life.exponents[step] == before)
    assert back - 220 == CALM + before - low <= 200
    assert life.exponents[-1] == before


def test_a_hidden_burst_is_left_in_three_steps_and_not_met_again() -> None:
    life = Life().live(-6 + noise(300)).live(-6 + noise(20, seed=1), hidden=16.0).live(-6 + noise(300, seed=2))
    assert len(life.skipped) <= 5
    assert life.exponents[-1] >= life.exponents[299] - 1


def test_a_burst_that_shows_is_followed_down_and_forgotten() -> None:
    life = Life().live(-6 + noise(100)).live(6 + noise(40, seed=1)).live(-6 + noise(200, seed=2))
    assert len(life.skipped) <= 4 and life.exponents[115] <= LINE - 6
    back = next(step for step in range(140, 340) if life.exponents[step] >= life.exponents[99] - 1)
    assert back - 140 <= 60, "what the burst did to the forecasts is no jump to be covered"


def test_non_finite_steps_leave_no_trace_in_the_statistics() -> None:
    levels = -6 + noise(400)
    clean, spoilt = Life().live(levels), Life()
    for step, level in enumerate(levels):
        spoilt.live([None, level] if step in (5, 60, 250) else [level])
    ours, others = spoilt.memory.trend.to_dict(), clean.memory.trend.to_dict()
    assert ours["values"] == pytest.approx(others["values"]) and max(ours["errors"]) <= max(others["errors"]) + 1e-9
    assert spoilt.exponent == clean.exponent


def test_a_thousand_non_finite_steps_then_finite_ones() -> None:
    life = Life().live([-4.0] * 50).live([None] * 1000)
    assert life.exponent == -14
    life.live([-4.0] * 60)
    assert life.exponent == life.exponents[49]


def test_non_finite_from_the_start() -> None:
    life = Life().live([None] * 30)
    assert life.exponent == -14
    life.live([0.0] * 60)
    assert life.exponent == math.floor(LINE - 0.5)


def test_zero_gradients_change_nothing_for_a_thousand_steps() -> None:
    life = Life().live([-3.0] * 50)
    exponent, history = life.exponent, life.memory.trend.to_dict()
    life.live([-math.inf] * 1000)
    assert set(life.exponents[50:]) == {exponent} and life.memory.trend.to_dict() == history
    life.live([-3.0] * 20)
    assert not life.skipped and life.exponent == exponent


def test_zero_gradients_from_the_start_keep_the_scale() -> None:
    assert set(Life().live([-math.inf] * 1000).exponents) == {10}


def test_floor_and_ceiling() -> None:
    tight = SpectralRule(line=LINE, margin=0.5, lowest=0, highest=8)
    assert set(Life(tight, exponent=8).live([-30.0] * 30).exponents) == {8}
    assert Life(tight, exponent=8).live([-10.0] * 5).live([None] * 50).exponent == 0
    assert Life(tight, exponent=8).live([15.0] * 50).exponent == 0


def test_mass_lost_below_makes_it_bolder() -> None:
    levels = -4.8 + noise(600, 0.2)
    careful, bold = Life().live(levels), Life().live(levels, faint=0.01)
    assert np.mean(bold.exponents[50:]) > np.mean(careful.exponents[50:]) + 0.1
    assert Life().live(levels, faint=0.001).exponents == careful.exponents


def test_hidden_gradients_above_those_seen_are_learned_and_followed() -> None:
    life = Life().live(-10 + noise(1500, 0.1), hidden=6.0)
    reserve = life.memory.reserve
    assert 5 <= reserve <= 8 and len(life.skipped) <= 16
    life.live(np.linspace(-10, -2, 1500) + noise(1500, 0.1), hidden=6.0)
    assert len([step for step in life.skipped if step >= 1500]) <= 4, "the reserve follows gradients that drift"
    late = [step for step in life.skipped if step > 1000]
    assert len(late) <= 6, "probes get rarer"


def test_a_reserve_that_is_not_needed_any_more_is_given_back() -> None:
    life = Life(memory=Memory(reserve=6)).live(-10 + noise(6 * PROBES[0] + 50, 0.1))
    assert not life.skipped and life.memory.reserve == 0
    assert life.exponent == Life().live(-10 + noise(600, 0.1)).exponent


def test_many_single_overflows_take_a_binade_more() -> None:
    life = Life()
    for _ in range(MANY - 1):
        life.live([-5.0] * 200).live([None])
    life.live([-5.0] * 200)
    assert life.memory.reserve == 0
    life.live([None]).live([-5.0] * 200)
    assert life.memory.reserve == 1 and life.memory.probe == PROBES[1]
    assert life.exponent == math.floor(LINE + 5 - 0.5) - 1
    rare = Life()
    for _ in range(3 * MANY):
        rare.live([-5.0] * 400).live([None])
    assert rare.memory.reserve == 0


def test_a_failed_probe_makes_the_next_one_wait_twice_as_long() -> None:
    memory = Memory(reserve=3, probe=PROBES[0], free=PROOF)
    life = Life(memory=memory).live([-5.0] * (PROBES[0] + 1))
    assert life.memory.reserve == 2 and life.memory.probing
    life.live([None]).live([-5.0] * 5)
    assert life.memory.reserve == 3 and life.memory.probe == 2 * PROBES[0] and not life.memory.probing


def test_refusals_double_the_wait_before_they_teach() -> None:
    life = Life().live([-5.0] * 200)
    top = life.exponent
    hidden = LINE - (-5.0 + top)  # just too much at the top
    calms = []
    while life.memory.refusals < REFUSALS - 1:
        life.live([-5.0], hidden=hidden)
        calms.append(life.memory.calm)
    assert sorted(set(calms)) == [CALM, 2 * CALM, 4 * CALM]


def test_the_memory_survives_a_checkpoint_at_any_step() -> None:
    levels = [*(-8 + noise(60)), *[None] * 5, *(-8 + noise(40, seed=1)), None, *(-8 + noise(30, seed=2))]
    whole = Life().live(levels)
    for cut in range(0, len(levels), 7):
        first = Life().live(levels[:cut])
        saved = json.loads(json.dumps(first.memory.to_dict()))
        second = Life(memory=Memory.from_dict(saved), exponent=first.exponent).live(levels[cut:])
        assert first.exponents + second.exponents == whole.exponents
        assert second.memory.to_dict() == whole.memory.to_dict()


def test_a_memory_with_every_field_changed_comes_back() -> None:
    memory = Memory(
        step=9, overflows=2, cap=-3, calm=40, waits=7, free=5, refusals=1, reserve=4, probe=200, settled=11,
        singles=[2, 8], probing=True, surprise=True, faint=True,
    )  # fmt: skip
    memory.trend.add(1.5)
    fresh = Memory().to_dict()
    assert all(value != fresh[name] for name, value in memory.to_dict().items())
    assert Memory.from_dict(memory.to_dict()).to_dict() == memory.to_dict()


def test_a_scale_that_is_no_power_of_two_is_followed_by_one_that_is() -> None:
    memory = Memory()
    look = MeasuredStep(overflowed=False, absmax=3.0, nonzero=10)
    assert RULE.next_exponent(memory, look, 3 * 1024.0) == math.floor(LINE + 10 - 1 - 0.5)
    assert RULE.next_exponent(Memory(), MeasuredStep(overflowed=True), 3 * 1024.0) == 11 - 1


def committed(name: str) -> Path:
    return FOLDER / f"{name}.npz"


@each("name", ["bursty", "constant", "drifting", "heavy", "shrinking"])
def test_committed_traces_are_whole_and_need_no_pickle(name: str) -> None:
    trace = Trace.load(committed(name))
    assert len(trace) == 4000 and trace.name == name and trace.about
    for population in (trace.weights, trace.hidden):
        assert population.counts.shape[0] == len(population.absmax) == len(population.zeros) == len(trace)
        top = population.lowest + population.counts.shape[1] - 1 - (population.counts[:, ::-1] > 0).argmax(axis=1)
        assert np.array_equal(top, np.floor(np.log2(population.absmax)))


def halving(levels: np.ndarray) -> int:
    """The steps that torch's rule skips, from 2**16."""
    exponent, clean, skipped = 16, 0, 0
    for level in levels:
        if level + exponent >= LINE:
            exponent, clean, skipped = exponent - 1, 0, skipped + 1
        else:
            clean += 1
            exponent, clean = (exponent + 1, 0) if clean == 2000 else (exponent, clean)
    return skipped


@each(("name", "most"), [("bursty", 11), ("constant", 2), ("drifting", 9), ("shrinking", 3)])
def test_recorded_gradients_overflow_less_often_than_with_the_classic_rule(name: str, most: int) -> None:
    trace = Trace.load(committed(name))
    weights, hidden = np.log2(trace.weights.absmax), np.log2(trace.hidden.absmax)
    life = Life()
    for level, gap in zip(weights, hidden - weights, strict=True):
        life.live([level], hidden=gap)
    assert len(life.skipped) <= most < halving(np.maximum(weights, hidden))


def steps_of(make: Callable[[int], float], count: int) -> Iterator[float]:
    return (make(step) for step in range(count))


def test_a_sudden_lasting_rise_costs_few_steps() -> None:
    life = Life().live(steps_of(lambda step: -12.0 if step < 300 else 0.0, 700))
    assert len(life.skipped) <= len(DROPS) + 1
    assert life.exponent == math.floor(LINE - 0.5)
