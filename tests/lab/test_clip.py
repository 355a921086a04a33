"""The small CLIP: its data, its model, and that its claims are of what happened in its runs."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plimsoll.runs import Run
from plimsoll.scaling import DynamicScaler
from plimsoll_lab import Bench, Claim, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.clip.demo import claims, judged, measure_with
from plimsoll_lab.experiments.clip.model import (
    COLOURS,
    EPSILON,
    LENGTH,
    VOCABULARY,
    Batch,
    Clip,
    contrastive_loss,
    make_batch,
    tokens,
)
from plimsoll_lab.experiments.clip.training import ALL_KINDS, DEMO_KINDS, FP16, Setup, setup_for, train_all
from plimsoll_lab.running.workers import one_thread
from tests.support.cases import each

SMALL = Setup(
    steps=120, hard_at=70, warmup=10, width=32, heads=2, layers=1, batch=16, black=4, every=5, learning_rate=2e-3
)
# What a training so short and small cannot show: there is no time to learn after the hard batches.
TOO_SHORT_FOR = {"spectral-goes-on", "fp16-stalls"}


def bench(folder: Path, seed: int = 0) -> Bench:
    folder.mkdir(parents=True, exist_ok=True)
    return Bench(runs=folder, seed=seed, device="cpu", steps=None, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return measure_with(bench(tmp_path_factory.mktemp("clip")), SMALL, workers=1)


def by_id(found: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in found}


# -- data and model ----------------------------------------------------------------------------------------------------


def test_captions_are_words_that_are_all_known_and_say_what_is_drawn() -> None:
    batch = make_batch(0, 5, 16)
    assert batch.captions.shape == (16, LENGTH) and batch.captions.unique(dim=0).shape[0] == 16
    words = [[VOCABULARY[token] for token in row] for row in batch.captions.tolist()]
    assert all(row[:2] == ["<start>", "a"] and "<end>" in row for row in words)
    assert tokens("a large red circle left of a small blue square") == [
        VOCABULARY.index(word)
        for word in ("<start>", "a", "large", "red", "circle", "left", "of", "a", "small", "blue", "square", "<end>")
    ]


def test_a_picture_shows_what_its_caption_says() -> None:
    batch, places = make_batch(0, 1, 64), {"left": (8, 16), "right": (24, 16), "above": (16, 8), "below": (16, 24)}
    shown = 0
    for picture, row in zip(batch.pictures, batch.captions.tolist(), strict=True):
        words = [VOCABULARY[token] for token in row]
        x, y = places[words[5]]
        second = words.index("a", 5)
        for at, (_, size, colour, shape) in (((x, y), words[1:5]), ((32 - x, 32 - y), words[second : second + 4])):
            if size == "large" and shape in ("circle", "square"):
                drawn = picture[:, at[1] - 1 : at[1] + 1, at[0] - 1 : at[0] + 1].mean((1, 2)) * 255
                assert drawn.tolist() == pytest.approx(COLOURS[colour], abs=30), words
                shown += 1
    assert shown > 20
    assert batch.pictures.shape == (64, 3, 32, 32)
    assert batch.pictures.min() >= 0 and batch.pictures.max() <= 1


def test_batches_follow_from_seed_and_step_and_hard_ones_differ_in_black_pictures_only() -> None:
    def same(a: Batch, b: Batch) -> bool:
        return a.pictures.equal(b.pictures) and a.captions.equal(b.captions)

    assert same(make_batch(1, 7, 8), make_batch(1, 7, 8))
    assert not same(make_batch(1, 7, 8), make_batch(1, 8, 8)) and not same(make_batch(1, 7, 8), make_batch(2, 7, 8))
    plain, hard = make_batch(1, 7, 8), make_batch(1, 7, 8, black=2)
    assert not hard.pictures[:2].any() and hard.pictures[2:].equal(plain.pictures[2:])
    assert hard.captions.equal(plain.captions)


def test_loud_activations_change_gradients_of_activations_and_not_what_is_computed() -> None:
    batch, found = make_batch(0, 0, 8), []
    for gain in (1.0, 2.0**11):
        torch.manual_seed(0)
        model = Clip(width=32, layers=1, heads=2, gain=gain).double()
        inner: list[torch.Tensor] = []
        model.image.blocks[0].qkv.register_full_backward_hook(lambda _m, _i, out, inner=inner: inner.append(out[0]))
        loss = contrastive_loss(model(batch.pictures.double(), batch.captions))
        loss.backward()
        found.append((loss.detach(), model.image.blocks[0].up.weight.grad, inner[0]))
    (loss, weight, inner), (loud_loss, loud_weight, loud_inner) = found
    # Equal but for the epsilons of the norms, which count for less where activations are large.
    torch.testing.assert_close(loud_loss, loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(loud_weight, weight, rtol=1e-2, atol=1e-3 * weight.abs().max().item())
    torch.testing.assert_close(loud_inner * 2.0**11, inner, rtol=1e-2, atol=1e-3 * inner.abs().max().item())


def test_the_loss_is_a_share_of_the_mean_over_the_whole_batch() -> None:
    similarity = torch.randn(8, 8)
    own = [torch.nn.functional.cross_entropy(side, torch.arange(8)) for side in (similarity, similarity.T)]
    assert contrastive_loss(similarity) == pytest.approx((own[0] + own[1]).item() / 2)


def test_a_black_patch_has_a_gradient_that_is_divided_by_epsilon() -> None:
    model = Clip(width=32, layers=1, heads=2)
    seen: list[torch.Tensor] = []
    linear = torch.nn.functional.linear

    def kept(*arguments: Any) -> torch.Tensor:
        result = linear(*arguments)
        if arguments[1] is model.patches.embed.weight:
            result.register_hook(seen.append)
        return result

    batch = make_batch(0, 0, 8, black=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", kept)
        contrastive_loss(model(batch.pictures, batch.captions)).backward()
    black, lit = seen[0][:2].abs().max(), seen[0][2:].abs().max()
    assert black > 1e-3 / EPSILON * lit
    assert model.patches.embed.weight.grad is not None and model.patches.embed.weight.grad.isfinite().all()


# -- trainings and claims ----------------------------------------------------------------------------------------------


def test_the_claims_hold_where_the_training_is_long_enough_for_them(measured: Measured) -> None:
    failed = {claim.id: claim.measured for claim in measured.claims if not claim.holds}
    assert set(failed) <= TOO_SHORT_FOR, failed
    assert len(measured.claims) == 18 and len(by_id(measured.claims)) == 18


def test_what_is_found_and_where(measured: Measured) -> None:
    fp16, bf16, spectral, layer = measured.trainings
    since = {f.rule: f.since_step for f in fp16.findings if f.severity == "alarm"}
    assert SMALL.hard_at <= since["scale-collapse"] <= SMALL.hard_end
    assert SMALL.hard_at <= since["underflow-high"] <= SMALL.hard_end + 3 * SMALL.every
    assert not any(f.severity == "alarm" for f in (*bf16.findings, *layer.findings))
    assert any("patches" in name for f in layer.findings if f.rule == "nonfinite" for name in f.where)
    assert spectral.numbers["repeated"] > 0 and spectral.numbers["batches_lost"] == 0


def test_the_numbers_are_those_of_the_runs(measured: Measured) -> None:
    for training in measured.trainings:
        run = Run(training.run)
        steps, loss = run.scalars("loss")
        expected = torch.tensor(loss[-60:]).median().item()
        assert training.numbers["loss_end"] == pytest.approx(expected, rel=0.1)
        assert len(steps) == SMALL.steps + training.numbers["repeated"]
    scale = Run(measured.trainings[0].run).scalars("scale")[1]
    assert (scale[0], scale[-1]) == (2.0**16, 2.0**6)


def test_all_trainings_begin_alike(measured: Measured) -> None:
    first = [Run(training.run).scalars("loss")[1][0] for training in measured.trainings]
    assert first[0] == first[2] == first[3] == pytest.approx(first[1], rel=1e-2)


@each(
    ("who", "change", "breaks"),
    [
        (0, {"nonfinite_steps": 9.0}, "fp16-nan"),
        (0, {"scale_end": 7.0}, "fp16-scale-falls"),
        (0, {"lost_before": 0.06}, "fp16-sound-before"),
        (0, {"lost_after": 0.4}, "fp16-gradients-zero"),
        (0, {"scale-collapse_since": math.nan}, "collapse-found"),
        (0, {"scale-collapse_since": 69.0}, "collapse-found"),
        (0, {"underflow-high_since": 121.0}, "underflow-found"),
        (1, {"gradient_rise": 1.0}, "bf16-gradient-rises"),
        (1, {"progress": 0.04}, "bf16-goes-on"),
        (1, {"underflow_findings": 1.0}, "bf16-nothing-found"),
        (2, {"batches_lost": 1.0}, "spectral-no-batch-lost"),
        (2, {"scale_back_after": math.inf}, "spectral-recovers"),
        (3, {"batches_lost": 1.0}, "layer-no-batch-lost"),
        (3, {"scale_lowest": 15.0}, "layer-scale-stays"),
        (3, {"lost_after": 0.2}, "layer-gradients-whole"),
        (3, {"loss_end": 9.0}, "layer-as-bf16"),
        (3, {"alarms": 1.0}, "layer-no-alarm"),
    ],
)
def test_each_claim_can_fail(measured: Measured, who: int, change: dict[str, float], breaks: str) -> None:
    numbers = [dict(training.numbers) for training in measured.trainings]
    assert by_id(claims(SMALL, *numbers))[breaks].holds
    numbers[who] |= change
    assert not by_id(claims(SMALL, *numbers))[breaks].holds


def test_another_scaler_in_the_stock_scalers_place_breaks_its_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    recovers: Callable[..., Any] = lambda _, on: DynamicScaler(on, regrowth_interval=2)  # noqa: E731
    monkeypatch.setitem(ALL_KINDS, "fp16", dataclasses.replace(FP16, scaler=recovers))  # type: ignore[arg-type]
    place = bench(tmp_path / "runs")
    train_all([FP16], SMALL, place, workers=1)
    fp16 = judged(FP16, SMALL, Run(place.runs / "fp16")).numbers
    found = by_id(claims(SMALL, fp16, *(training.numbers for training in measured.trainings[1:])))
    assert not found["fp16-scale-falls"].holds and not found["fp16-gradients-zero"].holds
    assert found["fp16-nan"].holds


def test_sizes_for_other_lengths() -> None:
    assert (setup_for(None, full=False).hard_at, setup_for(None, full=False).steps) == (300, Setup().steps)
    assert (setup_for(150, full=False).hard_at, setup_for(2000, full=False).hard_at) == (100, 300)
    assert setup_for(None, full=True).width > Setup().width
    assert setup_for(500, full=True).steps == 500


class Counted(Silent):
    """What an experiment has reported."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.steps = 0

    def begin(self, title: str, steps: int) -> None:
        self.begun.append((title, steps))

    def advance(self) -> None:
        self.steps += 1


def test_workers_train_to_the_same_numbers_and_tell_of_each_step(tmp_path: Path) -> None:
    few, reported, found = dataclasses.replace(SMALL, steps=12, hard_at=6, hard_batches=2), [Counted(), Counted()], []
    for workers in (1, 2):
        place = dataclasses.replace(bench(tmp_path / str(workers)), progress=reported[workers - 1])
        train_all(DEMO_KINDS[:2], few, place, workers)
        found.append([Run(place.runs / kind.name).scalars("loss")[1].tolist() for kind in DEMO_KINDS[:2]])
    assert found[0] == found[1] and len(found[0][0]) == 12
    assert [(each.begun, each.steps) for each in reported] == 2 * [([("2 trainings", 24)], 24)]


def test_threads_are_afterwards_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
