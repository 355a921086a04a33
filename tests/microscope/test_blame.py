"""Blame: planted errors found, shares that add up, budgets kept, and the model left alone."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's custom)

import plimsoll as pl
from plimsoll.microscope.blame.result import Blame, BlameRow
from plimsoll.spectrum import Interval
from tests.microscope.test_microscope import CLASSES, KINDS, example, low_loss
from tests.support.cases import each
from tests.support.models import Halves

WIDTH = 24


class Layer(nn.Module):
    """A linear layer with a fault of its own."""

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(WIDTH, WIDTH), fault

    def forward(self, x: Tensor) -> Tensor:
        return FAULTS[self.fault](self.linear, x) if self.fault else self.linear(x)


class Truncating(torch.autograd.Function):
    """A fused kernel of one's own that computes in FP32 and cuts what it stores off to BF16, both ways."""

    @staticmethod
    def forward(ctx: object, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return cut(x) if dtype == torch.bfloat16 else x

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor, None]:
        return (cut(g) if ctx.dtype == torch.bfloat16 else g), None


def cut(x: Tensor) -> Tensor:
    return (x.float().view(torch.int32) & ~0x1FFFF).view(torch.float32).to(x.dtype)  # a bit less than BF16 has


def biased_rounding(linear: nn.Linear, x: Tensor) -> Tensor:
    with pl.emulate(forward="e4m3", backward="bf16", rounding="toward_zero"):
        return linear(x)


def fused_kernel(linear: nn.Linear, x: Tensor) -> Tensor:
    return Truncating.apply(linear(x), torch.zeros((), dtype=torch.float32).to(torch.bfloat16).dtype)


def wrong_scale(linear: nn.Linear, x: Tensor) -> Tensor:
    with pl.emulate(forward="e4m3", backward="bf16", scale={"activations": 2.0**9}):  # from 0.9 on all is 448
        return linear(x)


def narrow_accumulator(linear: nn.Linear, x: Tensor) -> Tensor:
    with pl.emulate(forward="bf16", backward="bf16", accumulate="e5m4"):
        return linear(x)


def reductions_in_bf16(linear: nn.Linear, x: Tensor) -> Tensor:
    total = x[:, :1].to(torch.bfloat16)
    for column in range(1, WIDTH):  # one after the other, as a ring of ranks adds up
        total = total + x[:, column : column + 1].to(torch.bfloat16)
    return linear(x) + total.float()


FAULTS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "biased rounding": biased_rounding,
    "fused kernel": fused_kernel,
    "wrong scale": wrong_scale,
    "narrow accumulator": narrow_accumulator,
    "reductions in BF16": reductions_in_bf16,
}


class Faulty(nn.Module):
    """Layers in BF16, of which one has a fault."""

    def __init__(self, fault: str, place: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fault if n == place else None) for n in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)


def blame_of(model: nn.Module, low: Callable[[nn.Module, Tensor, Tensor], Tensor], **arguments: object) -> Blame:
    batches = list(torch.randn(4, 64, WIDTH))
    y = torch.randint(0, CLASSES, (64,))
    report = pl.microscope(model, [lambda x=x: low(model, x, y) for x in batches], draws=4)
    return report.blame(**arguments)


def in_bf16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with pl.emulate(forward="bf16", backward="bf16"):
        return F.cross_entropy(model(x), y)


def in_fp16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with pl.emulate(forward="fp16", backward="fp16", scale={"gradients": 2.0**10}):
        return F.cross_entropy(model(x), y)


@each(
    "fault,module,cast,direction,is_bias",
    [
        ("biased rounding", "layers.2.linear", "e4m3 of weights|e4m3 of activations", "forward", True),
        ("fused kernel", "layers.2", "operations", None, True),
        ("wrong scale", "layers.2.linear", "e4m3 of activations", "forward", True),
        ("narrow accumulator", "layers.2.linear", "e5m4 accumulator", None, None),
        ("reductions in BF16", "layers.2", "bf16 arithmetic|operations", None, None),
    ],
)
def test_planted_errors_are_found(
    fault: str, module: str, cast: str, direction: str | None, is_bias: bool | None
) -> None:
    torch.manual_seed(0)
    # Sums in BF16 are hardly worse than products of BF16: there the others are in FP16.
    blame = blame_of(Faulty(fault), in_fp16 if fault == "reductions in BF16" else in_bf16)
    row = blame[0]
    assert row.module == module, str(blame)
    assert row.cast in cast.split("|"), row.cast
    assert row.share > 0.3 and direction in (None, row.direction), str(blame)
    of_module = sum(found.share for found in blame if found.module == module)
    assert of_module > 0.8, str(blame)
    if is_bias is not None:
        assert row.is_bias is is_bias, (row.bias, row.noise)
    assert blame.explained == pytest.approx(1, abs=0.1)
    assert blame.sentence.startswith(f"{round(100 * row.share)} % of the gradients' error comes from the {row.cast} of")


@each("kind", KINDS)
def test_shares_add_up_on_every_kind_of_model(kind: str) -> None:
    torch.manual_seed(0)
    model, batches, labels = example(kind)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    steps = [lambda x=x, y=y: low_loss(model, x, y) for x, y in zip(batches, labels, strict=True)]
    blame = pl.microscope(model, steps, draws=3).blame(budget=60)
    assert blame.explained == pytest.approx(1, abs=0.02), str(blame)
    assert blame.relative_error > 1e-4 and blame.passes <= 60
    assert [abs(row.share) for row in blame] == sorted((abs(row.share) for row in blame), reverse=True)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in before.items())
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules()) or kind == "depthwise"
    assert "forward" not in vars(model) and nn.Module.__call__.__qualname__.startswith("Module.")


@each("kind", ["fp8-unit", "fp8-tensor", "fp16 weights", "block formats"])
def test_casts_of_every_kind_are_told_apart(kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, CLASSES))
    if kind.startswith("fp8"):
        scaling = kind.removeprefix("fp8-")
        model = nn.Sequential(
            pl.fp8.Linear(WIDTH, 48, scaling=scaling), nn.GELU(), pl.fp8.Linear(48, CLASSES, scaling=scaling)
        )

    def low(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if kind == "fp16 weights":
            return F.cross_entropy(m(x.half()).float(), y)
        if kind == "block formats":
            with pl.emulate(forward="mxfp8_e4m3", backward="mxfp8_e5m2"):
                return F.cross_entropy(m(x), y)
        return F.cross_entropy(m(x), y)

    blame = blame_of(model.half() if kind == "fp16 weights" else model, low)
    assert blame.explained == pytest.approx(1, abs=0.1), str(blame)
    words = {row.cast for row in blame}
    if kind == "fp16 weights":
        assert "fp16 arithmetic" in words
        return
    formats = ("mxfp8_e4m3", "mxfp8_e5m2") if kind == "block formats" else ("e4m3", "e5m2")
    assert {f"{formats[0]} of weights", f"{formats[0]} of activations", f"{formats[1]} of gradients"} <= words, words
    gradients = [row for row in blame if row.cast == f"{formats[1]} of gradients"]
    assert {row.direction for row in gradients} == {"backward"}


def test_a_parameter_alone() -> None:
    torch.manual_seed(0)
    model = Faulty("wrong scale", 1)
    blame = blame_of(model, in_bf16, of="head.weight", budget=50)
    assert blame.of == "head.weight" and blame[0].module == "layers.1.linear"
    assert "the error of head.weight's gradient" in blame.sentence
    # What arises in the backward below it cannot reach it.
    assert not [row for row in blame if row.module == "layers.0.linear" and row.direction == "backward" and row.share]


def test_a_small_budget_leaves_modules_together_and_says_so() -> None:
    torch.manual_seed(0)
    blame = blame_of(Faulty("wrong scale"), in_bf16, budget=14)
    assert blame.passes <= 14
    assert any(row.module.endswith("*") for row in blame)
    assert any("did not allow to tell apart the modules" in remark for remark in blame.remarks)
    assert any("did not allow to tell bias from noise" in remark for remark in blame.remarks)
    assert blame[0].is_bias is None and blame[0].direction == "both"
    assert blame.explained == pytest.approx(1, abs=0.1)


def test_no_error_no_blame() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    blame = blame_of(model, lambda m, x, y: F.cross_entropy(m(x), y))
    assert len(blame) == 0 and blame.relative_error == 0
    assert blame.sentence == "Nothing contributes to the gradients' error: there is none."


class Named(nn.Module):
    """A model whose last layer has a name that is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.called = nn.Linear(WIDTH, WIDTH), name
        self.add_module(name, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.called)(torch.tanh(self.first(x))).mean()


def test_a_module_called_loss_is_none_of_the_steps_own_operations() -> None:
    x, shares = torch.randn(8, WIDTH), []
    for name in ("last", "loss"):
        torch.manual_seed(0)
        model = Named(name)

        def step(model: nn.Module = model) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x).bfloat16()
            return (y * 1.7 + 0.3).square()

        blame, found = pl.microscope(model, step, draws=3).blame(), {}
        for row in blame:
            key = ("loss" if row.module in ("last", "loss") else row.module, row.direction)
            found[key] = found.get(key, 0.0) + row.share
        shares.append(found)
    assert shares[1] == pytest.approx(shares[0], abs=1e-6)


def test_sparse_gradients_are_judged_too() -> None:
    model = nn.Sequential(nn.Embedding(7, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES))
    ids, y = torch.randint(0, 7, (32,)), torch.randint(0, CLASSES, (32,))
    blame = pl.microscope(model, lambda: in_bf16(model, ids, y), draws=3).blame(of="0.weight")
    assert blame.explained == pytest.approx(1, abs=0.05) and blame[0].module == "1"


def test_gradients_that_overflow_are_no_error_of_zero() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), torch.randn(8, WIDTH)

    def step(scale: float) -> Tensor:
        with pl.emulate("fp16"):
            return (model(x).float() * torch.tensor([1.0, scale])).square().mean()

    blame = pl.microscope(model, lambda: step(1e4), draws=3).blame(of="1.weight")
    assert any("the step makes them NaN or infinite: gradient values of 1.weight." in note for note in blame.remarks)
    report = pl.microscope(model, lambda: step(1e4) * 1e12, draws=3)
    with pytest.raises(pl.StateError, match="expected gradients of finite values; got NaN or infinite ones"):
        report.blame()


def test_one_closure_is_varied_as_the_report_is() -> None:
    torch.manual_seed(0)
    model, x, y = Faulty("biased rounding"), torch.randn(64, WIDTH), torch.randint(0, CLASSES, (64,))
    before = [p.clone() for p in model.parameters()]
    blame = pl.microscope(model, lambda: in_bf16(model, x, y), draws=3).blame()
    assert blame[0].module == "layers.2.linear" and blame[0].bias is not None
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


def test_a_blame_is_data() -> None:
    torch.manual_seed(0)
    blame = blame_of(Faulty("wrong scale"), in_bf16, budget=60)
    data = json.loads(json.dumps(blame.to_dict(), allow_nan=False))
    assert data["rows"][0]["module"] == blame[0].module and data["explained"] == blame.explained
    sentence, heads, *lines = str(blame).splitlines()
    assert sentence == blame.sentence and heads.split() == ["share", "module", "contribution", "direction", "kind"]
    assert all(
        line[heads.index("module") :].startswith(row.module) for line, row in zip(lines[:12], blame, strict=False)
    )
    assert math.fsum(row.share for row in blame.rows) == pytest.approx(blame.explained)
    unknown = Interval(low=0.0, estimate=math.nan, high=math.inf)
    row = BlameRow(module="a", cast="operations", direction="forward", share=math.nan, bias=unknown, noise=math.nan)
    blame = Blame(rows=(row,), of="gradients", relative_error=1.0, passes=4.0)
    assert blame.sentence.startswith("unknown of the gradients' error comes from the operations of a in the forward")
    data = json.loads(json.dumps(blame.to_dict(), allow_nan=False))
    assert data["rows"][0]["share"] is None and data["rows"][0]["bias"] == {"low": 0, "estimate": None, "high": None}


def test_what_cannot_be_asked_for() -> None:
    import pickle

    model = nn.Sequential(nn.Linear(WIDTH, CLASSES))
    x, y = torch.randn(8, WIDTH), torch.randint(0, CLASSES, (8,))
    report = pl.microscope(model, lambda: low_loss(model, x, y), draws=3)
    with pytest.raises(pl.ArgumentError, match="blame: expected budget to be an integer of at least 8; got budget=3"):
        report.blame(budget=3)
    with pytest.raises(
        pl.ArgumentError, match="the name of a parameter; got of='1.weight'. There are 0.weight, 0.bias"
    ):
        report.blame(of="1.weight")
    with pytest.raises(pl.StateError, match="got a report that was loaded, or whose model is gone"):
        pickle.loads(pickle.dumps(report)).blame()
    broken = pl.microscope(model, lambda: low_loss(model, x * math.nan, y), draws=3)
    with pytest.raises(pl.StateError, match="expected gradients of finite values"):
        broken.blame()


def test_a_module_may_have_results_that_nothing_uses() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves, self.head = Halves(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.halves(x)[0])

    torch.manual_seed(0)
    model, x = Model(), torch.randn(16, 8)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    found = pl.microscope(model, step, draws=3).blame(budget=30)
    assert {row.module for row in found.rows} <= {"halves.linear", "head", "halves", "model"} and found.rows


def test_an_output_may_be_changed_in_place_by_the_module_around() -> None:
    class Block(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.linear, self.head, self.inplace = nn.Linear(8, 8), nn.Linear(8, 4), inplace

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.linear(x), inplace=self.inplace))

    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model, x = Block(inplace), torch.randn(16, 8)

        def step(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean()

        found.append(pl.microscope(model, step, draws=3).blame(budget=30))
    out_of_place, in_place = ({(row.module, row.cast, row.direction) for row in blame.rows} for blame in found)
    assert in_place and in_place == out_of_place
