"""Two trainings that rounding alone tells apart do not part; those with one difference part there, and then."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.diagnosis import View, diff
from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs import RunWriter, Scalars
from plimsoll.runs.storage import location
from tests.support.cases import each
from tests.support.diagnosis.trainings import MODELS, train

Around = Callable[[nn.Module, int], object]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trainings by their arguments, each made once and from one seed."""
    base, made = tmp_path_factory.mktemp("runs"), dict[object, Path]()

    def run(name: str, precision: str = "fp32", around: Around | None = None, **rest: float) -> Path:
        key = (name, precision, around, *rest.items())
        if key not in made:
            torch.manual_seed(0)
            others = rest if around is None else {**rest, "around": around}
            made[key] = train(base / str(len(made)), name, precision, **others)
        return made[key]

    return run


@pytest.mark.parametrize("precisions", [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp16")], ids="-".join)
@each("name", MODELS)
def test_rounding_parts_nothing(name: str, precisions: tuple[str, str], runs: Callable[..., Path]) -> None:
    found = diff(*(runs(name, precision) for precision in precisions))
    assert found.first is None, found.sentence
    assert found.compared[0] == 25
    assert found.drift[-1][1] > 0


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_another_order_of_sums_parts_nothing(name: str, runs: Callable[..., Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        other = train(tmp_path / "run", name, "fp32")
    finally:
        torch.set_num_threads(before)
    assert diff(runs(name), other).first is None


def test_a_run_is_like_itself(runs: Callable[..., Path]) -> None:
    found = diff(runs("mlp"), runs("mlp"))
    assert found.first is None and found.partings == () and found.changed == () and found.until_step == 24
    assert found.sentence == "They do not diverge: 59 series are alike at 25 steps."
    assert {distance for _, distance in found.drift} == {0.0}


def louder(model: nn.Module, step: int) -> None:
    if step == 8:
        model[2].weight.data *= 1.2


def infinite(model: nn.Module, step: int) -> None:
    if step == 12:
        model[2].weight.data[0] = 1e6


def dead(model: nn.Module, step: int) -> None:
    if step == 10:
        model[0].bias.data.fill_(-1e3)


def other_norm(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.05


def other_gelu(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "tanh"


def other_data(model: nn.Module, step: int) -> None:
    if step == 14:
        torch.manual_seed(1)


def frozen(model: nn.Module, step: int) -> None:
    if step >= 6:
        model[4].weight.requires_grad_(False)
        model[4].weight.grad = None


FAULTS = [
    ("mlp", "fp32", louder, "weights", "2.weight", 8, "values"),
    ("mlp", "bf16", louder, "weights", "2.weight", 8, "values"),
    ("mlp", "fp16", infinite, "weights", "2.weight", 12, "values"),
    ("mlp", "fp32", dead, "weights", "0.bias", 10, "values"),
    ("vit", "fp32", other_norm, "activations", "blocks.0.first:output", 0, "values"),
    ("gpt", "fp32", other_gelu, "activations", "blocks.0.mlp.1:output", 0, "values"),
    ("mlp", "fp32", other_data, "activations", "model:input", 14, "values"),
    ("cnn", "bf16", other_data, "activations", "model:input", 14, "values"),
]


@each("fault", FAULTS, ids=lambda fault: f"{fault[2].__name__}-{fault[1]}")
def test_a_difference_is_named_where_and_when_it_began(fault: tuple, runs: Callable[..., Path]) -> None:
    name, precision, around, collection, layer, step, kind = fault
    for one, other in ((precision, precision), ("fp32", precision)):
        found = diff(runs(name, one), runs(name, other, around))
        assert found.first is not None, found.drift
        first = found.first
        assert (first.collection, first.name, first.step, first.kind) == (collection, layer, step, kind)
        assert first.distance > first.allowed
        assert f"step {step}" in found.sentence and layer in found.sentence


def test_a_scale_too_low_is_underflow_and_says_why(runs: Callable[..., Path]) -> None:
    first = diff(runs("mlp"), runs("mlp", "fp16", scale=2.0**-14)).first
    assert first is not None and first.kind == "underflow" and first.step == 0
    assert first.b > first.a + 0.05
    assert "FP16 at scale 2^-14 cannot hold them" in first.reason


def test_zeros_with_another_cause_are_not_called_underflow(tmp_path: Path) -> None:
    found = []
    for masked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5 if masked else 0.0), nn.Linear(64, 4))
        with pl.watch(model, run=tmp_path / str(masked), every=1) as w:
            model(torch.randn(4, 8)).square().mean().backward()
            w.step()
        found.append(w.path)
    first = diff(*found).first
    assert first is not None and (first.name, first.kind) == ("1:output", "zeros")
    assert "cannot hold" not in first.reason


def test_infinities_in_one_run_are_named(tmp_path: Path) -> None:
    for name, low in (("wide", None), ("narrow", torch.float16)):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        with pl.watch(model, run=tmp_path / name, every=1) as w:
            for step in range(4):
                x = torch.randn(4, 8) * (1e5 if step == 2 else 1.0)
                with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
                    model(x).float().clamp(-1, 1).square().mean().backward()
                w.step()
    first = diff(tmp_path / "wide", tmp_path / "narrow").first
    assert first is not None and (first.kind, first.step, first.name) == ("nonfinite", 2, "model:output")
    assert "in B only" in first.reason
    assert "in A only" in diff(tmp_path / "narrow", tmp_path / "wide").first.reason


def test_a_skipped_step_is_named_before_what_comes_of_it(runs: Callable[..., Path]) -> None:
    first = diff(runs("gpt", "fp16"), runs("gpt", "fp16", scale=2.0**40)).first
    assert first is not None and first.step == 0
    at_step = diff(runs("gpt", "fp16"), runs("gpt", "fp16", scale=2.0**40)).partings
    assert {p.kind for p in at_step} == {"nonfinite", "skipped"}
    skipped = next(p for p in at_step if p.kind == "skipped")
    assert (skipped.a, skipped.b) == (0, 1)
    assert "B skipped the step" in skipped.reason and "2^40" in skipped.reason


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_first_search_for_a_loss_scale_is_no_parting(name: str, runs: Callable[..., Path]) -> None:
    searched = runs(name, "fp16", scale=2.0**22)
    skips = [event.step for event in View(pl.Run(searched)).events if event.kind == "skip"]
    assert len(skips) > 1 and skips[0] == 0 and skips[-1] < 15
    for one, other in ((runs(name), searched), (searched, runs(name, "fp16", scale=2.0**20))):
        found = diff(one, other)
        assert found.first is None, found.sentence
        assert all("while its scaler searched for a loss scale: these are not compared" in n for n in found.notes)
        assert found.notes and found.to_dict()["notes"] == list(found.notes)


def test_what_parts_in_the_search_or_after_it_is_found(runs: Callable[..., Path], tmp_path: Path) -> None:
    one = runs("mlp")
    other = diff(one, runs("mlp", "fp16", other_start, scale=2.0**22)).first
    assert other is not None and (other.step, other.collection, other.name) == (0, "weights", "2.weight")
    later = diff(one, runs("mlp", "fp16", infinite_later, scale=2.0**20)).first
    assert later is not None and later.step >= 20 and later.kind in ("nonfinite", "skipped")


def other_start(model: nn.Module, step: int) -> None:
    if step == 0:
        model[2].weight.data *= 1.2


def infinite_later(model: nn.Module, step: int) -> None:
    if step == 20:
        model[2].weight.data[0] = torch.inf


@pytest.mark.parametrize("several", [False, True])
def test_an_input_of_one_of_several_models_may_be_computed(several: bool, tmp_path: Path) -> None:
    for name, away in (("a", 0.0), ("near", 5e-7), ("far", 0.5)):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        with pl.watch(model, run=tmp_path / name / "D", every=1) as w:
            model(torch.randn(2, 8) * (1 + away)).square().mean().backward()
            w.step()
        if several:
            location.write_script(tmp_path / name, ["D", "G"])
    near, far = (diff(tmp_path / "a" / "D", tmp_path / name / "D").first for name in ("near", "far"))
    assert (near is None) == several
    assert far is not None and far.name == "model:input"
    assert ("another model of the script may have computed: compare that run first" in far.reason) == several


def losses(path: Path, values: list[float]) -> Path:
    with RunWriter(path) as writer:
        for step, value in enumerate(values):
            writer.write(Scalars(step=step, values={"loss": value}))
    return path


def test_losses_alone_are_compared(tmp_path: Path) -> None:
    a = losses(tmp_path / "a", [2.0, 1.5, 1.2, 1.0])
    assert diff(a, losses(tmp_path / "b", [2.0, 1.5, 1.2, 1.0 + 1e-8])).first is None
    first = diff(a, losses(tmp_path / "c", [2.0, 1.5, 1.3, 1.0])).first
    assert first is not None and (first.collection, first.step, first.a, first.b) == ("loss", 2, 1.2, 1.3)
    lost = diff(a, losses(tmp_path / "d", [2.0, float("nan"), 1.2, 1.0])).first
    assert lost is not None and (lost.kind, lost.step) == ("nonfinite", 1) and "nan in B only" in lost.reason


def test_trainings_far_apart_are_no_longer_compared_by_value(tmp_path: Path) -> None:
    drifting = [2.0 * (1 + 1e-7 * 4.0**i) for i in range(14)]
    found = diff(losses(tmp_path / "a", [2.0] * 14 + [1.0]), losses(tmp_path / "b", [*drifting, 3.0]))
    assert found.first is None
    assert found.until_step is not None and found.until_step < 13
    assert "too far apart for values to be compared" in found.sentence


def test_emulated_formats_can_be_named(tmp_path: Path) -> None:
    a, b = losses(tmp_path / "a", [2.0, 1.5]), losses(tmp_path / "b", [2.01, 1.51])
    assert diff(a, b).first is not None
    assert diff(a, b, formats=["e4m3"]).first is None
    assert diff(a, b, formats=["mxfp4"]).first is None


def test_what_one_run_lacks_and_what_was_changed_is_told(tmp_path: Path) -> None:
    def run(path: Path, *layers: nn.Module, every: int = 1) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), *layers)
        with pl.watch(model, run=path, every=every) as w:
            for _ in range(4):
                model(torch.ones(2, 4)).sum().backward()
                w.step()
        return path

    found = diff(run(tmp_path / "a"), run(tmp_path / "b", nn.Identity(), every=2))
    assert "activations 1:output" in found.only_b and "activations 1:output" not in found.only_a
    assert ("settings.collect.weights", "1", "2") in found.changed
    assert all(name.startswith("settings.collect.") for name, _, _ in found.changed)
    assert found.first is None and found.compared[0] == 4  # losses at every step, spectra at steps 0 and 2


def test_sizes_are_compared(tmp_path: Path) -> None:
    for width in (4, 5):
        torch.manual_seed(0)
        model = nn.Linear(3, width)
        with pl.watch(model, run=tmp_path / str(width), every=1) as w:
            model(torch.ones(2, 3)).sum().backward()
            w.step()
    first = diff(tmp_path / "4", tmp_path / "5").first
    assert first is not None and (first.kind, first.name, first.a, first.b) == ("size", "weight", 12, 15)


def test_a_view_and_a_last_step_are_taken(runs: Callable[..., Path]) -> None:
    a, b = runs("mlp"), runs("mlp", "fp32", louder)
    assert diff(a, b, until=7).first is None
    assert diff(View(pl.Run(a), 9), View(pl.Run(b))).first == diff(a, b).first
    assert diff(a, b, until=7).compared[0] == 8


def test_the_answer_is_data_and_a_table(runs: Callable[..., Path]) -> None:
    found = diff(runs("mlp"), runs("mlp", "fp32", louder))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["parts"] and data["first"]["name"] == "2.weight" and data["sentence"] == str(found)
    assert len(data["partings"]) == len(found.partings) > 1
    assert found.table(most=1).row_count == 1
    assert found.table(most=1).caption == f"and {len(found.partings) - 1} more"


def test_partings_are_in_the_order_of_computation(runs: Callable[..., Path]) -> None:
    order = ["weights", "activations", "loss", "activation_gradients", "gradients", "updates", "optimizer"]
    places = [order.index(p.collection) for p in diff(runs("mlp"), runs("mlp", "fp32", louder)).partings]
    assert places == sorted(places) and places[0] == 0


def test_what_cannot_be_compared_is_refused(runs: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected runs with series and steps in common"):
        diff(runs("mlp"), losses(tmp_path / "a", []))
    with pytest.raises(ArgumentError, match="expected tolerance from 0 to 1; got 5"):
        diff(runs("mlp"), runs("mlp"), tolerance=5)
    for wrong in ({"tolerance": "5 %"}, {"formats": "tf32"}, {"until": "8"}, {"until": 2.5}):
        with pytest.raises(ArgumentError, match=rf"expected {next(iter(wrong))} .*; got "):
            diff(runs("mlp"), runs("mlp"), **wrong)
    with pytest.raises(RunError):
        diff(runs("mlp"), tmp_path / "nothing")


def test_frozen_weights_part_in_their_gradients(runs: Callable[..., Path]) -> None:
    first = diff(runs("mlp"), runs("mlp", "fp32", frozen)).first
    assert first is not None and first.step in (6, 8)
