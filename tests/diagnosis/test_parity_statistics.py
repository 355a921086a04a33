"""The statistics behind the verdict: against formulas, against scipy's tests, and how often they err."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.signal import lfilter

import plimsoll as pl
from plimsoll.diagnosis.equivalence import noise as noise_module
from plimsoll.diagnosis.equivalence.curves import Aligned
from plimsoll.diagnosis.equivalence.noise import LEAST_RECORDS, reading, run_noise, weights
from tests.support.cases import each

Floats = NDArray[np.float64]
CONFIDENCE = 0.95


def remembering(rng: np.random.Generator, runs: int, steps: int, memory: float) -> Floats:
    """Noise of unit variance whose neighbours are correlated by so much."""
    raw = rng.normal(size=(runs, steps + 500))
    return lfilter([1], [1, -memory], raw)[:, 500:] * np.sqrt(1 - memory**2)


def most(of: int, probability: float) -> int:
    """How many of so many events of that probability are passed once in a million times."""
    return int(stats.binom.isf(1e-6, of, probability))


def test_the_last_half_has_seven_eighths_of_the_weight() -> None:
    share = weights(10_000)
    assert share.sum() == pytest.approx(1)
    assert share[5000:].sum() == pytest.approx(7 / 8, abs=1e-3)


@each("memory", [0.0, 0.5, 0.9])
def test_the_error_of_the_mean_is_that_of_the_noise(memory: float) -> None:
    """Its expectation is known: the spectral density at zero over the number of records that count."""
    steps = 8000
    errors = [reading(run, CONFIDENCE).error for run in remembering(np.random.default_rng(0), 24, steps, memory)]
    expected = np.sqrt((1 + memory) / (1 - memory) * (weights(steps) ** 2).sum())
    assert float(np.median(errors)) == pytest.approx(expected, rel=0.2)


@each("memory", [0.0, 0.6, 0.95])
def test_the_correlation_time_is_that_of_the_noise(memory: float) -> None:
    runs = remembering(np.random.default_rng(1), 8, 20_000, memory)
    times = [noise_module._correlation_time(run) for run in runs]
    assert float(np.median(times)) == pytest.approx((1 + memory) / (1 - memory), rel=0.2)


@each("trend", [lambda t: 3 * t, lambda t: np.exp(-8 * t), lambda t: t**2 - t, lambda t: np.sin(5 * t)])
def test_a_smooth_trend_is_no_noise(trend: "np.ufunc") -> None:
    """The error is as without it, and the estimate is its weighted mean."""
    noise, place = np.random.default_rng(2).normal(0, 0.1, 3000), np.linspace(0, 1, 3000)
    plain, moved = reading(noise, CONFIDENCE), reading(noise + trend(place), CONFIDENCE)
    assert moved.estimate - plain.estimate == pytest.approx(float(weights(3000) @ trend(place)), rel=1e-9)
    assert 0.5 < moved.radius() / plain.radius() < 2


def test_a_slow_part_of_the_noise_widens_the_interval() -> None:
    """A run that wanders is known less well than one whose steps are independent."""
    rng = np.random.default_rng(3)
    fast, slow = rng.normal(size=(20, 4000)), remembering(rng, 20, 4000, 0.99)
    wide, narrow = (np.median([reading(run, CONFIDENCE).radius() for run in runs]) for runs in (slow, fast))
    assert wide > 5 * narrow


def test_the_interval_of_a_longer_run_is_foreseen() -> None:
    runs = np.random.default_rng(4).normal(size=(20, 4000))
    ratios = [reading(run, CONFIDENCE).radius() / reading(run[:1000], CONFIDENCE).radius(4.0) for run in runs]
    assert float(np.median(ratios)) == pytest.approx(1, rel=0.2)


def test_records_are_averaged_above_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = remembering(np.random.default_rng(5), 1, 6000, 0.5)[0]
    whole = reading(run, CONFIDENCE)
    monkeypatch.setattr(noise_module, "_MOST_RECORDS", 1000)
    averaged = reading(run, CONFIDENCE)
    assert averaged.estimate == whole.estimate
    assert averaged.error == pytest.approx(whole.error, rel=0.3)


@each("kind", ["white", "remembering", "heavy", "growing"])
def test_no_reading_of_a_run_leaves_the_truth_out_too_often(kind: str) -> None:
    """Read again and again while the run goes on. A single interval would be passed by every third run."""
    rng, runs, steps = np.random.default_rng(6), 50, 600
    found = {
        "white": rng.normal(size=(runs, steps)),
        "remembering": remembering(rng, runs, steps, 0.7),
        "heavy": rng.standard_t(2.5, (runs, steps)),
        "growing": rng.normal(size=(runs, steps)) * np.linspace(0, 1, steps),
    }[kind]
    lengths = np.unique(np.geomspace(LEAST_RECORDS, steps, 12).astype(int)).tolist()
    passed = 0
    for run in found:
        readings = [reading(run[:length], CONFIDENCE) for length in lengths]
        passed += any(abs(each.estimate) > each.radius() for each in readings)
    assert passed <= most(runs, 1 - CONFIDENCE)


# -- repeats


def sides(base: Floats, candidate: Floats) -> Aligned:
    """Runs of a single step each."""
    return Aligned(steps=np.array([0]), base=base[:, None], candidate=candidate[:, None], notes=())


@each("many", [2, 3, 8])
def test_pairs_are_compared_as_by_the_paired_test(many: int) -> None:
    rng = np.random.default_rng(many)
    luck = rng.normal(0, 10, many)  # runs of one seed resemble one another
    base, candidate = luck + rng.normal(size=many), luck + rng.normal(size=many)
    found = run_noise(sides(base, candidate), None)
    expected = stats.ttest_rel(candidate, base).confidence_interval(1 - 0.05 / 6)
    assert found.radius(CONFIDENCE) == pytest.approx((expected.high - expected.low) / 2)


@each("many", [(3, 5), (8, 4), (6, 6)])
def test_other_repeats_are_compared_as_by_welch(many: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    base, candidate = rng.normal(0, 1, many[0]), rng.normal(0, 2, many[1])
    if many[0] == many[1]:  # pairs that are opposites make the paired interval the wider one
        candidate = -base * 1.5
    found = run_noise(sides(base, candidate), None)
    expected = stats.ttest_ind(candidate, base, equal_var=False).confidence_interval(1 - 0.05 / 6)
    assert found.radius(CONFIDENCE) == pytest.approx((expected.high - expected.low) / 2)


@each("swapped", [False, True])
def test_a_single_run_has_the_noise_of_the_other_side(swapped: bool) -> None:
    repeats, single = np.random.default_rng(1).normal(size=5), np.array([0.3])
    found = run_noise(sides(single, repeats) if swapped else sides(repeats, single), None)
    assert found.freedom == 4
    assert found.error == pytest.approx(repeats.std(ddof=1) * np.sqrt(1 + 1 / 5))


@each("many", [2, 3, 5])
def test_repeats_that_are_added_until_it_is_decided_err_seldom(many: int) -> None:
    """Noise between runs alone, and a candidate that is worse by the tolerance."""
    rng, errors, cases = np.random.default_rng(many), {"equivalent": 0, "worse": 0}, 150
    for _ in range(cases):
        base, candidate = rng.normal(0, 0.1, 7), rng.normal(1, 0.1, 7)
        for count in range(many, 8):
            radius = run_noise(sides(base[:count], candidate[:count]), None).radius(CONFIDENCE)
            middle = float((candidate[:count] - base[:count]).mean())
            verdict = "equivalent" if middle + radius < 1 else "worse" if middle - radius > 1 else ""
            if verdict:
                errors[verdict] += 1
                break
    assert max(errors.values()) <= most(cases, 0.05)


def test_a_deviation_that_is_small_by_chance_at_one_step_does_not_count() -> None:
    """Two pairs whose differences cross at the last record: their deviation is zero there, and was not before."""
    steps = 64
    drift = np.linspace(1, -1, steps)
    share = weights(steps)
    drift -= float(share @ drift)
    runs = Aligned(steps=np.arange(steps), base=np.zeros((2, steps)), candidate=np.stack([drift, -drift]), notes=())
    assert float(np.std(runs.candidate @ share)) == pytest.approx(0, abs=1e-12)
    assert run_noise(runs, None).error > 0.1


def test_the_estimate_for_one_run_each_grows_with_what_the_runs_do_not_share() -> None:
    steps = np.arange(1000)
    rng = np.random.default_rng(0)
    batches, other = rng.normal(0, 0.1, (2, 1000))
    curve, own = 2 + np.exp(-steps / 500), rng.normal(0, 0.01, (2, 1000))

    def estimate(base: Floats, candidate: Floats) -> float:
        return run_noise(Aligned(steps=steps, base=base[None], candidate=candidate[None], notes=()), None).error

    same, apart = estimate(curve + batches + own[0], curve + batches + own[1]), estimate(curve + batches, curve + other)
    gain = np.exp(-1) - np.exp(-2)
    assert apart == pytest.approx(0.5 * gain, rel=0.3)
    assert same == pytest.approx(apart / 10, rel=0.3)
    assert estimate(2 + batches, 2 + other) < 0.2 * apart  # a loss that does not fall: no luck to be had


# -- the verdict


@each("runs,planted", [((1, 1), 0.05), ((3, 3), 0.05), ((1, 1), 0.0)])
def test_the_verdict_errs_seldom(runs: tuple[int, int], planted: float) -> None:
    """The first verdict of all readings, of a candidate that is worse by exactly the tolerance or not at all."""
    cases, steps = 20, 300
    found: list[str] = []
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        batches = 2 + np.exp(-np.arange(steps) / 40) + rng.normal(0, 0.1, (max(runs), steps))
        base, candidate = (
            [batches[k] + rng.normal(0, 0.02, steps) + rng.normal(0, 0.004) for k in range(many)] for many in runs
        )
        verdicts = [m.verdict for m in pl.parity(base, [c + planted for c in candidate], tolerance=0.05).history]
        found += [next((verdict for verdict in verdicts if verdict != "undecided"), "undecided")]
    wrong = ("equivalent", "worse", "better") if planted else ("worse", "better")
    assert all(found.count(verdict) <= most(cases, 0.05) for verdict in wrong)
    assert planted or found.count("equivalent") > cases / 2
