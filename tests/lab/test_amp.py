"""The three networks of the benchmark: their sizes and data, the memory that is counted, and that claims can fail."""

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.runs import Run
from plimsoll_lab import Bench, Measured
from plimsoll_lab.bench import Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.amp import experiment
from plimsoll_lab.experiments.amp.experiment import (
    AMP,
    FP8,
    Setup,
    Timed,
    ends,
    fell_to,
    furthest,
    levels_of,
    losses,
    measure_with,
    of_losses,
    of_memory,
    of_times,
    rounds_of,
    setup_for,
    time_ratio,
    time_steps,
    to_task,
)
from plimsoll_lab.experiments.amp.networks import (
    CATEGORIES,
    CLASSES,
    UNET_PARAMETERS,
    FeedForward,
    Footprint,
    Network,
    UNet,
    count,
    feed_forward,
    footprint,
    make_rows,
    make_scenes,
    make_spans,
    published,
    side_of,
    spans,
    unet,
)
from plimsoll_lab.statistics import Ratio
from tests.support.cases import each

SMALL_BERT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 2000,
}  # fmt: skip
TINY = Setup(steps=2, seeds=2, rounds=1, every=1)
SMALL = (feed_forward(16, (32, 16)), unet(2, 92, width=2), spans(2, 32, **SMALL_BERT))


def bench(folder: Path, steps: int | None = None) -> Bench:
    return Bench(runs=folder, seed=0, device="cpu", steps=steps, full=False, progress=Silent())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "trained_networks", lambda _: SMALL[:2])
        patch.setattr(experiment, "LEVELS", ("fp32", "amp-fp16", FP8))
        return measure_with(bench(tmp_path_factory.mktemp("amp")), TINY, counted=SMALL, timed=SMALL, workers=1)


# -- networks and data -------------------------------------------------------------------------------------------------


def test_the_unet_has_the_benchmark_s_number_of_parameters_and_gives_the_middle() -> None:
    with torch.device("meta"):
        assert count(UNet()) == UNET_PARAMETERS == 7_703_497
        found = UNet()(torch.empty(1, 3, 256, 256))
    assert found.shape == (1, CLASSES, 164, 164) and side_of(256) == 164 and side_of(92) == 4


def test_rows_have_the_columns_that_are_embedded_and_a_target_that_can_be_learnt() -> None:
    categories, numbers, target = make_rows(1, 0, 64)
    assert all(categories[:, column].max() < many for column, many in enumerate(CATEGORIES))
    assert FeedForward((8, 4))(categories, numbers).shape == target.shape == (64,)
    again, other = make_rows(1, 0, 64)[2], make_rows(1, 1, 64)[2]
    assert target.equal(again) and not target.equal(other)
    assert target.std() > 1.0  # far above the noise, 0.1


def test_scenes_show_each_class_in_its_colour() -> None:
    pictures, classes = make_scenes(0, 0, 8, 92)
    assert pictures.shape == (8, 3, 92, 92) and classes.shape == (8, 4, 4)
    large, at = make_scenes(0, 0, 8, 132)
    seen = large[..., 44:88, 44:88].permute(0, 2, 3, 1)
    assert at.shape == (8, 44, 44)
    means = torch.stack([seen[at == kind].mean(0) for kind in at.unique()])
    assert seen[at == 0].std(0).max() < 0.6 and torch.cdist(means, means).fill_diagonal_(9.0).min() > 0.3


def test_a_text_s_span_holds_the_words_of_the_kind_that_is_asked_for_and_no_others_do() -> None:
    text = make_spans(0, 0, 16, 32, 2000)
    kinds = (text["input_ids"] - 1000) % 8
    for row in range(16):
        own = [place for place in range(3, 31) if kinds[row, place] == kinds[row, 1]]
        first, last = int(text["start_positions"][row]), int(text["end_positions"][row])
        assert own == list(range(first, last + 1))
    assert text["input_ids"].max() < 2000


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        MissingExtraError,
        match=r"lab amp: expected the package transformers.*pip install 'transformers\[torch\]>=4.44'$",
    ):
        AMP.settings(bench(tmp_path))


def test_sizes_for_other_lengths(tmp_path: Path) -> None:
    assert setup_for(None, full=False) == Setup() and setup_for(30, full=True).steps == 30
    with pytest.raises(ArgumentError, match=r"lab amp: expected 20 steps or more, .* got 19. Use 80."):
        AMP.settings(bench(tmp_path, steps=19))
    assert AMP.settings(bench(tmp_path))["timed_batches"] == {"feed-forward": 128, "unet": 2, "bert": 1}
    assert [network.batch for network in published()] == [512, 8, 64]
    task = to_task("unet", "fp32", 1, tmp_path, TINY, "cpu", watched=False)
    assert Setup(**task["setup"]) == TINY


# -- memory ------------------------------------------------------------------------------------------------------------


def linear(dropout: float) -> Network:
    """Of 16 by 16 weights and no bias, so that all that is kept can be counted by hand."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16, bias=False), Dropped(dropout), nn.Linear(16, 16, bias=False))

    return Network(
        name="linear", title="linear", make=make, batch=16, loss=lambda model, batch: model(batch[0]).float().sum(),
        draw=lambda _seed, _step, size: [torch.zeros(size, 16)],
    )  # fmt: skip


class Dropped(nn.Module):
    def __init__(self, part: float) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.part, training=self.training) if self.part else x


WEIGHTS = 2 * 16 * 16


@each(
    ("level", "dropout", "expected"),
    [
        # Kept: both layers' inputs, 16 values each; the mask of dropout, a byte for a value; 16-bit copies of weights.
        ("fp32", 0.0, Footprint(weights=4 * WEIGHTS, gradients=4 * WEIGHTS, masters=0, state=8 * WEIGHTS, fixed=0,
                                per_sample=128, wide=128)),
        ("fp32", 0.1, Footprint(weights=4 * WEIGHTS, gradients=4 * WEIGHTS, masters=0, state=8 * WEIGHTS, fixed=0,
                                per_sample=144, wide=128)),
        ("amp-fp16", 0.1, Footprint(weights=4 * WEIGHTS, gradients=4 * WEIGHTS, masters=0, state=8 * WEIGHTS,
                                    fixed=2 * WEIGHTS, per_sample=80, wide=0)),
        ("fp16-master", 0.0, Footprint(weights=2 * WEIGHTS, gradients=2 * WEIGHTS, masters=4 * WEIGHTS,
                                       state=8 * WEIGHTS, fixed=0, per_sample=64, wide=0)),
    ],
)  # fmt: skip
def test_memory_is_what_is_counted_by_hand(level: str, dropout: float, expected: Footprint) -> None:
    found = footprint(linear(dropout), level)
    # The copy of the first layer's weight is not kept: its input needs no gradient.
    if level == "amp-fp16":
        expected = dataclasses.replace(expected, fixed=expected.fixed // 2)
    assert found == expected
    assert found.total(10) == found.static + found.fixed + 10 * found.per_sample
    assert found.dynamic(found.batch_at(3.0)) == pytest.approx(3.0 * found.static)


def test_memory_counted_on_meta_is_what_a_cpu_keeps_in_fp32() -> None:
    network = SMALL[1]
    model, kept = network.make(), {}
    own = {p.data_ptr() for p in model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        network.loss(model, network.draw(0, 0, 3))
    assert sum(storage.nbytes() for storage in kept.values()) == footprint(network, "fp32").dynamic(3)


# -- time --------------------------------------------------------------------------------------------------------------


def test_timed_steps_leave_the_weights_and_are_of_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    network = dataclasses.replace(SMALL[0], make=lambda: made.append(FeedForward((8, 4))) or made[0])
    torch.manual_seed(0)
    before = [p.clone() for p in FeedForward((8, 4)).parameters()]
    ticks = iter(range(100))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))  # of this module alone: threads of others go on
    monkeypatch.setattr("plimsoll_lab.experiments.amp.experiment.time", clock)
    found = time_steps(network, ("fp32", "amp-fp16"), rounds=2, seed=0, device="cpu", progress=Silent())
    assert all(p.equal(q) and p.dtype is q.dtype for p, q in zip(before, made[0].parameters(), strict=True))
    assert found["fp32"].seconds == found["amp-fp16"].seconds == [1.0, 1.0]  # the round that warms up is left out
    assert found["amp-fp16"].loss == pytest.approx(found["fp32"].loss, rel=0.01)
    assert found["amp-fp16"].loss != found["fp32"].loss  # which shows that it was another arithmetic
    slow, fast = Timed(seconds=[4, 3, 9], loss=0, peak_bytes=0), Timed(seconds=[2, 3, 3], loss=0, peak_bytes=0)
    assert time_ratio(slow, fast) == 2.0 and slow.median == 4


def test_fp8_is_timed_where_there_are_linear_layers() -> None:
    assert [levels_of(network)[-1] for network in SMALL] == ["fp8-tensor", "amp-bf16", "fp8-tensor"]
    assert [rounds_of(network, Setup(rounds=3)) for network in SMALL] == [3, 3, 1]
    assert rounds_of(SMALL[2], Setup(rounds=3, full=True)) == 3


# -- trainings and claims ----------------------------------------------------------------------------------------------


def test_the_trainings_are_read_from_their_runs(measured: Measured) -> None:
    names = [f"{network}-{level}" for network in ("feed-forward", "unet") for level in ("fp32", "amp-fp16", FP8)]
    assert [training.name for training in measured.trainings] == names
    for training in measured.trainings:
        reference = training.run.parent / f"{training.run.name.rsplit('-fp', 1)[0].removesuffix('-amp')}-fp32"
        pairs = [(training.run, reference)]
        pairs += [(Path(f"{run}-seed-1"), Path(f"{other}-seed-1")) for run, other in pairs]
        logs = [np.log(losses(run)[-1] / losses(other)[-1]) for run, other in pairs]
        assert training.numbers["of_fp32"] == pytest.approx(np.exp(np.mean(logs)))
        assert Run(training.run).tensors
    folder = measured.trainings[0].run.parent
    plan = (folder / "unet-fp32-fp8.toml").read_text("utf-8")
    assert "e4m3" in plan and not (folder / "feed-forward-fp32-fp8.toml").exists()


def test_what_is_said_and_claimed_is_of_all_networks_and_times_are_claimed_on_gpus_alone(measured: Measured) -> None:
    ids = {claim.id for claim in measured.claims}
    assert {"unet-parameters", "activations-dominate", "unet-fp8-agrees", "bert-step-agrees"} <= ids
    assert not ids & {"feed-forward-no-gain", "unet-faster", "bert-faster"}
    assert "they say nothing of a GPU's" in measured.said[-1]
    by_id = {claim.id: claim for claim in measured.claims}
    assert by_id["unet-parameters"].measured == count(SMALL[1].make()) != UNET_PARAMETERS
    for name in ("feed-forward", "unet", "bert"):
        assert by_id[f"{name}-step-agrees"].holds


def test_losses_at_the_end_and_bounds_either_way(tmp_path: Path, measured: Measured) -> None:
    assert fell_to(np.array([4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0])) == 0.25
    assert furthest(Ratio(mean=1.0, low=0.9, high=1.02)) == pytest.approx(0.1)
    assert furthest(Ratio(mean=1.0, low=0.99, high=1.02)) == pytest.approx(0.02)
    run = measured.trainings[0].run
    assert ends([run])[0] == losses(run)[-1]


FP32 = Footprint(weights=100, gradients=100, masters=0, state=200, fixed=0, per_sample=140, wide=140)
HALF = dataclasses.replace(FP32, per_sample=70, wide=0)
MASTERS = Footprint(weights=50, gradients=50, masters=100, state=200, fixed=0, per_sample=70, wide=0)
BATCHES = {"feed-forward": 1, "unet": 30, "bert": 10}


def sound() -> dict[tuple[str, str], Footprint]:
    levels = {"fp32": FP32, "amp-fp16": HALF, "fp16-master": MASTERS}
    return {(name, level): found for name in BATCHES for level, found in levels.items()}


@each(
    ("key", "change", "breaks"),
    [
        (("unet", "amp-fp16"), {"per_sample": 80}, "unet-saves-most"),
        (("bert", "amp-fp16"), {"per_sample": 139}, "bert-saves"),
        (("unet", "amp-fp16"), {"per_sample": 90}, "unet-halves"),
        (("bert", "fp16-master"), {"masters": 0}, "masters-cost"),
        (("bert", "fp16-master"), {"weights": 52}, "inference-halves"),
        (("bert", "fp32"), {"per_sample": 170}, "activations-dominate"),
        (("bert", "fp32"), {"per_sample": 110}, "activations-dominate"),
        (("bert", "fp16-master"), {"per_sample": 90}, "o2-halves"),
    ],
)
def test_each_claim_of_memory_can_fail(key: tuple[str, str], change: dict[str, int], breaks: str) -> None:
    memory = sound()
    assert all(claim.holds for claim in of_memory(memory, BATCHES, UNET_PARAMETERS))
    memory[key] = dataclasses.replace(memory[key], **change)
    assert not {claim.id: claim.holds for claim in of_memory(memory, BATCHES, UNET_PARAMETERS)}[breaks]
    assert not of_memory(sound(), BATCHES, UNET_PARAMETERS + 1)[0].holds


def test_each_claim_of_losses_and_times_can_fail() -> None:
    def timed(seconds: float, loss: float = 1.0) -> Timed:
        return Timed(seconds=[seconds], loss=loss, peak_bytes=0)

    same, apart = Ratio(mean=1.0, low=0.99, high=1.01), Ratio(mean=1.0, low=0.9, high=1.01)
    times = {"unet": {"fp32": timed(1.0), "amp-fp16": timed(1.0)}}
    assert all(claim.holds for claim in of_losses({("unet", "amp-fp16"): same}, {"unet": 0.5}, times))
    off = {"unet": {"fp32": timed(1.0), "amp-fp16": timed(1.0, loss=1.1)}}
    assert not any(claim.holds for claim in of_losses({("unet", "amp-fp16"): apart}, {"unet": 0.9}, off))
    none = {"unet": {"fp32": timed(1.0), "amp-fp16": timed(1.0, loss=math.nan)}}
    assert [claim.holds for claim in of_losses({}, {"unet": 0.5}, none)] == [True, False]

    def on_a_gpu(**ratios: float) -> list[bool]:
        names = {name.replace("_", "-"): part for name, part in ratios.items()}
        pairs = {name: {"fp32": timed(1.0), "amp-fp16": timed(part)} for name, part in names.items()}
        return [claim.holds for claim in of_times(pairs)]

    assert all(on_a_gpu(feed_forward=1.0, unet=0.7, bert=0.45))
    assert not any(on_a_gpu(feed_forward=0.8, unet=1.0, bert=0.6))


def test_every_claim_is_of_a_row_and_every_row_has_one(measured: Measured) -> None:
    assert {row for claim in measured.claims for row in claim.rows} == set(rows_of(AMP.source))
    assert all(claim.rows for claim in measured.claims)
