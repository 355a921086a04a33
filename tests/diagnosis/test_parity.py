"""The verdict on two recipes: planted differences are found, chance is not, and losses may be as messy as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from IPython.lib.pretty import pretty
from numpy.typing import NDArray

import plimsoll as pl
from plimsoll.errors import ArgumentError, NotRecordedError, RunError
from plimsoll.runs import RunWriter, Scalars
from tests.support.cases import each

Floats = NDArray[np.float64]
STEPS = 1000
TOLERANCE = 0.05


def losses(seed: int, *, own: float = 0.02, steps: int = STEPS, batches: int = 0) -> Floats:
    """A falling loss: the noise of its batches, which runs of one number share, and its own."""
    curve = 2 + np.exp(-np.arange(steps) / 100)
    shared = np.random.default_rng(1000 + batches).normal(0, 0.1, steps)
    return curve + shared + np.random.default_rng(seed).normal(0, own, steps)


def judged(base: Any, candidate: Any, **options: Any) -> pl.Parity:
    return pl.parity(base, candidate, **{"tolerance": TOLERANCE, **options})


def recorded(folder: Path, values: Floats, name: str = "loss", **others: Floats) -> Path:
    with RunWriter(folder) as writer:
        for step, value in enumerate(values):
            writer.write(Scalars(step=step, values={name: value, **{k: v[step] for k, v in others.items()}}))
    return folder


# -- verdicts


@each("added,verdict", [(0.0, "equivalent"), (0.2, "worse"), (-0.2, "better"), (0.046, "undecided")])
def test_a_planted_difference_is_judged(added: float, verdict: str) -> None:
    found = judged(losses(0), losses(1) + added)
    assert found.verdict == verdict
    assert added in found.difference and found.difference.low < found.difference.estimate < found.difference.high
    assert found.is_no_worse == (verdict in ("equivalent", "better"))
    assert (found.more_steps is None and found.more_seeds is None) == (verdict != "undecided")


@each("added,verdict", [(0.2, "better"), (-0.2, "worse"), (0.0, "equivalent")])
def test_higher_values_may_be_better(added: float, verdict: str) -> None:
    accuracy = 1 - losses(0) / 10
    found = pl.parity(accuracy, 1 - losses(1) / 10 + added, tolerance=0.01, scalar="accuracy", better="higher")
    assert found.verdict == verdict
    assert added in found.difference


@each("scalar", ["loss", "train/loss", "loss:actor", "eval_loss", "perplexity", "Error"])
def test_of_a_loss_lower_is_better(scalar: str) -> None:
    assert judged(losses(0), losses(1) + 0.2, scalar=scalar).verdict == "worse"


@each("scalar", ["accuracy", "floss", "glossary", "bleu"])
def test_of_other_scalars_the_direction_must_be_given(scalar: str) -> None:
    with pytest.raises(ArgumentError, match="expected better to be 'lower' or 'higher'"):
        judged(losses(0), losses(1), scalar=scalar)


def test_a_tolerance_in_per_cent_is_of_the_level_of_the_base() -> None:
    absolute, relative = judged(losses(0), losses(1)), judged(losses(0), losses(1), tolerance="2.5 %")
    assert relative.level == pytest.approx(2.0, abs=0.02)
    assert relative.tolerance == pytest.approx(0.025 * relative.level)
    assert relative.difference == absolute.difference
    assert " %" in relative.sentence and " %" not in absolute.sentence
    assert "differs by +200 %" in judged(losses(0), 3 * losses(0), tolerance="1 %").sentence


def test_identical_runs_are_equivalent() -> None:
    found = judged(losses(0), losses(0))
    assert found.verdict == "equivalent" and found.difference == 0.0 and found.noise == 0.0


def test_a_constant_difference_has_no_noise() -> None:
    found = judged(losses(0), losses(0) + 0.06)
    assert found.verdict == "worse" and found.difference.low == pytest.approx(0.06, abs=1e-9)


@each("sides", [(3, 3), (5, 1), (1, 5), (2, 4)])
def test_repeats_are_compared_by_their_own_noise(sides: tuple[int, int]) -> None:
    def runs(many: int, seed: int, added: float = 0.0) -> list[Floats]:
        luck = np.random.default_rng(seed).normal(0, 0.003, many)
        return [losses(seed + k, batches=k) + luck[k] + added for k in range(many)]

    same, worse = (judged(runs(sides[0], 10), runs(sides[1], 50, added), tolerance=0.3) for added in (0.0, 0.7))
    assert (same.verdict, worse.verdict) == ("equivalent", "worse")
    assert same.noise_from == "repeats" and same.runs == sides


def test_noise_between_runs_makes_a_single_pair_undecided_and_repeats_measure_it() -> None:
    """Runs of one recipe on other data: one of each cannot tell chance from the recipe."""
    rng = np.random.default_rng(5)
    fall = 10 / (20 + np.arange(STEPS) / 20)
    base, candidate = ([losses(k + s, batches=k + s) + fall + rng.normal(0, 0.02) for k in range(6)] for s in (0, 10))
    single = judged(base[0], candidate[0], tolerance=0.02)
    assert single.verdict == "undecided" and single.noise_from == "estimate"
    assert single.noise > 2 * judged(base[0], candidate[0], tolerance=0.02, run_noise=0).noise
    assert judged(base, candidate, tolerance=0.1).verdict == "equivalent"


def test_noise_between_runs_may_be_given() -> None:
    free, bound = (judged(losses(0), losses(1), run_noise=noise) for noise in (0, "5%"))
    assert free.verdict == "equivalent" and bound.verdict == "undecided"
    assert (free.noise_from, bound.noise_from) == ("given", "given")
    assert bound.noise == pytest.approx(0.05 * bound.level, rel=0.01)


def test_a_gap_that_grows_beyond_the_tolerance_is_not_equivalent() -> None:
    """Its mean is within the tolerance and its end is not."""
    drift = 0.058 * (np.arange(STEPS) / STEPS) ** 2
    found = judged(losses(0, own=0.001), losses(1, own=0.001) + drift)
    assert float(found.difference) < 0.8 * TOLERANCE
    assert found.verdict == "undecided" and any("grows" in note for note in found.notes)


# -- what would decide


def test_the_steps_that_are_said_to_decide_decide() -> None:
    base, candidate = losses(0, own=0.2, steps=20_000), losses(1, own=0.2, steps=20_000) + 0.01
    found = judged(base[:500], candidate[:500], run_noise=0)
    assert found.verdict == "undecided" and found.more_steps is not None
    assert 500 < 500 + found.more_steps < 15_000
    later = round(1.3 * (500 + found.more_steps))
    assert judged(base[:later], candidate[:later], run_noise=0).verdict == "equivalent"


def test_the_runs_that_are_said_to_decide_decide() -> None:
    rng = np.random.default_rng(1)
    runs = [(losses(k, batches=k), losses(100 + k, batches=k) + rng.normal(0.005, 0.01)) for k in range(60)]
    base, candidate = ([pair[side] for pair in runs] for side in (0, 1))
    found = judged(base[:3], candidate[:3], tolerance=0.02)
    assert found.verdict == "undecided" and found.more_seeds is not None
    many = 3 + 2 * found.more_seeds
    assert many <= 60
    assert judged(base[:many], candidate[:many], tolerance=0.02).verdict == "equivalent"


def test_a_difference_at_the_tolerance_is_decided_by_nothing() -> None:
    base = np.round(losses(0) * 256) / 256  # so that sums are exact
    found = judged(base, base + 0.0625, tolerance=0.0625)
    assert found.verdict == "undecided"
    assert found.more_steps is None and found.more_seeds is None
    assert "neither steps nor 100 more runs" in found.remaining


def test_noise_is_not_taken_for_a_difference_at_the_tolerance() -> None:
    """Short falling losses, the candidate's twice as high: far from the tolerance, and nothing alone decides."""
    rng, fall = np.random.default_rng(0), 3 * np.exp(-np.arange(200) / 50)
    base, candidate = (factor * (0.2 + fall * np.exp(0.05 * rng.normal(size=200))) for factor in (1, 2))
    found = judged(base, candidate, tolerance="5%")
    assert found.verdict == "undecided" and (found.more_steps, found.more_seeds) == (None, None)
    assert "neither steps nor 100 more runs" in found.remaining and "near the tolerance" not in found.remaining


def test_few_steps_say_nothing_of_a_single_pair() -> None:
    found = judged(losses(0)[:20], losses(1)[:20])
    assert found.verdict == "undecided" and found.more_steps == 12
    assert not np.isfinite(found.difference.high)


def test_few_steps_are_enough_for_repeats() -> None:
    """An evaluation at the end of each of five runs."""
    base, candidate = (
        [[value] for value in values] for values in ([0.9, 0.91, 0.9, 0.92, 0.91], [0.7, 0.71, 0.7, 0.72, 0.7])
    )
    assert pl.parity(base, candidate, tolerance=0.02, scalar="accuracy", better="higher").verdict == "worse"


# -- losses as they are


def test_missing_values_are_left_out() -> None:
    holes = losses(1)
    holes[::7] = np.nan
    holes[3::50] = np.inf
    found = judged(losses(0), holes)
    assert found.verdict == "equivalent"
    assert found.steps == np.count_nonzero(np.isfinite(holes))
    assert any("left out" in note for note in found.notes)


@each("end", [1, 2])
def test_a_gap_at_the_end_is_like_those_before(end: int) -> None:
    """A value that is missing now and then is missing at the last step too, now and then."""
    candidate = losses(1)
    candidate[[100, 101, 300]] = np.nan
    candidate[-end:] = np.nan
    assert judged(losses(0), candidate).diverged == (0, 0)
    candidate[-3:] = np.nan
    assert judged(losses(0), candidate).diverged == (0, 1)


def test_none_is_a_missing_value() -> None:
    assert judged([*losses(0)], [None, *losses(1)[1:]]).steps == STEPS - 1


def test_the_longer_run_is_cut() -> None:
    found = judged(losses(0), losses(1)[:700])
    assert (found.verdict, found.last_step) == ("equivalent", 699)
    assert any("step 699" in note and "candidate" in note for note in found.notes)


def test_steps_are_paired_by_their_numbers() -> None:
    """Another logging interval: values at the common steps."""
    base, candidate = losses(0, steps=3000), losses(1, steps=3000)
    found = judged({s: base[s] for s in range(0, 3000, 10)}, {s: candidate[s] for s in range(0, 3000, 25)})
    assert (found.steps, found.first_step, found.last_step) == (60, 0, 2950)
    assert float(found.difference) == pytest.approx(np.average((candidate - base)[::50], weights=np.arange(1, 61) ** 2))


def test_steps_that_never_meet_are_averaged() -> None:
    base, candidate = losses(0, steps=3000), losses(1, steps=3000)
    found = judged({s: base[s] for s in range(0, 3000, 4)}, {s: candidate[s] for s in range(1, 3000, 6)}, tolerance=0.1)
    assert 495 <= found.steps <= 500
    assert any("different steps" in note for note in found.notes)
    assert found.verdict == "equivalent"
    shifted = judged({s: base[s] for s in range(0, 3000, 4)}, {s: candidate[s] + 0.5 for s in range(1, 3000, 6)})
    assert shifted.verdict == "worse"


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(ArgumentError, match="steps in common.*base has steps 0 to 99.*candidate has steps 200 to 299"):
        judged(losses(0)[:100], dict(zip(range(200, 300), losses(1), strict=False)))


def test_a_restart_replaces_what_it_repeats(tmp_path: Path) -> None:
    """The first attempt had gone wrong from step 300 on, and was repeated from there."""
    values = losses(1)
    with RunWriter(tmp_path) as writer:
        for step in range(500):
            writer.write(Scalars(step=step, values={"loss": values[step] + 5.0 * (step >= 300)}))
    with RunWriter(tmp_path, resume_from=300) as writer:
        for step in range(300, STEPS):
            writer.write(Scalars(step=step, values={"loss": values[step]}))
    found = judged(losses(0), tmp_path)
    assert found.verdict == "equivalent" and found.steps == STEPS


def nan_to_the_end(values: Floats) -> Floats:
    return np.where(np.arange(len(values)) >= 700, np.nan, values)


def infinite_at_the_end(values: Floats) -> Floats:
    return np.where(np.arange(len(values)) >= 990, np.inf, values)


def stopped_at_a_nan(values: Floats) -> Floats:
    return np.append(values[:400], np.nan)


def exploded(values: Floats) -> Floats:
    return np.where(np.arange(len(values)) >= 985, 1e30, values)


def never_came_back(values: Floats) -> Floats:
    return np.where(np.arange(len(values)) >= 900, 4.0, values)


def never_finite(values: Floats) -> Floats:
    return np.full_like(values, np.nan)


FAILURES = [nan_to_the_end, infinite_at_the_end, stopped_at_a_nan, exploded, never_came_back, never_finite]


@each("fail", FAILURES)
def test_a_candidate_that_diverges_is_worse(fail: Callable[[Floats], Floats]) -> None:
    found = judged(losses(0), fail(losses(1)))
    assert found.verdict == "worse" and found.diverged == (0, 1)
    assert found.difference == np.inf
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["difference"]["estimate"] == "inf"


@each("fail", FAILURES)
def test_a_base_that_diverges_is_worse(fail: Callable[[Floats], Floats]) -> None:
    assert judged(fail(losses(0)), losses(1)).verdict == "better"


def test_where_both_diverge_nothing_is_judged() -> None:
    found = judged(nan_to_the_end(losses(0)), exploded(losses(1)))
    assert found.verdict == "undecided" and found.diverged == (1, 1)
    assert "Diverged: base from step 700 on, candidate from step 985 on." in str(found)


def test_an_accuracy_that_breaks_down_has_diverged() -> None:
    accuracy = 1 - losses(0, own=0.001) / 10
    broken = np.where(np.arange(STEPS) > 900, 0.1, accuracy)
    assert pl.parity(accuracy, broken, tolerance=0.01, scalar="accuracy", better="higher").diverged == (0, 1)


def test_one_of_five_that_diverges_is_not_equivalent() -> None:
    base, candidate = ([losses(k + side, batches=k) for k in range(5)] for side in (0, 10))
    assert judged(base, candidate).verdict == "equivalent"
    candidate[2] = nan_to_the_end(candidate[2])
    found = judged(base, candidate)
    assert found.verdict == "undecided" and found.diverged == (0, 1) and found.runs == (5, 4)


def test_five_of_five_that_diverge_are_worse() -> None:
    base = [losses(k) for k in range(5)]
    assert judged(base, [nan_to_the_end(values) for values in base]).verdict == "worse"


def test_a_spike_is_no_divergence() -> None:
    spiky = losses(1)
    spiky[600:606] = 50.0
    found = judged(losses(0), spiky)
    assert found.diverged == (0, 0) and found.verdict == "undecided"


def test_a_candidate_that_never_learns_is_worse() -> None:
    stuck = 3 + losses(1) - losses(1, own=0.0)
    found = judged(losses(0), stuck)
    assert found.verdict == "worse" and np.isfinite(found.difference.high)


# -- sources


def test_runs_paths_and_sequences_give_the_same(tmp_path: Path) -> None:
    base, candidate = losses(0), losses(1)
    folders = recorded(tmp_path / "bf16", base), recorded(tmp_path / "fp8", candidate)
    expected = judged(base, candidate)
    for sides in (folders, map(str, folders), map(pl.Run, folders), ([folders[0]], [pl.Run(folders[1])])):
        found = judged(*sides)
        assert found.difference == expected.difference and found.history == expected.history


def test_an_unfinished_step_of_a_live_run_is_no_divergence(tmp_path: Path) -> None:
    values = np.append(losses(1), np.nan)
    writer = RunWriter(tmp_path)
    for step, value in enumerate(values):
        writer.write(Scalars(step=step, values={"loss": value}))
    assert writer.flush()
    assert judged(losses(0), pl.Run(tmp_path)).diverged == (0, 0)
    writer.close()
    assert judged(losses(0), pl.Run(tmp_path)).diverged == (0, 1)


def test_a_scalar_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    recorded(tmp_path / "run", losses(0)[:50])
    with pytest.raises(NotRecordedError, match="scalar 'train_loss'; got run, which has loss"):
        judged(tmp_path / "run", losses(1), scalar="train_loss")
    with pytest.raises(RunError):
        judged(tmp_path / "none", losses(1))


@each(
    "base,match",
    [
        (3.0, "expected base to be a run"),
        (np.float64(3), "expected base to be a run"),
        ((x for x in [1.0]), "expected base to be a run"),
        ([], "none in base"),
        ([[]], "none in base"),
        (["a", 2.0], "RunError|no folder|No such|which is no"),
        ([1.0, "a"], "runs, paths or numbers"),
        ([[[1.0]]], "flat sequence"),
        ({0.5: 1.0}, "runs, paths or numbers"),
    ],
)
def test_what_is_no_run_is_refused(base: Any, match: str) -> None:
    with pytest.raises((ArgumentError, RunError), match=match):
        judged(base, losses(1))


@each(
    "options,match",
    [
        ({"tolerance": 0}, "tolerance to be above 0"),
        ({"tolerance": "0 %"}, "tolerance to be above 0"),
        ({"tolerance": -1.0}, "tolerance to be a number"),
        ({"tolerance": float("nan")}, "tolerance to be a number"),
        ({"tolerance": "1 percent"}, "tolerance to be an amount"),
        ({"tolerance": "1.2.3"}, "tolerance to be an amount"),
        ({"confidence": 1.0}, "confidence to be a number"),
        ({"confidence": 0.1}, "confidence to be a number"),
        ({"better": "more"}, "better to be 'lower' or 'higher'"),
        ({"run_noise": -0.1}, "run_noise to be a number"),
        ({"until": -1}, "up to step -1"),
        ({"until": "9"}, "until to be an integer; got until='9'"),
        ({"scalar": 5}, "better to be 'lower' or 'higher' for the scalar '5'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        judged(losses(0), losses(1), **options)


# -- the record


def test_the_history_is_what_was_known_then() -> None:
    """A verdict that was read at a step is the one that the history has for it."""
    base, candidate = losses(0), losses(1) + 0.2
    found = judged(base, candidate)
    assert found.history[-1].difference == found.difference
    for moment in found.history[::12]:
        then = judged(base, candidate, until=moment.step)
        assert (then.difference, then.verdict) == (moment.difference, moment.verdict)
    assert all(m.verdict == "worse" for m in found.history if m.step >= found.since_step)
    assert any(m.verdict != "worse" for m in found.history if m.step < found.since_step)


def test_speed_at_equal_quality(tmp_path: Path) -> None:
    """A step of the candidate takes two thirds of the time, and five of them do what four of the base do."""
    clock = np.arange(2000.0)
    base, candidate = 1 + 400 / (100 + clock), 1 + 400 / (100 + clock / 1.25)
    runs = [
        recorded(tmp_path / name, values, elapsed_seconds=seconds * clock)
        for name, values, seconds in (("base", base, 0.3), ("candidate", candidate, 0.2))
    ]
    found = pl.parity(*runs, tolerance="1%")
    assert found.speed.steps is not None and found.speed.at_equal_quality is not None
    assert float(found.speed.steps) == pytest.approx(1.25, abs=0.05)
    assert found.speed.per_step == pytest.approx(1.5)
    assert float(found.speed.at_equal_quality) == pytest.approx(1.2, abs=0.05)
    back = pl.parity(*runs[::-1], tolerance="1%").speed
    assert back.steps is not None and float(back.steps) == pytest.approx(0.8, abs=0.04)


def test_seconds_of_each_step_will_do(tmp_path: Path) -> None:
    runs = [recorded(tmp_path / f"{s}", losses(s), step_seconds=np.full(STEPS, 0.1 * (1 + s))) for s in (0, 1)]
    assert pl.parity(*runs, tolerance=0.1).speed.per_step == pytest.approx(0.5)


def test_runs_that_were_watched_have_the_times_of_their_records(tmp_path: Path) -> None:
    for name, seconds in (("base", 0.4), ("candidate", 0.1)):
        with RunWriter(tmp_path / name) as writer:
            for step, value in enumerate(losses(0, steps=200)):
                pause = 60.0 if step >= 100 else 0.0  # an evaluation
                writer.write(Scalars(step=step, values={"loss": value}, time=1e9 + seconds * step + pause))
    found = pl.parity(tmp_path / "base", tmp_path / "candidate", tolerance=0.1)
    assert found.speed.per_step == pytest.approx(4.0, rel=1e-3)


def test_it_is_shown_as_text_and_as_data() -> None:
    found = judged(losses(0), losses(1))
    assert pretty(found) == str(found)
    assert str(found).startswith("Equivalent: over 1,000 steps the candidate's loss differs by ")
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["verdict"] == "equivalent" and data["runs"] == {"base": 1, "candidate": 1}
    assert len(data["history"]) == len(found.history)
    assert [name for name, _ in found.facts()][:2] == ["Difference", "Tolerance"]
    assert found.table().row_count == len(found.facts())


def test_losses_of_any_size_are_compared() -> None:
    rng = np.random.default_rng(0)
    for size in (1e130, 1e-130):
        base, candidate = ([size * (2 + rng.standard_normal(40)) for _ in range(3)] for _ in range(2))
        found, plain = (
            pl.parity([run / by for run in base], [run / by for run in candidate], tolerance=0.5 * size / by)
            for by in (1, size)
        )
        assert found.verdict == plain.verdict
        assert found.difference.high / size == pytest.approx(plain.difference.high, rel=1e-9)
