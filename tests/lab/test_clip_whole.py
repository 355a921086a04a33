"""`clip` beyond the demo: the other trainings in miniature, and that each claim can fail."""

import math
from pathlib import Path

import pytest

from plimsoll.runs import Run
from plimsoll_lab import Bench, Claim, Training
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.clip import experiment
from plimsoll_lab.experiments.clip.experiment import CLIP, claims, measure_with, said
from plimsoll_lab.experiments.clip.training import ALL_KINDS, DEMO_KINDS, HIGH, SHORT, Setup, setup_for
from tests.support.cases import each

TINY = Setup(
    steps=40, hard_at=24, hard_batches=6, warmup=5, width=16, heads=2, layers=1, batch=8, black=2, every=5,
    learning_rate=2e-3,
)  # fmt: skip
TRAINED = ("bf16", "fp16-parameter", "fp16-never-hard", "bf16-always-hard", "fp16-both-always-hard")

BURST = {
    "scale_before": 16.0, "scale_lowest": 6.0, "scale_fell": 10.0, "lost_before": 0.01, "lost_after": 0.0,
    "lost_end": 0.0, "loss_end": 0.5,
    "batches_lost": 0.0, "alarms": 0.0,
}  # fmt: skip
DEMO = {
    "fp16": BURST | {
        "nonfinite_steps": 10.0, "scale_end": 6.0, "lost_after": 0.99, "lost_end": 0.99, "loss_end": 0.74,
        "scale-collapse_since": 301.0, "underflow-high_since": 310.0,
    },
    "bf16": BURST | {
        "gradient_rise": 1.3, "progress": 0.3, "underflow_findings": 0.0, "spanning_hard": 1.0, "spanning_others": 0.0,
    },
    "fp16-spectral": BURST | {"scale_back_after": 28.0},
    "fp16-layer": BURST | {"scale_lowest": 16.0},
}  # fmt: skip
SOUND: dict[str, dict[str, float]] = DEMO | {
    "fp16-high": BURST,
    "fp16-short": BURST | {"lost_after": 0.6, "lost_end": 0.6},
    "fp16-both": BURST,
    "fp16-zhao": BURST | {"scale_fell": 21.0, "lost_after": 0.4},
    "fp16-parameter": BURST | {"sat_out": 10.0, "scale_bytes": 38.0, "scale_bytes_per_weight": 0.0002},
    "fp16-element": BURST | {"sat_out": 10.0, "scale_bytes": 1e5, "scale_bytes_per_weight": 1.9},
    "fp16-never-hard": {
        "lost_before": 0.01, "lost_after": 0.25, "scale_before": 16.0, "scale_end": 16.0, "gradient_fell_binades": 2.0,
        "underflow_since": 450.0,
    },
    "bf16-always-hard": {"loss_end": 1.4, "spanning_hard_share": 0.96},
    "fp16-both-always-hard": {
        "scale_before": 24.0, "fell_at_once": 20.0, "highest_later": 5.0, "lost_after": 0.99, "lost_end": 0.99,
        "loss_end": 3.4,
    },
    "fp16-layer-always-hard": {"loss_end": 1.4, "lost_end": 0.0},
    "fp16-parameter-always-hard": {"loss_end": 1.4, "lost_end": 0.01},
}  # fmt: skip


def by_id(numbers: dict[str, dict[str, float]]) -> dict[str, Claim]:
    return {claim.id: claim for claim in claims(Setup(), numbers)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    """Some of the kinds, the others' numbers being made up."""
    place = Bench(
        runs=tmp_path_factory.mktemp("clip"), seed=0, device="cpu", steps=None, full=False, progress=Silent()
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "ALL_KINDS", {name: ALL_KINDS[name] for name in TRAINED})
        patch.setattr(experiment, "claims", lambda setup, numbers: claims(setup, SOUND | numbers))
        patch.setattr(experiment, "said", lambda numbers: said(SOUND | numbers))
        measured = measure_with(place, TINY, workers=1)
    assert len(measured.claims) == len(by_id(SOUND)) and len(measured.said) == 4
    return {training.name: training for training in measured.trainings}


# -- trainings ---------------------------------------------------------------------------------------------------------


def test_every_kind_is_as_long_as_it_should_be(trained: dict[str, Training]) -> None:
    lengths = {name: len(Run(training.run).scalars("loss")[0]) for name, training in trained.items()}
    assert list(lengths.values()) == [40, 40, 160, 20, 20] and tuple(lengths) == TRAINED


def test_hard_batches_are_those_of_the_kind() -> None:
    hard = {
        name: [step for step in range(40) if TINY.black_at(ALL_KINDS[name], step)]
        for name in ("fp16", "fp16-never-hard", "bf16-always-hard")
    }
    assert list(hard.values()) == [list(range(24, 30)), [], list(range(40))]


def test_a_scale_per_parameter_lets_the_embedding_sit_out_and_nothing_else(trained: dict[str, Training]) -> None:
    numbers = trained["fp16-parameter"].numbers
    assert numbers["sat_out"] == TINY.hard_batches and numbers["batches_lost"] == 0
    assert numbers["scale_before"] == numbers["scale_end"] == 16
    assert numbers["scale_bytes"] == 2 * 11  # of five matrices in each tower, and the embedding
    model = Run(trained["fp16-parameter"].run)
    steps, _ = model.series("gradients", "patches.embed.weight", "count")
    assert not any(TINY.hard_at <= step < TINY.hard_end for step in steps.tolist())


def test_where_all_batches_are_hard_a_high_scale_falls_at_once_and_stays(trained: dict[str, Training]) -> None:
    both = trained["fp16-both-always-hard"]
    _, scale = Run(both.run).scalars("scale")
    assert scale[0] == HIGH and both.numbers["fell_at_once"] == 24 - math.log2(scale[:9].min()) == 8
    assert both.numbers["highest_later"] == 15 and both.numbers["scale_end"] < 8
    assert trained["bf16-always-hard"].good and trained["bf16-always-hard"].outcome == "trains on"


def test_a_single_layer_spans_more_than_fp16_in_hard_batches_only(trained: dict[str, Training]) -> None:
    burst, always = trained["bf16"].numbers, trained["bf16-always-hard"].numbers
    assert burst["spanning_hard_share"] == burst["spanning_hard"] == 1 and burst["spanning_others"] == 0
    assert burst["span_hard_binades"] > 40 and burst["span_others_binades"] < 40
    assert always["span_hard_binades"] > 40 and math.isnan(always["spanning_others"])
    held = {name: s for _, _, name, s in Run(trained["bf16"].run).spectra("activation_gradients", steps=slice(24, 30))}
    spanning = {name for name, s in held.items() if s.nonzero and s.window("fp16") is None}
    assert spanning == {"patches.embed:output"}


def test_without_hard_batches_the_numbers_are_those_of_the_run(trained: dict[str, Training]) -> None:
    training = trained["fp16-never-hard"]
    norms = Run(training.run).scalars("grad_norm")[1]
    early, late = sorted(norms[5:26])[10], sorted(norms[120:])[20]
    assert training.numbers["gradient_fell_binades"] == pytest.approx(math.log2(early / late), abs=0.1)
    assert training.numbers["scale_before"] == training.numbers["scale_end"] == 16
    assert training.good is (training.numbers["lost_after"] <= 0.05)


def test_stock_scalers_are_torchs_with_these_arguments() -> None:
    made = {name: ALL_KINDS[name].scaler for name in ("fp16", "fp16-high", "fp16-short", "fp16-both")}
    scalers = [make(None, "cpu") for make in made.values() if make is not None]  # type: ignore[arg-type]
    assert [(s.get_scale(), s.get_growth_interval()) for s in scalers] == [
        (2.0**16, 2000), (HIGH, 2000), (2.0**16, SHORT), (HIGH, SHORT)
    ]  # fmt: skip


# -- claims ------------------------------------------------------------------------------------------------------------


def test_all_claims_hold_of_sound_numbers_and_have_names_of_their_own() -> None:
    found = claims(Setup(), SOUND)
    assert all(claim.holds for claim in found), [claim.id for claim in found if not claim.holds]
    assert len({claim.id for claim in found}) == len(found) == 46
    assert set(SOUND) == set(ALL_KINDS) and len(DEMO_KINDS) == 4


@each(
    ("who", "change", "breaks"),
    [
        ("fp16-high", {"scale_fell": 9.0}, "high-falls"),
        ("fp16-short", {"scale_fell": 9.0}, "short-falls"),
        ("fp16-both", {"scale_fell": 9.0}, "both-falls"),
        ("fp16-short", {"lost_after": 0.04}, "short-still-lost"),
        ("fp16-high", {"loss_end": 0.56}, "high-outlasts"),
        ("fp16-zhao", {"scale_fell": 9.0}, "zhao-falls"),
        ("fp16-zhao", {"lost_after": 0.04}, "zhao-not-enough"),
        ("fp16-parameter", {"batches_lost": 1.0}, "parameter-no-batch-lost"),
        ("fp16-parameter", {"lost_after": 0.06}, "parameter-gradients-whole"),
        ("fp16-parameter", {"loss_end": 0.56}, "parameter-as-bf16"),
        ("fp16-parameter", {"sat_out": 11.0}, "parameter-one-sits-out"),
        ("fp16-parameter", {"sat_out": 0.0}, "parameter-one-sits-out"),
        ("fp16-element", {"loss_end": 0.56}, "element-as-bf16"),
        ("fp16-never-hard", {"lost_before": 0.06}, "never-sound-at-first"),
        ("fp16-never-hard", {"lost_after": 0.09}, "never-often-zero"),
        ("fp16-never-hard", {"scale_end": 18.0}, "never-scale-stays"),
        ("fp16-never-hard", {"underflow_since": math.nan}, "never-told"),
        ("bf16", {"spanning_hard": 0.0}, "hard-spans"),
        ("bf16", {"spanning_others": 1.0}, "others-do-not"),
        ("bf16-always-hard", {"spanning_hard_share": 0.7}, "always-spans"),
        ("fp16-both-always-hard", {"fell_at_once": 8.0}, "always-falls-at-once"),
        ("fp16-both-always-hard", {"highest_later": 16.0}, "always-stays-down"),
        ("fp16-both-always-hard", {"lost_after": 0.7}, "always-gradients-zero"),
        ("fp16-both-always-hard", {"loss_end": 1.5}, "always-stalls"),
        ("fp16-layer-always-hard", {"loss_end": 1.6}, "always-layer"),
        ("fp16-parameter-always-hard", {"loss_end": 1.6}, "always-parameter"),
    ],
)
def test_each_claim_can_fail(who: str, change: dict[str, float], breaks: str) -> None:
    assert not by_id(SOUND | {who: SOUND[who] | change})[breaks].holds


def test_what_is_said_of_remedies_follows_from_the_numbers() -> None:
    burst, always, never, cost = said(SOUND)
    assert "After ten hard batches this works: 2^24 to begin with (1.00 of BF16's loss)" in burst
    assert "doubling every 100 steps (1.00, 60 % of gradients lost)" in burst.split("This does not: ")[1]
    assert always.endswith("This does not: 2^24 and doubling every 100 steps (2.43, 99 % of gradients lost).")
    assert "1.0 % of gradients at first and 25 % in the end" in never and "38 bytes" in cost
    fails = {name: {**SOUND[name], "loss_end": 9.0} for name in SOUND if name.startswith("fp16")}
    assert "this works: nothing but BF16." in said(SOUND | fails)[0]


def test_the_settings_are_of_the_whole_and_too_few_steps_are_refused(tmp_path: Path) -> None:
    place = Bench(runs=tmp_path, seed=0, device="cpu", steps=200, full=False, progress=Silent())
    assert CLIP.settings(place)["steps"] == 200 == setup_for(200, full=False).steps
