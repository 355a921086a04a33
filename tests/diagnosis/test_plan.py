"""Plans: what they decide, what they predict against real casts of the same tensors, and what they train to."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import View, plan
from plimsoll.diagnosis.planning.format_choice import outward
from plimsoll.errors import ArgumentError, NotRecordedError, RunError
from plimsoll.formats import BlockFormat, Plan, get
from plimsoll.runs import Run, RunWriter, Scalars
from plimsoll.text import percent
from tests.support.cases import each
from tests.support.diagnosis.planned import MULTIPLY, layers, train, written

STEPS = 50
ROLES = ("weights", "activations", "gradients")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    path = tmp_path_factory.mktemp("plan") / "run"
    return path, train("fp32", STEPS, path, every=5)[0]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run of few steps, and the tensors that it recorded."""
    path = tmp_path_factory.mktemp("plan") / "run"
    return path, train("fp32", 6, path)[1]


def test_the_modules_that_multiply_are_planned_for_and_no_others(trained: tuple) -> None:
    made = plan(trained[0], "fp8")
    assert list(made.formats) == MULTIPLY and made.default is None
    assert set(made.formats.values()) == {"e4m3"} and set(made.backward.values()) == {"e5m2"}
    assert made.module("blocks.0.ln1") is None and made.module("tok") is None
    assert made.source == str(trained[0]) and made.tolerance == 0.01 and made.scale is None
    assert all(set(scales) == set(ROLES) for scales in made.scales.values())
    assert made.remarks == ("9 modules: 9 in E4M3/E5M2; 8 bits a value on average, against 16 in BF16.",)


@each("target", ["fp8", "fp16", "mxfp8"])
def test_training_by_the_plan_ends_where_fp32_ends(trained: tuple, target: str) -> None:
    path, losses = trained
    made = plan(path, target)
    assert not set(made.formats.values()) & {"bf16", "fp32"}
    planned, _ = train(made, STEPS)
    wide, narrow = (sum(each[-10:]) / 10 for each in (losses, planned))
    assert wide < 0.5 * losses[0]  # it has learnt something
    assert narrow != wide and abs(narrow - wide) < 0.05 * wide


@each("target", ["fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@each("axis", [-1, 0])
def test_predictions_hold_what_real_casts_lose(short: tuple, target: str, axis: int) -> None:
    path, tensors = short
    made = plan(path, target, tolerance=1.0)  # whatever it loses
    assert set(made.formats.values()) <= {"e4m3", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4"}
    lossy = 0
    for name in MULTIPLY:
        said = made.module(name)
        for role in ROLES:
            fmt = get(said.backward if role == "gradients" else said.forward)
            low, _, high = made.predicted[name][role]
            lost = _lost(tensors[role, name], fmt, said.scales.get(role), axis)
            assert low <= lost <= high
            lossy += lost > 0
    assert lossy > 3


def _lost(tensors: list[Tensor], fmt: object, scale: float | None, axis: int) -> float:
    """The fraction of the nonzero values that a cast makes zero."""
    arguments = {"axis": axis} if isinstance(fmt, BlockFormat) else {"scale": scale}
    gone = sum(int(((pl.cast(x, fmt, **arguments) == 0) & (x != 0)).sum()) for x in tensors)
    return gone / sum(int((x != 0).sum()) for x in tensors)


def test_scales_leave_the_margin_and_no_more(short: tuple) -> None:
    path, tensors = short
    for margin in (0, 3):
        made = plan(path, "fp8", margin_binades=margin)
        for name in MULTIPLY:
            said = made.module(name)
            for role, scale in said.scales.items():
                fmt = get(said.backward if role == "gradients" else said.forward)
                largest = max(float(x.abs().max()) for x in tensors[role, name]) * scale
                assert fmt.max / 2 ** (margin + 1) < largest * (1 + 2.0**-4)
                assert largest * 2**margin < fmt.overflow_threshold


def test_one_loss_scale_where_one_serves_all(short: tuple) -> None:
    path, tensors = short
    made = plan(path, "fp16")
    assert not made.scales
    largest = max(float(x.abs().max()) for (role, _), each in tensors.items() if role == "gradients" for x in each)
    assert largest * made.scale * 2 < 65520
    assert plan(path, "fp16", margin_binades=3).scale == made.scale / 4


def test_a_layer_of_far_smaller_gradients_gets_a_scale_of_its_own_or_falls_back(tmp_path: Path) -> None:
    near = written(tmp_path / "near", [layers({"a": 1.0, "b": 1e-6, "c": 1.0}, step=s) for s in range(3)])
    assert plan(near, "fp16").scales == {}  # FP16 has room for that
    path = written(tmp_path / "far", [layers({"a": 1.0, "b": 1e-6 * 2.0**-20, "c": 1.0}, step=s) for s in range(3)])
    made = plan(path, "fp16")
    assert set(made.formats.values()) == {"fp16"} and set(made.scales) == {"a", "b", "c"}
    assert made.scales["b"]["gradients"] / made.scales["a"]["gradients"] == pytest.approx(1e6 * 2.0**20, rel=1)
    assert made.scales["a"]["gradients"] == made.scale
    assert made.predicted["b"]["gradients"][2] < 0.01
    assert "No single loss scale works for all modules in FP16: each module has its own." in made.remarks
    single = plan(path, "fp16", layer_scales=False)
    assert single.formats == {"a": "fp16", "b": "bf16", "c": "fp16"} and not single.scales
    assert (
        "FP16 needs a loss scale of 2^" in single.notes["b"]
        and "no single one works for all modules" in single.notes["b"]
    )
    eight = plan(path, "fp8")
    assert eight.formats["b"] == "e4m3" and eight.scales["b"]["gradients"] > 2.0**40
    lost = _lost([x for _, x in _of(path, "b")], get("e5m2"), eight.scales["b"]["gradients"], -1)
    assert eight.predicted["b"]["gradients"][0] <= lost <= eight.predicted["b"]["gradients"][2]


def _of(path: Path, name: str) -> list[tuple[int, Tensor]]:
    del path
    return [(s, layers({"a": 1.0, "b": 1e-6 * 2.0**-20, "c": 1.0}, step=s)["activation_gradients", f"{name}:output"])
            for s in range(3)]  # fmt: skip


def test_a_scale_must_serve_at_every_step(tmp_path: Path) -> None:
    steps = [layers({"a": 2.0 ** (-30 * (s == 2))}, step=s) for s in range(3)]
    made = plan(written(tmp_path / "run", steps), "fp8")
    assert made.formats["a"] == "bf16" and not made.scales
    assert made.notes["a"].startswith(
        "activation gradients: no scale works in E5M2 at all steps with 1 binade to spare: at"
    )
    assert "at step 2, at most 2^" in made.notes["a"]
    assert plan(tmp_path / "run", "fp8", until=1).formats["a"] == "e4m3"
    assert plan(View(Run(tmp_path / "run"), 1), "fp8").formats["a"] == "e4m3"


def test_what_overflows_unscaled_is_no_fp16(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [layers({"a": 1.0}, activation=1e4) | layers({"b": 1.0})])
    made = plan(path, "fp16", fallback="fp32")
    assert made.formats == {"a": "fp32", "b": "fp16"}
    assert made.notes["a"].startswith("activations do not fit FP16 unscaled with 1 binade to spare: 2^-")
    assert "margin" not in made.notes["a"] and "to spare" not in plan(path, "fp16", margin_binades=0).notes["a"]


def test_values_beyond_the_fallback_too_stay_in_fp32(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [layers({"a": 1.0}, activation=1e38)])
    made = plan(path, "bf16")
    assert made.formats["a"] == "fp32" and "BF16 unscaled" in made.notes["a"]


def test_what_was_not_recorded_counts_as_unsafe_and_is_said(tmp_path: Path) -> None:
    whole = layers({"a": 1.0})
    for missing, words in (("activations", "activations"), ("activation_gradients", "activation gradients")):
        some = {key: x for key, x in whole.items() if key[0] != missing}
        made = plan(written(tmp_path / missing, [some]), "fp8")
        assert made.formats == {"a": "bf16"} and made.notes["a"].startswith(f"its {words} were not recorded")
        assert f"No {words} were recorded: what depends on them counts as unsafe." in made.remarks
        assert set(made.predicted["a"]) == set(ROLES) - {"activations" if missing == "activations" else "gradients"}


def test_zeros_of_a_narrow_run_count_as_lost(tmp_path: Path) -> None:
    steps = [layers({"a": 1.0, "b": 2.0**-8})]
    steps[0]["activation_gradients", "b:output"][:32] = 0  # in truth zero, or lost: who knows
    assert plan(written(tmp_path / "wide", steps), "fp8").formats["b"] == "e4m3"
    made = plan(written(tmp_path / "narrow", steps, fmt="fp16"), "fp8")
    assert made.formats == {"a": "e4m3", "b": "bf16"}
    assert "the format that they were recorded in may itself have lost too many of them (step 0)" in made.notes["b"]
    assert any(r.startswith("Zeros of activation gradients recorded in FP16 may be values that") for r in made.remarks)
    assert made.predicted["b"]["gradients"][2] == pytest.approx(0.25, abs=0.01)  # half of one of two tensors


def test_a_loss_scale_of_the_record_is_undone(tmp_path: Path) -> None:
    plain = plan(written(tmp_path / "plain", [layers({"a": 2.0**-9})]), "fp8")
    steps = [{key: x * 1024 if "gradients" in key[0] else x for key, x in layers({"a": 2.0**-9}).items()}]
    assert plan(written(tmp_path / "scaled", steps, scale=1024.0), "fp8").scales == plain.scales


def test_nan_and_inf_are_said_and_poison_whole_blocks(tmp_path: Path) -> None:
    steps = [layers({"a": 1.0})]
    steps[0]["activation_gradients", "a:output"][0, 0] = math.inf
    made = plan(written(tmp_path / "run", steps), "mxfp8")
    assert "NaN or Inf among activation gradients at 1 step: these values are not judged." in made.remarks
    assert made.formats["a"] == "bf16" and "activation gradients: up to 3 % may be lost" in made.notes["a"]
    assert plan(tmp_path / "run", "fp8").formats["a"] == "e4m3"


def test_zero_gradients_ask_for_nothing(tmp_path: Path) -> None:
    made = plan(written(tmp_path / "run", [layers({"a": 0.0})]), "fp8")
    assert made.scales["a"]["gradients"] == 1.0 and made.predicted["a"]["gradients"] == (0.0, 0.0, 0.0)
    assert plan(tmp_path / "run", "fp16").scale == 2.0**16


def test_the_cheapest_is_the_one_with_the_fewest_bits_that_is_safe(tmp_path: Path) -> None:
    ones = {key: torch.ones(64, 32) for key in layers({"a": 1.0})}
    narrow = layers({"b": 1.0})
    path = written(tmp_path / "run", [ones | narrow])
    made = plan(path, "cheapest")
    assert made.formats == {"a": "mxfp4", "b": "e4m3"} and made.backward == {"b": "e5m2"} and set(made.scales) == {"b"}
    values, fewer = 3 * 64 * 32, 3 * 64 * 16
    bits = (values * 4.25 + fewer * 8) / (values + fewer)
    assert made.remarks[0] == (
        f"2 modules: 1 in MXFP4, 1 in E4M3/E5M2; {bits:.3g} bits a value on average, against 16 in BF16."
    )


def test_blocks_take_the_pair_with_more_digits_that_is_safe(tmp_path: Path) -> None:
    wide = layers({"a": 1.0})
    wide["activation_gradients", "a:output"] *= 2.0 ** torch.randint(-24, 1, (64, 16)).float()
    made = plan(written(tmp_path / "run", [wide | layers({"b": 1.0})]), "mxfp8")
    assert made.formats == {"a": "mxfp8_e4m3", "b": "mxfp8_e4m3"} and made.backward == {"a": "mxfp8_e5m2"}


# -- which modules multiply --------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Modules of every kind that the rule must tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.bn, self.rms, self.last, self.act = nn.BatchNorm1d(8), nn.RMSNorm(8), nn.LayerNorm(8), nn.PReLU()
        self.attn, self.gru = nn.MultiheadAttention(8, 2, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.odd = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.rms(self.bn(self.conv(self.embed(x).mT)).mT))
        return self.head(self.last(self.odd(self.gru(self.attn(h, h, h, need_weights=False)[0])[0])))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model, path = Odd(), tmp_path_factory.mktemp("odd") / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=path, every=1):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randint(0, 9, (4, 6))).square().mean().backward()
            optimizer.step()
    return path


def test_norms_embeddings_and_activations_are_left_and_what_multiplies_unseen_falls_back(odd: Path) -> None:
    made = plan(odd, "fp8")
    assert made.formats == {"head": "e4m3", "conv": "e4m3", "attn": "bf16", "gru": "bf16", "odd": "e4m3"}
    for name in ("attn", "gru"):
        assert made.notes[name].startswith("its internal products (queries, keys, hidden states) are not recorded")


def test_include_and_exclude_override_the_rule(odd: Path) -> None:
    made = plan(odd, "fp8", include=["attn", "rm*"], exclude=["conv", "head"])
    assert made.formats == {"rms": "e4m3", "attn": "e4m3", "gru": "bf16", "odd": "e4m3"}
    with pytest.raises(ArgumentError, match="plan: expected exclude to name modules with parameters; got 'con', which"):
        plan(odd, "fp8", exclude="con")
    with pytest.raises(ArgumentError, match="plan: expected include to name modules .*There are embed, conv, bn"):
        plan(odd, "fp8", include=["nobody*"])


class Averaged(nn.Module):
    """A model that holds an average of its own weights, which computes in no step of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.by_hand = nn.Linear(8, 8)
        self.ema = nn.Sequential(nn.Linear(64, 64), nn.MultiheadAttention(64, 2)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.frozen(self.net(x)), self.by_hand.weight)


def test_a_copy_that_never_computes_is_left_out_and_said(tmp_path: Path) -> None:
    model = Averaged()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    made = plan(tmp_path / "run", "bf16")
    assert set(made.formats) == {"net", "frozen", "by_hand"}
    (said,) = [remark for remark in made.remarks if remark.startswith("Not counted")]
    assert "these modules computed nothing that was recorded" in said and "ema." in said and "frozen" not in said
    assert "ema.0" in plan(tmp_path / "run", "bf16", include=["ema.0"]).formats


def test_such_a_plan_trains(odd: Path) -> None:
    model = Odd()
    with pl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(odd, "fp8")) as loop:
        with loop.forward():
            loss = model(torch.randint(0, 9, (4, 6))).float().square().mean()
        assert loop.step(loss).stepped


# -- refusals ----------------------------------------------------------------------------------------------------------


@each(
    ("arguments", "message"),
    [
        (
            {"target": "e4m3"},
            "plan: expected a target among .*; got .e4m3.. e4m3 is a format: the target that uses it is fp8",
        ),
        ({"target": "fp4"}, "plan: expected a target among fp16, bf16, fp8, .*cheapest; got 'fp4'"),
        ({"target": None}, "plan: expected a target among"),
        ({"tolerance": 0}, "plan: expected a tolerance above 0 and at most 1; got 0"),
        ({"tolerance": True}, "plan: expected a tolerance above 0"),
        ({"tolerance": math.nan}, "plan: expected a tolerance above 0"),
        ({"margin_binades": -1}, "plan: expected margin_binades to be an integer of 0 or more; got -1"),
        ({"margin_binades": 1.0}, "plan: expected margin_binades to be an integer"),
        ({"include": 3}, "plan: expected include to be a list; got include=3"),
        ({"exclude": [3]}, "plan: expected exclude to name modules with parameters; got 3, which matches none"),
        ({"until": "9"}, "View: expected until to be an integer; got until='9'"),
        ({"fallback": "fp16"}, "plan: expected a fallback among bf16, tf32, fp32, whose range is FP32's; got 'fp16'"),
    ],
)
def test_wrong_arguments_are_refused(trained: tuple, arguments: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(trained[0], **arguments)


def test_runs_without_an_answer_are_refused(trained: tuple, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "scalars") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    with pytest.raises(
        NotRecordedError, match="plan: expected a run with modules that multiply matrices; got one that"
    ):
        plan(tmp_path / "scalars", "fp8")
    with pytest.raises(RunError, match="Run: expected the folder of a run"):
        plan(tmp_path / "none", "fp8")
    with pytest.raises(ArgumentError, match="plan: expected until=None with a View"):
        plan(View(Run(trained[0])), "fp8", until=3)


def test_a_plan_of_hostile_names_survives_its_file(tmp_path: Path) -> None:
    names = ['</script>"\\', "x" * 10_000, "tab\tnew\nline\x1b[31m", "ü", "a[0].*"]
    path = written(tmp_path / "run", [layers(dict.fromkeys(names, 1.0))])
    made = plan(path, "fp8")
    made.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == made and len(made.formats) == len(names)


def test_numbers_are_told_short_and_never_too_small() -> None:
    assert outward(0.123456, 0.2, 0.654321) == (0.123, 0.2, 0.655)
    assert outward(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0) and outward(0.9999, 1.0, 1.0) == (0.999, 1.0, 1.0)
    assert [percent(x) for x in (0.0, 1e-6, 0.0012, 0.034, 0.5)] == ["0 %", "under 0.01 %", "0.12 %", "3.4 %", "50 %"]
