"""Policies: lists and module rules as data, what they change in a training step, and what is refused of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.formats import Plan
from plimsoll.precision import Policy, PolicyRecord, prepare
from tests.support.cases import each
from tests.support.precision.training import adamw, batches, loss_of, net, run


class Blocks(nn.Module):
    """Blocks with names to match, which note the dtypes they compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 1)
        self.dtypes: dict[str, torch.dtype] = {}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, a, y, name=name: self.dtypes.__setitem__(name, y.dtype))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


HALF, BF, FULL = torch.float16, torch.bfloat16, torch.float32


def test_the_records_are_the_lists_and_rules() -> None:
    policy = Policy().with_operation("softmax", "low").with_operation("linear", None).with_module("blocks.*", "fp32")
    records = policy.records()
    assert PolicyRecord("operation", "softmax", "low") in records
    assert records[-1] == PolicyRecord("module", "blocks.*", "fp32")
    assert not any(record.name == "linear" for record in records)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(policy.table())
    text = captured.get()
    assert "softmax" in text and "blocks.*" in text and "binary_cross_entropy" in text and "runs in fp32" in text


def test_policies_do_not_change() -> None:
    first = Policy()
    second = first.with_operation(torch.softmax, "low").with_module("head", torch.float32)
    assert first == Policy() != second and first.operations.of("softmax") == "high"
    assert second.modules == (("head", "fp32"),)


@each(("place", "dtype"), [("low", HALF), ("high", FULL), (None, FULL), ("promote", FULL)])
def test_an_operation_runs_where_the_policy_says(place: Any, dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8)
    loop = prepare(model, adamw(model), "amp-fp16", policy=Policy().with_operation("gelu", place))
    with loop.forward():
        assert torch.nn.functional.gelu(torch.randn(3)).dtype == dtype
        assert model(torch.randn(2, 8)).dtype == HALF


def test_a_banned_operation_is_refused_inside_the_forward_only() -> None:
    model = nn.Linear(8, 8)
    loop = prepare(model, adamw(model), "amp-bf16", policy=Policy().with_operation("tanh", "banned"))
    with loop.forward(), pytest.raises(pl.ArgumentError, match="tanh: expected an operation that the lists do not ban"):
        torch.tanh(torch.zeros(2))
    assert torch.tanh(torch.zeros(2)).eq(0).all()


@each("name", ["amp-fp16", "amp-bf16", "fp16-master", "bf16-master", "bf16-kahan", "fp16-pure"])
def test_cross_entropy_of_probabilities_is_refused_in_low_precision(name: str) -> None:
    model = net()
    loop = prepare(model, adamw(model, name), name)
    x, y = batches(1)[0]
    target = y.gt(0).float()
    with loop.forward():
        logits = model(x).float()
        with pytest.raises(pl.ArgumentError, match="Use torch.nn.functional.binary_cross_entropy_with_logits"):
            nn.functional.binary_cross_entropy(logits.sigmoid(), target)
        with pytest.raises(pl.ArgumentError, match="BCEWithLogitsLoss"):
            nn.BCELoss()(logits.sigmoid(), target)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, target)
    loop.step(loss)


def test_it_is_allowed_at_fp32_and_where_the_policy_allows_it() -> None:
    model = net()
    x, y = batches(1)[0]
    target = y.gt(0).float()
    loop = prepare(model, adamw(model), "fp32")
    loop.step(lambda: nn.functional.binary_cross_entropy(model(x).sigmoid(), target))
    loop.close()
    policy = Policy().with_operation("binary_cross_entropy", "high")
    loop = prepare(model, adamw(model), "amp-bf16", policy=policy)
    loop.step(lambda: nn.functional.binary_cross_entropy(model(x).sigmoid(), target))
    assert loop.step_index == 1


@pytest.mark.parametrize(("name", "low"), [("amp-fp16", HALF), ("bf16-master", BF)])
def test_a_module_runs_in_the_format_of_the_last_rule_that_matches(name: str, low: torch.dtype) -> None:
    model = blocks()
    policy = Policy().with_module("blocks.1.0", low).with_module("blocks.*", "fp32").with_module("blocks.2.*", low)
    loop = prepare(model, adamw(model), name, policy=policy)
    losses = run(loop, batches(30))
    assert sum(losses[-5:]) < sum(losses[:5])
    assert model.dtypes == {"blocks.0.0": FULL, "blocks.1.0": low, "blocks.2.0": low, "head": low}
    weights = FULL if name == "amp-fp16" else low
    assert model.blocks[2][0].weight.dtype == weights and model.blocks[0][0].weight.dtype == FULL


def test_rules_hold_in_the_loops_contexts_only() -> None:
    model = blocks()
    loop = prepare(model, adamw(model), "amp-fp16", policy=Policy().with_module("blocks.0", "bf16"))
    model(torch.randn(2, 8))
    assert set(model.dtypes.values()) == {FULL}
    with loop.evaluate():
        model(torch.randn(2, 8))
    assert model.dtypes["blocks.0.0"] == BF and model.dtypes["head"] == HALF
    model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), loop.forward():
        model(torch.randn(2, 8))
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == FULL


def test_norms_can_be_put_in_16_bits_by_name() -> None:
    model = net()
    loop = prepare(model, adamw(model), "bf16-master", policy=Policy().with_module("norm", "bf16"))
    assert model.norm.weight.dtype == BF and model.batch_norm.weight.dtype == FULL
    assert loop.formats["norm"] == "bf16" and loop.formats["model"] == "bf16" and loop.formats["batch_norm"] == "fp32"


def test_tied_weights_in_two_formats_are_refused() -> None:
    model = blocks()
    model.head.weight = nn.Parameter(torch.randn(8, 8))
    model.blocks[0][0].weight = model.head.weight
    with pytest.raises(
        pl.ArgumentError, match="share a parameter to have one format; got blocks.0.0.weight in torch.bf"
    ):
        prepare(model, adamw(model), "bf16-master", policy=Policy().with_module("head", "fp32"))
    assert model.head.weight.dtype == FULL


@each(
    ("make", "message"),
    [
        (lambda: Policy().with_operation("sofmax", "low"), "got 'sofmax'. Did you mean softmax"),
        (
            lambda: Policy().with_operation("softmax", "lowest"),
            "expected place to be 'low', 'high', 'promote' or 'banned'",
        ),
        (lambda: Policy().with_module("", "fp32"), "a module's name or a glob; got ''"),
        (lambda: Policy().with_module(3, "fp32"), "a module's name or a glob; got 3"),
    ],
)
def test_wrong_rules_are_refused(make: Any, message: str) -> None:
    with pytest.raises(pl.ArgumentError, match=re.escape(message)):
        make()


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(pl.FormatError, match="'fp17'"):
        Policy().with_module("head", "fp17")


@each(
    ("policy", "name", "message"),
    [
        (Policy().with_module("haed", "fp32"), "amp-fp16", "got 'haed', which matches none. Names are like head"),
        (Policy().with_module("blocks.7.*", "fp32"), "bf16-master", "got 'blocks.7.*', which matches none"),
        (Policy().with_operation("softmax", "low"), "bf16-master", "a policy of modules only at bf16-master"),
        (Policy().with_operation("softmax", "low"), "fp32", "a policy of modules only at fp32"),
        (Policy().with_module("head", "e4m3"), "fp16-master", "keeps weights in them; got e4m3. Use an amp level"),
        (Policy().with_module("head", "e8m0"), "amp-fp16", "signed numbers of at most 32 bits for modules; got e8m0"),
        (Policy().with_module("head", "fp64"), "amp-fp16", "signed numbers of at most 32 bits for modules; got fp64"),
    ],
)
def test_a_policy_that_the_level_cannot_follow_is_refused_and_nothing_changes(
    policy: Policy, name: str, message: str
) -> None:
    model = blocks()
    with pytest.raises(pl.ArgumentError, match=re.escape(message)):
        prepare(model, adamw(model), name, policy=policy)
    assert {p.dtype for p in model.parameters()} == {FULL}
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("where", ["object", "file"])
def test_a_plan_says_which_module_runs_in_which_format(where: str, tmp_path: Path) -> None:
    plan = Plan(target="fp16", formats={"blocks.*": "bf16", "blocks.1.0": "fp16", "head": "fp32"})
    plan.save(tmp_path / "plan.toml")
    model = blocks()
    loop = prepare(model, adamw(model), plan if where == "object" else str(tmp_path / "plan.toml"))
    losses = run(loop, batches(20))
    assert sum(losses[-5:]) < sum(losses[:5])
    assert model.dtypes == {"blocks.0.0": BF, "blocks.1.0": HALF, "blocks.2.0": BF, "head": FULL}
    assert loop.precision == "plan (fp16)" and loop.scaler is not None


def test_a_plan_without_narrow_ranges_has_no_scaler_and_a_default_for_the_rest() -> None:
    model = blocks()
    loop = prepare(model, adamw(model), Plan(target="bf16", formats={"head": "fp32"}, default="bf16"))
    run(loop, batches(1))
    assert model.dtypes == {"blocks.0.0": BF, "blocks.1.0": BF, "blocks.2.0": BF, "head": FULL}
    assert loop.scaler is None


def test_the_policy_counts_before_the_plan() -> None:
    model = blocks()
    plan = Plan(target="bf16", formats={"blocks.0.0": "bf16", "head": "bf16"})
    loop = prepare(model, adamw(model), plan, policy=Policy().with_module("head", "fp32"))
    run(loop, batches(1))
    assert model.dtypes["head"] == FULL and model.dtypes["blocks.0.0"] == BF


def test_a_plan_of_another_model_is_refused() -> None:
    model = blocks()
    plan = Plan(target="bf16", formats={"encoder.0": "bf16"})
    with pytest.raises(pl.ArgumentError, match="each module of the plan to be in the model; got 'encoder.0'"):
        prepare(model, adamw(model), plan)


def test_a_plan_trains_as_the_level_that_it_spells_out() -> None:
    losses = []
    for precision in ("amp-bf16", Plan(target="bf16", formats={}, default="bf16")):
        model = blocks()
        loop = prepare(model, adamw(model), precision)
        found = []
        for x, y in batches(5):
            with loop.forward():
                loss = nn.functional.mse_loss(model(x).float(), y)
            loop.step(loss)
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]
    assert loss_of(blocks(), batches(1)[0]).item() != losses[0][0]
