"""Plans that mix FP8 and BF16: multiplied in FP8 they give what their emulation gives, and which layers are so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll import fp8
from plimsoll.formats import Plan
from plimsoll.precision import Policy, prepare
from tests.support.cases import each
from tests.support.precision.training import contents

MULTIPLIED, EMULATED = Policy(fp8_plans="multiplied"), Policy(fp8_plans="emulated")
SCALES = {"activations": 2.0**5, "weights": 2.0**9, "gradients": 2.0**18}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 16))


def plan(**fields: Any) -> Plan:
    usual = {"target": "fp8", "formats": {"0": "e4m3", "2.0": "e4m3", "3": "bf16"}}
    return Plan(**{**usual, "scales": {"0": SCALES, "2.0": {**SCALES, "weights": 2.0**7}}, **fields})


def trained(given: Plan, policy: Policy, steps: int = 4) -> tuple[list[float], Any, list[str]]:
    net = model()
    generator = torch.Generator().manual_seed(1)
    with prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), given, policy=policy, accumulate=2) as loop:
        layers = [name for name, module in net.named_modules() if isinstance(module, fp8.Linear)]
        losses = []
        for _ in range(2 * steps):
            x = torch.randn(48, 32, generator=generator)
            with loop.forward():
                loss = (net(x).float() - x[:, :16]).square().mean()
            loop.step(loss)
            losses.append(loss.item())
    return losses, contents(net.state_dict()), layers


@each(
    "given",
    [
        plan(),
        plan(scales={"0": SCALES, "2.0": {**SCALES, "activations": 2.0**-3}}),
        plan(scales={}, scale=2.0**12),  # no scales of casts: a loss scale carries the gradients
        plan(scales={"0": SCALES, "2.0": SCALES}, default="fp32"),
        plan(scales={"0": SCALES, "2.0": SCALES}, default="bf16"),
    ],
    ids=["scales", "small", "loss scale", "fp32", "bf16"],
)
def test_multiplied_is_emulated_to_the_bit(given: Plan) -> None:
    multiplied, emulated = trained(given, MULTIPLIED), trained(given, EMULATED)
    assert multiplied[2] == ["0", "2.0"] and emulated[2] == []
    assert multiplied[:2] == emulated[:2]


def test_a_machine_without_fp8_units_emulates() -> None:
    assert trained(plan(), Policy(), 1)[2] == []  # a CPU; on GPUs of capability 8.9 and more they are multiplied


def test_which_layers_are_multiplied() -> None:
    net = model()
    formats = {"0": "mxfp8_e4m3", "2": "e4m3", "2.0": "e4m3", "3": "e4m3"}
    given = plan(formats=formats, scales={"2": SCALES, "2.0": SCALES, "3": SCALES})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prepare(net, optimizer, given, policy=MULTIPLIED) as loop:
        assert [n for n, m in net.named_modules() if isinstance(m, fp8.Linear)] == ["3"]  # "2" emulates all in it
        assert net[3].casts() == {
            "activations": ("e4m3", 2.0**5),
            "weights": ("e4m3", 2.0**9),
            "gradients": ("e5m2", 2.0**18),
        }
        assert not list(net[3].buffers()) and loop.fp8_left == {}
        loop.change("fp32")
        assert type(net[3]) is nn.Linear
        loop.change(given)
        assert isinstance(net[3], fp8.Linear)
    assert type(net[3]) is nn.Linear and "fp8_recipe" not in vars(net[3])


def test_other_backward_formats_are_emulated() -> None:
    net = model()
    given = Plan(target="x", formats={"0": "e4m3"}, backward={"0": "e4m3"}, scales={"0": SCALES})
    with prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), given, policy=MULTIPLIED):
        assert type(net[0]) is nn.Linear


def test_a_modules_rule_in_a_policy_is_multiplied_too() -> None:
    found, x = [], torch.randn(16, 32)
    for policy in (MULTIPLIED, EMULATED):
        net, ruled = model(), policy.with_module("0", "e4m3")
        with prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), "fp32", policy=ruled) as loop:
            assert isinstance(net[0], fp8.Linear) == (policy is MULTIPLIED)
            with loop.forward():
                found.append(net(x).detach())
    assert torch.equal(*found)


def test_a_run_of_a_plan_records_its_casts(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prepare(net, optimizer, plan(), policy=MULTIPLIED, watch=tmp_path / "run") as loop:
        with loop.forward():
            loss = net(torch.randn(16, 32)).float().square().mean()
        loop.step(loss)
    casts = {(c.module, c.role): c for c in pl.Run(tmp_path / "run").casts()}
    assert casts["2.0", "weights"].scales.tolist() == [2.0**7] and casts["0", "gradients"].constant
    assert {module for module, _ in casts} == {"0", "2.0"}


def test_the_choice_is_told_and_checked() -> None:
    assert ("fp8", "plans", "emulated") in EMULATED.records()
    assert Policy().with_fp8(plans="multiplied").with_fp8(margin=1) == Policy(fp8_plans="multiplied", fp8_margin=1)
    with pytest.raises(
        pl.ArgumentError, match="expected fp8_plans to be 'auto', 'multiplied' or 'emulated'; got fp8_plans='real'"
    ):
        Policy(fp8_plans="real")  # type: ignore[arg-type]
