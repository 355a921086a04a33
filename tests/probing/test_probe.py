"""`probe`: planted overflows, underflows and flips, models that fit, and all that a model may come from."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.formats.catalogue import BLOCKS, ELEMENTS, TARGETS
from plimsoll.probing import forward
from plimsoll.probing.result import Question
from tests.support.cases import each
from tests.support.models import Halves


class Net(nn.Module):
    """Two products, a nonlinearity between, and the logits of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)))


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 32, generator=generator), torch.randint(10, (64,), generator=generator)) for _ in range(count)
    ]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def net(change: Callable[[Net], Any] = lambda _: None) -> Net:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(10.0))  # so that no decision is close
        change(model)
    return model


def rules(found: pl.Probe) -> dict[str, tuple[str, ...]]:
    places: dict[str, tuple[str, ...]] = {}
    for finding in found.findings:
        if finding.severity != "info":
            places[finding.rule] = (*places.get(finding.rule, ()), *finding.where)
    return places


def test_a_model_that_fits_says_so() -> None:
    for fmt in ("fp16", "bf16", "fp8", "mxfp8"):
        found = pl.probe(net(), batches(), fmt, loss=cross_entropy)
        assert found.fits, (fmt, str(found))
        assert found.sentence == f"Net fits {fmt.upper()}: nothing overflows or is lost, in 3 batches."
        assert found.plan is not None
        assert {fmt.name for fmt in map(found.plan.format_for, ("first", "head"))} == {Question.of(fmt).forward.name}
        assert found.judged == ("weights", "activations", "activation_gradients", "gradients")
        assert found.not_judged == ()


def test_a_planted_overflow_is_named() -> None:
    """The oracle: FP16's own cast of the output of each layer."""
    model = net(lambda m: m.first.weight.mul_(1e5))
    found = pl.probe(model, batches(), "fp16", loss=cross_entropy)
    finding = next(f for f in found.findings if f.rule == "overflow")
    hidden = torch.cat([model.first(x).detach() for x, _ in batches()])
    assert not found.fits
    assert "first:output" in finding.where
    assert finding.evidence["largest"] == float(hidden.abs().max()) > 65504
    share = max(float(model.first(x).half().isinf().float().mean()) for x, _ in batches())
    assert next(s for s in finding.spots if s.name == "first:output").value == pytest.approx(share, abs=0.02)
    assert found.plan is not None and found.plan.formats["first"] == "bf16"
    assert pl.probe(model, batches(), "bf16", loss=cross_entropy).fits


def test_an_overflow_inside_of_a_module_is_found_by_the_emulation() -> None:
    """The product of two outputs exceeds FP16, and no tensor between modules does."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores = (1000 * self.a(x)) @ (1000 * self.b(x)).T
            return self.c(torch.softmax(scores * 1e-6, dim=-1) @ x)

    found = pl.probe(Inner(), [x for x, _ in batches()], "fp16")
    assert set(rules(found)) == {"overflow"}
    assert found.findings[0].where[0] in ("c", "model")
    assert "NaN or infinite in FP16" in found.findings[0].meaning
    assert pl.probe(Inner(), [x for x, _ in batches()], "bf16").fits


def test_a_planted_underflow_is_named() -> None:
    """Most weights are a billionth of the largest: below FP16's smallest number, and below any scale of E4M3."""

    def plant(m: Net) -> None:
        m.head.weight.mul_(1e-9)
        m.head.weight[:, 0] = 1.0

    for fmt in ("fp16", "e4m3", "nvfp4"):
        found = pl.probe(net(plant), batches(), fmt, loss=cross_entropy)
        assert "head.weight" in next(f for f in found.findings if f.rule == "underflow").where
        assert found.plan is not None and found.plan.formats["head"] == "bf16", fmt
        assert not found.fits


def test_gradients_that_no_scale_holds_are_named() -> None:
    """Rows of a batch differ by 2^-60, so that FP16's range is too narrow for their gradients at any loss scale."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = torch.where(torch.arange(64) < 32, 1.0, 2.0**-60)
        return (nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum()

    found = pl.probe(net(), batches(), "fp16", loss=loss)
    assert set(rules(found)) == {"no-scale"}
    assert set(rules(found)["no-scale"]) == {"first", "head"}
    assert found.plan is not None and set(found.plan.formats.values()) == {"bf16"}


def test_flipped_classes_are_counted() -> None:
    """The head's rows differ by less than BF16 resolves: the oracle casts weights and operands itself."""

    def plant(m: Net) -> None:
        m.head.weight.copy_(1 + 1e-3 * torch.randn_like(m.head.weight))
        m.head.bias.zero_()

    model = net(plant)
    found = pl.probe(model, batches(), "bf16", loss=cross_entropy)
    flips = next(f for f in found.findings if f.rule == "decision-flips")
    x = torch.cat([x for x, _ in batches()])
    hidden = torch.relu(model.first.bfloat16()(x.bfloat16()))
    low = hidden.float() @ model.head.weight.bfloat16().float().T
    plant_again = net(plant)
    share = float((low.bfloat16().argmax(-1) != plant_again(x).argmax(-1)).float().mean())
    assert flips.severity == "warning" and flips.where == ("output",)
    assert share > 0.3 and flips.evidence["flips"] == pytest.approx(share, abs=0.1)
    assert not found.fits
    assert found.findings[0].advice == "Compute these scores in FP32."


def test_flipped_routes_are_counted_by_module() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.out = nn.Linear(32, 8, bias=False), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            best = self.gate(x).topk(2)
            return self.out(x) * best.values.sum(-1, keepdim=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Router()

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(x)

    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        model.moe.gate.weight.copy_(1 + 1e-3 * torch.randn(8, 32))
    found = pl.probe(model, [x for x, _ in batches()], "bf16")
    assert rules(found) == {"decision-flips": ("moe",)}
    assert pl.probe(model, [x for x, _ in batches()], "fp32").fits


def test_values_that_are_nan_already_are_said_first() -> None:
    found = pl.probe(net(lambda m: m.first.weight[0].fill_(float("nan"))), batches(), "bf16", loss=cross_entropy)
    assert found.findings[0].rule == "nonfinite"
    assert "pl.locate" in found.next_step


@each("fmt", ["tf32", "fp64", "e5m2", "e4m3fnuz", "mxfp6", "mxfp4", "mxfp8_e5m2", "e5m7"])
def test_formats_of_every_kind_are_answered(fmt: str) -> None:
    found = pl.probe(net(), batches(1), fmt, loss=cross_entropy)
    assert found.fits or Question.of(fmt).forward.bits < 8, str(found)
    assert (found.plan is None) == (Question.of(fmt).target is None)
    json.dumps(found.to_dict(), allow_nan=False)
    assert pickle.loads(pickle.dumps(found)) == found


@each("fmt", [*ELEMENTS, *BLOCKS, *TARGETS])
def test_a_question_is_about_any_format_of_values(fmt: object) -> None:
    if getattr(fmt, "signed", True):
        question = Question.of(fmt)
        pairs = TARGETS.get(str(question.target), ())
        assert fmt in (question.forward, question.name)
        assert question.target is None or pairs[0] == (question.forward, question.backward)
        assert question.is_exact == (question.name in ("fp32", "fp64"))


def test_a_format_of_scales_is_refused() -> None:
    with pytest.raises(pl.FormatError, match="probe: expected a format for values; got e8m0"):
        pl.probe(net(), batches(), "e8m0")


def test_nothing_stays() -> None:
    model = net().train()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    model.norm = nn.BatchNorm1d(32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    generator, modules = torch.get_rng_state(), dict(model.named_modules())
    pl.probe(model, batches(), "fp16", loss=lambda m, b: cross_entropy(m, (m.norm(b[0]), b[1])))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight)) and model.head.weight.grad is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training and all(m.training for m in modules.values())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules.values())


def test_without_a_loss_the_forward_alone_is_judged() -> None:
    found = pl.probe(net().bfloat16(), [x for x, _ in batches()], "fp8")
    assert found.fits
    assert found.not_judged == ("Not judged: activation gradients, parameter gradients. There was no loss.",)
    assert found.remarks == ("The model was widened to FP32 first.",)
    assert found.plan is not None and set(found.plan.scales["first"]) == {"weights", "activations"}
    model, (x, _) = net(), batches(1)[0]
    with pl.emulate(found.plan, model=model):
        assert 0 < float((model(x) - net()(x)).detach().abs().max()) < 0.1


def test_a_few_flips_are_a_note_and_no_reason_for_a_wide_format() -> None:
    class Router(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            return torch.where(scores.argmax(-1, keepdim=True) > 15, scores, -scores)

    torch.manual_seed(0)
    found = pl.probe(nn.Sequential(Router(32, 32)), [x for x, _ in batches()], "fp8")
    assert [(finding.rule, finding.severity, finding.where) for finding in found.findings] == [
        ("decision-flips", "info", ("0",))
    ]
    assert found.fits and found.plan is not None and found.plan.formats == {"0": "e4m3"}


def test_a_table_that_is_shared_is_no_product() -> None:
    """As T5 has it: the table is called under another name, so that a run alone cannot tell it from a matrix."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.embed, self.head = nn.Embedding(16, 32), nn.Embedding(16, 32), nn.Linear(32, 4)
            self.embed.weight = self.shared.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    found = pl.probe(Shared(), torch.arange(16).reshape(2, 8).unbind(), "fp8", loss=lambda m, x: m(x).square().mean())
    assert found.fits and found.plan is not None and set(found.plan.formats) == {"head"}


def test_a_model_in_fp64_is_judged_as_it_is() -> None:
    found = pl.probe(net().double(), [x.double() for x, _ in batches()], "fp32")
    assert found.fits and found.remarks == ("No plan: none has FP32 for its target.",)
    huge = net().double()
    with torch.no_grad():
        huge.first.weight[0, 0] = 1e200
    assert "first.weight" in rules(pl.probe(huge, [x.double() for x, _ in batches()], "fp32"))["overflow"]


def test_a_model_in_bf16_takes_batches_in_bf16() -> None:
    found = pl.probe(net().bfloat16(), [(x.bfloat16(), y) for x, y in batches()], "fp16", loss=cross_entropy)
    assert found.fits and found.remarks == ("The model was widened to FP32 first.",)


def test_inner_products_of_attention_are_said_to_be_unjudged() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    found = pl.probe(layer, torch.randn(2, 3, 8, 32).unbind(), "fp16", loss=lambda m, x: m(x).square().mean())
    assert found.fits
    assert found.not_judged == ("Not judged: products inside self_attn, but for NaN and infinities.",)


@each(
    "model, data, arguments, said",
    [
        (net(), None, {}, "expected data with a model"),
        (net(), [], {}, "expected data as batches that the model takes; got none"),
        (net(), batches(), {}, "expected batches that the model takes; got TypeError"),
        (net(), batches(), {"loss": lambda m, b: m(b[0])}, "expected loss to return a tensor of one number"),
        (net(), batches(), {"batches": 0}, "expected batches to be an integer of at least 1"),
        (17, batches(), {}, "expected a torch.nn.Module or the path of one; got int"),
        ("no/such/model", None, {}, "expected a model, its folder, or a file of weights"),
    ],
)
def test_what_cannot_be_is_refused(model: Any, data: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(pl.ArgumentError, match=f"probe: .*{said}"):
        pl.probe(model, data, "fp16", **arguments)


# -- files


@pytest.mark.parametrize("kind", ["pt", "nested.pt", "safetensors", "folder"])
def test_weights_alone(kind: str, tmp_path: Path) -> None:
    weights = net(lambda m: m.head.weight[0, 0].fill_(1e5)).state_dict() | {"steps": torch.tensor(3)}
    path = tmp_path / f"weights.{kind}"
    if "pt" in kind:
        torch.save({"state_dict": weights, "epoch": 3} if "nested" in kind else weights, path)
    else:
        save = pytest.importorskip("safetensors.torch").save_file
        folder = tmp_path if kind == "safetensors" else path
        folder.mkdir(exist_ok=True)
        save(weights, folder / "weights.safetensors")
    found = pl.probe(path, fmt="fp16")
    assert rules(found) == {"overflow": ("head.weight",)}
    assert found.sentence.endswith("do not fit FP16: see head.")
    assert found.not_judged[0].startswith("Not judged: activations, activation gradients, parameter gradients and dec")
    assert pl.probe(path, fmt="bf16").fits and pl.probe(path, fmt="bf16").plan is None
    with pytest.raises(pl.ArgumentError, match="expected no data with weights alone"):
        pl.probe(path, batches(), "fp16")


class Loud:
    """A class whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the file was run",))


@each("content", [{"model": Loud()}, net(), {"epoch": 3}, b"no file of tensors"])
def test_files_that_are_no_tensors_are_refused(content: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("file") / "model.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(pl.ArgumentError, match="probe: expected a"):
        pl.probe(path, fmt="fp16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of small random models of transformers, in BF16 and in FP32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("models")
    size = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0,
            "eos_token_id": 0}  # fmt: skip
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    model.bfloat16().save_pretrained(place / "fits")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(1e7)
    model.save_pretrained(place / "overflows")
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                    image_size=8, patch_size=4)  # fmt: skip
    transformers.ViTModel(config).save_pretrained(place / "vision")
    return place


def test_a_model_folder(folders: Path, tmp_path: Path) -> None:
    found = pl.probe(folders / "fits", fmt="fp16")
    assert found.fits and found.subject == "fits" and found.batches == 4
    assert found.remarks[0].startswith("No data was given: batches are random tokens.")
    assert found.judged == ("weights", "activations", "activation_gradients", "gradients")
    assert found.plan is not None and found.plan.formats["lm_head"] == "fp16"
    torch.save([{"input_ids": torch.arange(32).reshape(2, 16)}] * 2, tmp_path / "batches.pt")
    given = pl.probe(folders / "fits", tmp_path / "batches.pt", "fp16")
    assert given.batches == 2 and given.remarks == ()
    broken = pl.probe(folders / "overflows", fmt="fp16")
    assert "transformer.h.0.mlp.c_fc:output" in rules(broken)["overflow"]


def test_model_folders_that_cannot_be_used(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pl.ArgumentError, match="expected data for ViTModel, which does not take tokens"):
        pl.probe(folders / "vision", fmt="fp16")
    pixels = [{"pixel_values": torch.randn(2, 3, 8, 8)}]
    assert pl.probe(folders / "vision", pixels, "fp16").batches == 1
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(pl.ArgumentError, match="expected a model folder that transformers reads from safetensors"):
        pl.probe(tmp_path, fmt="fp16")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(pl.MissingExtraError, match=r"probe: expected the package transformers; got none. Install it: "):
        pl.probe(tmp_path, fmt="fp16")


def test_outputs_that_are_equal_at_first_are_judged_apart() -> None:
    zeros, small, large = (pl.measure(torch.full((8,), value)) for value in (0.0, 1.0, 1e6))
    spectra = {"activations": {"a:output": [(0, zeros), (1, small)], "b:output": [(0, zeros), (1, large)]}}
    found = forward.findings(Question.of("fp16"), spectra, {})
    assert [(finding.rule, finding.where, finding.since_step) for finding in found] == [("overflow", ("b:output",), 1)]


def test_batches_are_widened_with_the_model() -> None:
    model = net().half()
    halves = [(x.half(), y) for x, y in batches()]
    found = pl.probe(model, halves, "fp16", loss=cross_entropy)
    assert found.batches == 3 and "The model was widened to FP32 first." in found.remarks
    assert all(p.dtype is torch.float16 for p in model.parameters())


def test_an_output_that_nothing_uses_does_not_end_the_probe() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0])[0], batch[1])

    assert pl.probe(Halves(32, 20), batches(), "bf16", loss=loss).fits
