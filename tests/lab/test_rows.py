"""What rows of the evidence base say that no experiment shows: the dynamic scale over a whole training (X4)."""

import itertools

from plimsoll.scaling import Hysteresis
from plimsoll.scaling.dynamic import Rule, RuleState, advance

STEPS, INTERVAL, SHRINKS = 60_000, 2000, 8  # the last: binades by which gradients shrink in so many steps


def scales_of(*, shrinks: float, regrowth: int | None) -> list[float]:
    """The scale at each step of a training whose largest gradient is 2^-4 at first, and shrinks evenly."""
    rule = Rule(
        growth_factor=2.0, backoff_factor=0.5, growth_interval=INTERVAL, regrowth_interval=regrowth,
        hysteresis=Hysteresis(), min_scale=2.0**-14, max_scale=2.0**127,
    )  # fmt: skip
    state, found = RuleState(2.0**24, 0, 0, 2.0**24, False), []
    for step in range(STEPS):
        found.append(state.scale)
        overflowed = state.scale * 2.0 ** (-4 - shrinks * step / STEPS) > 65_504
        state = advance(state, overflowed, rule, lambda c, a, b: a if c else b)
    return found


def test_the_scale_begins_high_finds_its_place_and_ends_higher_as_gradients_shrink() -> None:
    scales = scales_of(shrinks=SHRINKS, regrowth=None)
    assert scales[:6] == [2.0**24, 2.0**23, 2.0**22, 2.0**21, 2.0**20, 2.0**19]  # halved at each overflow
    assert set(scales[5:INTERVAL]) == {2.0**19}
    grown = [step for step, (before, after) in enumerate(itertools.pairwise(scales)) if after == 2 * before]
    assert all(later - step >= INTERVAL for step, later in itertools.pairwise(grown))
    assert max(scales[-INTERVAL:]) >= 2.0 ** (19 + SHRINKS - 1)
    steady = scales_of(shrinks=0.0, regrowth=None)
    assert set(steady[5:]) == {2.0**19, 2.0**20}  # it tries one higher each time, and comes back
    assert max(steady[-INTERVAL:]) < max(scales[-INTERVAL:])


def test_so_does_the_rule_that_regrows() -> None:
    scales = scales_of(shrinks=SHRINKS, regrowth=10)
    assert max(scales[-INTERVAL:]) >= 2.0 ** (19 + SHRINKS - 1)
    lost = sum(after < before for before, after in itertools.pairwise(scales))
    assert lost < STEPS / INTERVAL * 2 + 10
