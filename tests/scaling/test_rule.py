"""When the scale rises and falls: against torch's own kernel, scalar references, and on the host as on a device.

The references follow the published rules: torch's `_amp_update_scale_`, and the scalers of Megatron-LM and DeepSpeed.
"""

import math
import random
from typing import Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from plimsoll.scaling import DynamicScaler, Hysteresis
from plimsoll.scaling.dynamic import Rule, RuleState, advance
from tests.support.scaling.steps import scales

TRACES = st.lists(st.booleans(), min_size=1, max_size=120)
F32_MAX = torch.finfo(torch.float32).max


def rule(**changed: object) -> Rule:
    numbers = {
        "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "regrowth_interval": 3,
        "hysteresis": Hysteresis(), "min_scale": 2.0**-14, "max_scale": F32_MAX,
    }  # fmt: skip
    return Rule(**{**numbers, **changed})


def run(trace: list[bool], numbers: Rule, scale: float = 2.0**16) -> list[float]:
    state, found = RuleState(scale, 0, 0, scale, False), []
    for overflowed in trace:
        state = advance(state, overflowed, numbers, lambda c, a, b: a if c else b)
        found.append(state.scale)
    return found


def run_on_device(trace: list[bool], numbers: Rule, scale: float = 2.0**16) -> list[float]:
    wide = torch.tensor(scale, dtype=torch.float64)
    clean = torch.tensor(0, dtype=torch.int32)
    state = RuleState(wide, clean, torch.zeros_like(wide), wide, torch.tensor(False))
    found = []
    for overflowed in trace:
        state = advance(state, torch.tensor(overflowed), numbers, torch.where)
        found.append(state.scale.item())
    return found


def torchs(trace: list[bool], growth: float, backoff: float, interval: int, scale: float = 2.0**16) -> list[float]:
    held, tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    found = []
    for overflowed in trace:
        torch._amp_update_scale_(held, tracker, torch.tensor(float(overflowed)), growth, backoff, interval)
        found.append(held.item())
    return found


def megatrons(trace: list[bool], interval: int, hysteresis: int, low: float, scale: float = 2.0**16) -> list[float]:
    clean, left, found = 0, hysteresis, []
    for overflowed in trace:
        if overflowed:
            clean, left = 0, left - 1
            scale = max(scale * 0.5, low) if left <= 0 else scale
        else:
            clean += 1
            if clean == interval:
                clean, left, scale = 0, hysteresis, scale * 2.0
        found.append(scale)
    return found


def deepspeeds(trace: list[bool], interval: int, hysteresis: Hysteresis, low: float) -> list[float]:
    """DeepSpeed's `DynamicLossScaler.update_scale`, from 2**16 on."""
    last, left, scale, found = -1, hysteresis.overflows, 2.0**16, []
    for step, overflowed in enumerate(trace):
        stable = step - last - 1  # clean steps before this one, since the last overflow
        grows = not overflowed and stable > 0 and stable % interval == 0
        if overflowed and left > 1:
            left -= 1
        elif overflowed:
            scale = max(scale / 2.0, low)
        elif grows or hysteresis.kind == "consecutive":
            left = hysteresis.overflows
        scale *= 2.0 if grows else 1.0
        last = step if overflowed else last
        found.append(scale)
    return found


def with_one_more_clean_step(trace: list[bool]) -> tuple[list[bool], list[int]]:
    """The trace with each run of clean steps one longer, and where the given steps are in it."""
    longer: list[bool] = []
    places = []
    for before, overflowed in zip([True, *trace], trace, strict=False):
        longer += [False] if before and not overflowed else []
        places.append(len(longer))
        longer.append(overflowed)
    return longer, places


@given(TRACES, st.sampled_from([(2.0, 0.5), (1.7, 0.3), (4.0, 0.9)]), st.integers(1, 9))
@settings(max_examples=60)
def test_without_regrowth_it_is_torchs_rule(trace: list[bool], factors: tuple[float, float], interval: int) -> None:
    growth, backoff = factors
    scaler = DynamicScaler(
        "cpu", 2.0**16, growth, backoff, interval, min_scale=2.0**-126, regrowth_interval=None
    )  # fmt: skip
    assert scales(scaler, trace) == torchs(trace, growth, backoff, interval)


@given(TRACES, st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60)
def test_windowed_hysteresis_is_megatrons(trace: list[bool], interval: int, overflows: int) -> None:
    numbers = rule(
        growth_interval=interval, regrowth_interval=None, hysteresis=Hysteresis(overflows=overflows, kind="windowed")
    )
    assert run(trace, numbers) == megatrons(trace, interval, overflows, 2.0**-14)


@given(TRACES, st.integers(1, 9), st.integers(1, 4), st.sampled_from(["consecutive", "windowed"]))
@settings(max_examples=60)
def test_it_counts_as_deepspeed_and_grows_one_clean_step_earlier(
    trace: list[bool], interval: int, overflows: int, kind: Literal["consecutive", "windowed"]
) -> None:
    hysteresis = Hysteresis(overflows=overflows, kind=kind)
    longer, places = with_one_more_clean_step(trace)
    theirs = deepspeeds(longer, interval, hysteresis, 2.0**-14)
    numbers = rule(growth_interval=interval, regrowth_interval=None, hysteresis=hysteresis)
    assert run(trace, numbers) == [theirs[place] for place in places]


def test_deepspeed_grows_one_step_later() -> None:
    hysteresis = Hysteresis(overflows=1)
    theirs = deepspeeds([True] + [False] * 9, 4, hysteresis, 1.0)
    ours = run([True] + [False] * 9, rule(growth_interval=4, regrowth_interval=None, hysteresis=hysteresis))
    assert [2.0**15 / scale for scale in theirs] == [1] * 5 + [0.5] * 4 + [0.25]
    assert [2.0**15 / scale for scale in ours] == [1] * 4 + [0.5] * 4 + [0.25] * 2


@given(
    TRACES,
    st.integers(1, 9),
    st.none() | st.integers(1, 9),
    st.builds(Hysteresis, overflows=st.integers(1, 3), kind=st.sampled_from(["consecutive", "windowed"])),
    st.sampled_from([2.0**17, F32_MAX]),
)
@settings(max_examples=60)
def test_a_device_computes_what_the_host_does(
    trace: list[bool], interval: int, regrowth: int | None, hysteresis: Hysteresis, high: float
) -> None:
    numbers = rule(growth_interval=interval, regrowth_interval=regrowth, hysteresis=hysteresis, max_scale=high)
    assert run(trace, numbers) == run_on_device(trace, numbers)


def test_the_whole_scaler_on_a_device_computes_what_it_does_on_the_host() -> None:
    generator = random.Random(3)
    trace = [generator.random() < 0.2 for _ in range(300)]
    hosts, devices = (
        DynamicScaler("cpu", growth_interval=20, regrowth_interval=4, hysteresis=2) for _ in range(2)
    )  # fmt: skip
    devices._next_scale = devices._advance_on_device
    assert scales(hosts, trace) == scales(devices, trace)
    assert hosts.state_dict() == devices.state_dict()


def test_after_a_burst_of_20_the_scale_is_back_within_200_clean_steps() -> None:
    found = scales(DynamicScaler("cpu"), [True] * 20 + [False] * 200)
    assert found[19] == 2.0**-4
    assert found[218] == 2.0**15
    assert found[219] == 2.0**16
    stock = scales(torch.amp.GradScaler("cpu"), [True] * 20 + [False] * 200)
    assert stock[219] == 2.0**-4


def test_regrowth_goes_to_where_the_scale_was_and_on_by_the_growth_interval() -> None:
    scaler = DynamicScaler("cpu", 2.0**4, growth_interval=25, regrowth_interval=2)
    found = scales(scaler, [True] * 3 + [False] * 31)
    assert found[2] == 2.0
    assert found[3:9] == [2.0, 4.0, 4.0, 8.0, 8.0, 16.0]
    assert found[9:33] == [16.0] * 24
    assert found[33] == 32.0


def test_an_overflow_during_regrowth_is_the_new_limit() -> None:
    scaler = DynamicScaler("cpu", 2.0**10, growth_interval=50, regrowth_interval=2)
    scales(scaler, [True] * 6 + [False] * 6)
    assert scaler.get_scale() == 2.0**7
    found = scales(scaler, [True] + [False] * 50)
    assert found[:50] == [2.0**6] * 50
    assert found[50] == 2.0**7


def test_gradients_that_grew_for_good_cost_one_step_in_a_growth_interval() -> None:
    scaler, limit, skipped = DynamicScaler("cpu", growth_interval=100), 2.0**12, 0
    optimizer_scales = []
    for _ in range(2000):
        overflows = scaler.get_scale() > limit
        skipped += overflows
        optimizer_scales += scales(scaler, [overflows])
    assert skipped <= 4 + 1 + 2000 // 100
    assert optimizer_scales.count(limit) > 1900


def test_a_burst_after_a_growth_that_held_is_a_burst() -> None:
    scaler = DynamicScaler("cpu", 4.0, growth_interval=20, regrowth_interval=5)
    assert scales(scaler, [False] * 25)[-1] == 8.0
    assert scales(scaler, [True] * 2 + [False] * 10)[-1] == 8.0


def test_the_scale_never_leaves_its_bounds() -> None:
    scaler = DynamicScaler("cpu", 4.0, growth_interval=1, min_scale=0.5, max_scale=20.0)
    assert scales(scaler, [False] * 5) == [8.0, 16.0, 16.0, 16.0, 16.0]
    assert scales(scaler, [True] * 7) == [8.0, 4.0, 2.0, 1.0, 0.5, 0.5, 0.5]
    odd = DynamicScaler("cpu", 1.0, min_scale=0.3)
    assert scales(odd, [True] * 3) == pytest.approx([0.5, 0.3, 0.3])
    high = DynamicScaler("cpu", 2.0**127, growth_interval=1, regrowth_interval=None)
    assert scales(high, [False] * 3, torch.optim.SGD([torch.nn.Parameter(torch.zeros(0))], lr=0.0)) == [2.0**127] * 3


def test_regrowth_is_never_slower_than_growth() -> None:
    scaler = DynamicScaler("cpu", 8.0, growth_interval=3, regrowth_interval=10)
    assert scales(scaler, [True] * 2 + [False] * 6)[-1] == 8.0


def test_a_scale_set_by_hand_is_where_the_scale_regrows_to() -> None:
    scaler = DynamicScaler("cpu", 2.0**16, regrowth_interval=2)
    scales(scaler, [True] * 4)
    scaler.update(new_scale=32.0)
    assert scales(scaler, [False] * 10)[-1] == 32.0
    assert scales(scaler, [True] * 2 + [False] * 10)[-1] == 32.0


def test_the_number_of_skipped_steps_does_not_depend_on_hysteresis() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scaler = DynamicScaler("cpu", hysteresis=3)
    assert scales(scaler, [True, True], optimizer) == [2.0**16] * 2
    assert math.isfinite(optimizer.param_groups[0]["params"][0].item())
    assert not scaler.outcome.stepped
    assert scales(scaler, [True], optimizer) == [2.0**15]


def test_regrowth_does_not_overshoot_where_the_scale_was() -> None:
    scaler = DynamicScaler("cpu", growth_factor=4.0, regrowth_interval=1)
    assert scales(scaler, [True] * 3 + [False] * 3) == [2.0**15, 2.0**14, 2.0**13, 2.0**15, 2.0**16, 2.0**16]


@pytest.mark.parametrize("regrowth", [None, 3])
def test_the_rule_itself_knows_its_floor(regrowth: int | None) -> None:
    found = run([True] * 40 + [False] * 14, rule(regrowth_interval=regrowth), 2.0**10)
    assert found[39] == 2.0**-14
    if regrowth is None:
        assert found == megatrons([True] * 40 + [False] * 14, 7, 1, 2.0**-14, 2.0**10)
    assert found[-1] == (2.0**-12 if regrowth is None else 2.0**-10)
