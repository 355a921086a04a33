"""Which factor a parameter's learning rate has, from its kind, its fans and its depth."""

import pytest
import torch
from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.unit import nn as unn
from plimsoll.unit.optim import SGD, Adam, AdamW, lr_factor
from plimsoll.unit.optim.parameter_kinds import Trait, kinds_of, tag, tag_depth, tag_fan_in, traits_of
from tests.support.cases import each


def model(width=64, hidden=256):
    return nn.Sequential(
        unn.Embedding(10, width), unn.LayerNorm(width), unn.Linear(width, hidden), unn.GELU(),
        unn.Linear(hidden, width), unn.LinearReadout(width, 10),
    )  # fmt: skip


def factors(optimizer):
    return {n: g["lr_factor"] for g in optimizer.param_groups for n in g["param_names"]}


@each("optimizer", [SGD, Adam, AdamW])
def test_every_kind_has_its_rule(optimizer):
    assert factors(optimizer(model(), lr=1.0)) == {
        "0.weight": 1.0, "1.weight": 1.0, "1.bias": 1.0, "2.weight": 64**-0.5, "2.bias": 1.0,
        "4.weight": 256**-0.5, "4.bias": 1.0, "5.weight": 1.0, "5.bias": 1.0,
    }  # fmt: skip


def test_parameters_of_one_factor_share_a_group():
    groups = AdamW(model(), lr=1.0).param_groups
    assert [(g["kind"], g["lr_factor"], len(g["params"])) for g in groups] == [
        ("embedding", 1.0, 1), ("norm", 1.0, 1), ("bias", 1.0, 4), ("weight", 0.125, 1), ("weight", 0.0625, 1),
        ("readout", 1.0, 1),
    ]  # fmt: skip


def test_depth_divides_every_kind_within_the_stack_and_nests():
    stack = nn.Sequential(*(model() for _ in range(4)))
    outer = nn.Sequential(stack, model())
    tag_depth(stack, 4)
    found = factors(AdamW(outer, lr=1.0))
    plain = factors(AdamW(model(), lr=1.0))
    for name, factor in plain.items():
        assert found[f"0.2.{name}"] == pytest.approx(factor / 2, rel=1e-15)
        assert found[f"1.{name}"] == factor
    tag_depth(outer, 9)
    nested = factors(AdamW(outer, lr=1.0))
    assert nested["0.0.2.weight"] == pytest.approx(found["0.0.2.weight"] / 3, rel=1e-15)


def test_depth_of_single_parameters_of_a_module():
    block = model()
    tag_depth(block[2], 16, "weight")
    plain, found = factors(AdamW(model(), lr=1.0)), factors(AdamW(block, lr=1.0))
    assert found == {name: factor / 4 if name == "2.weight" else factor for name, factor in plain.items()}
    with pytest.raises(ArgumentError, match="expected a parameter of .* itself; got 'cats'"):
        tag_depth(block[2], 2, "cats")


def test_a_kernel_sums_over_its_channels_and_positions():
    convolution = nn.Conv2d(8, 16, 3)
    tag(convolution, weight="weight", bias="bias")
    assert traits_of(convolution)["weight"] == Trait(kind="weight", fan_in=72)
    tag_fan_in(convolution, weight=100)
    assert lr_factor(traits_of(convolution)["weight"]) == 0.1


def test_kinds_are_the_modules_and_survive_other_tensors_in_their_place():
    layer = unn.Linear(4, 8, device="meta")
    assert kinds_of(layer.to_empty(device="cpu")) == {"weight": "weight", "bias": "bias"}
    layer.weight = nn.Parameter(torch.zeros(8, 4))
    assert kinds_of(layer) == {"weight": "weight", "bias": "bias"}
    assert kinds_of(unn.Linear(4, 8, bias=False)) == {"weight": "weight"}


def test_a_table_that_is_a_readout_too_is_an_embedding():
    tied = nn.Sequential(unn.Embedding(10, 64), unn.LinearReadout(64, 10, bias=False))
    tied[1].weight = tied[0].weight
    assert kinds_of(tied) == {"0.weight": "embedding"}
    assert factors(AdamW(tied, lr=1.0)) == {"0.weight": 1.0}
    turned = nn.Sequential(tied[1], tied[0])
    assert kinds_of(turned) == {"0.weight": "embedding"}


def test_uses_that_disagree_are_an_error():
    two = nn.ModuleList([unn.Linear(4, 4, bias=False), unn.LinearReadout(4, 4, bias=False)])
    two[1].weight = two[0].weight
    with pytest.raises(
        ArgumentError, match=r"one kind for a shared parameter; got 0.weight \(weight\), 1.weight \(readout"
    ):
        kinds_of(two)
    tag(two[1], weight="weight")
    assert kinds_of(two) == {"0.weight": "weight"}


@each(
    ("call", "message"),
    [
        (lambda m: tag(m, weight="matrix"), r"tag: expected a kind of weight, readout, .* got weight='matrix'"),
        (
            lambda m: tag(m, wait="weight"),
            r"tag: expected a parameter of Linear itself; got 'wait'. It has weight, bias",
        ),
        (
            lambda m: tag_fan_in(m, weight=0),
            r"tag_fan_in: expected weight to be an integer of at least 1; got weight=0",
        ),
        (lambda m: tag_fan_in(m, wait=1), r"expected a parameter of Linear itself; got 'wait'"),
        (lambda m: tag_depth(m, 0), r"tag_depth: expected depth to be an integer of at least 1; got depth=0"),
        (lambda m: tag_depth(m, True), r"tag_depth: expected depth to be an integer of at least 1; got depth=True"),
    ],
)
def test_a_tag_that_cannot_be_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(nn.Linear(2, 2))


class TestParametersWithoutKind:
    def model(self):
        return nn.ModuleDict({"body": unn.Linear(16, 16), "head": nn.Linear(16, 2)})

    def test_are_an_error_that_names_them(self):
        with pytest.raises(
            ArgumentError, match=r"AdamW: expected every .* got 'head.weight' of shape \(2, 16\) without one"
        ):
            AdamW(self.model(), lr=1.0)

    def test_take_the_rate_as_it_is_where_that_is_said(self):
        found = factors(AdamW(self.model(), lr=1.0, plain=True))
        assert found == {"body.weight": 0.25, "body.bias": 1.0, "head.weight": 1.0, "head.bias": 1.0}
        assert factors(AdamW(self.model(), lr=1.0, plain="head.*")) == found
        assert factors(AdamW(self.model(), lr=1.0, plain=["head.*", "body.weight"]))["body.weight"] == 1.0

    def test_a_glob_must_name_some_and_all(self):
        with pytest.raises(ArgumentError, match=r"got 'tail.\*', which matches none. .* such as 'body.weight'"):
            AdamW(self.model(), lr=1.0, plain=["head.*", "tail.*"])
        with pytest.raises(ArgumentError, match="got 'head.bias' of shape"):
            AdamW(self.model(), lr=1.0, plain="head.weight")

    def test_of_a_list_are_looked_up_in_the_model(self):
        whole = self.model()
        with pytest.raises(ArgumentError, match=r"got a parameter of shape \(16, 16\) without one. Give model="):
            SGD(whole["body"].parameters(), lr=1.0)
        with pytest.raises(ArgumentError, match=r"got 'weight' of shape \(16, 16\)"):
            SGD(whole["body"].named_parameters(), lr=1.0)
        optimizer = SGD(whole["body"].parameters(), lr=1.0, model=whole)
        assert [g["lr_factor"] for g in optimizer.param_groups] == [0.25, 1.0]
        with pytest.raises(ArgumentError, match=r"expected a model where plain names parameters; got plain='head.\*'"):
            SGD(whole.parameters(), lr=1.0, plain="head.*")


def test_groups_keep_their_settings_and_are_split_by_factor():
    whole = model()
    groups = [
        {"params": whole[:3].named_parameters(), "lr": 0.5, "betas": (0.8, 0.9)},
        {"params": whole[3:].named_parameters(), "weight_decay": 0.1},
    ]
    optimizer = AdamW(groups, lr=2.0, model=whole)
    found = [
        (g["lr"], g["betas"][0], g["weight_decay"], g["lr_factor"], g["reference_lr"]) for g in optimizer.param_groups
    ]
    first, second = (0.5, 0.8, 0.0), (2.0, 0.9, 0.1)
    assert found == [
        (*first, 1.0, 0.5), (*first, 1.0, 0.5), (*first, 1.0, 0.5), (*first, 0.125, 0.5),
        (*second, 0.0625, 2.0), (*second, 1.0, 2.0), (*second, 1.0, 2.0),
    ]  # fmt: skip


def test_a_group_may_say_its_kind():
    x = nn.Parameter(torch.zeros(16, 4))
    groups = [{"params": x, "kind": "weight"}]
    assert AdamW(groups, lr=1.0).param_groups[0]["lr_factor"] == 0.5
    assert AdamW([{**groups[0], "fan_in": 16, "depth": 4}], lr=1.0).param_groups[0]["lr_factor"] == 0.125
    optimizer = AdamW([{"params": [x], "kind": "plain"}], lr=1.0)
    optimizer.add_param_group(
        {"params": [nn.Parameter(torch.zeros(4, 64))], "kind": "embedding", "lr": 3.0, "depth": 4}
    )
    assert [(g["lr_factor"], g["reference_lr"]) for g in optimizer.param_groups] == [(1.0, 1.0), (0.5, 3.0)]
    with pytest.raises(ArgumentError, match="expected a group's kind to be 'plain' or one of weight, .* got 'matrix'"):
        AdamW([{"params": [x], "kind": "matrix"}], lr=1.0)
    for entry, message in (
        ({"fan_in": -4}, "AdamW: expected fan_in to be an integer of at least 1; got fan_in=-4"),
        ({"fan_in": 0}, "expected fan_in to be an integer of at least 1; got fan_in=0"),
        ({"depth": 0}, "expected depth to be an integer of at least 1; got depth=0"),
        ({"depth": 4, "kind": None}, "'kind' where it has 'fan_in' or 'depth'; got 'params', 'kind', 'depth'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            AdamW([{**groups[0], **entry}], lr=1.0)
    for given, message in (
        ([{"lr": 1.0}], "expected a group to have 'params', .* got 'lr'"),
        ([*groups, x], "expected parameters or groups of them; got 1 groups among 2 items"),
    ):
        with pytest.raises(ArgumentError, match=message):
            AdamW(given, lr=1.0)
    with pytest.raises(ArgumentError, match="expected plain to be True, False or names of parameters; got plain=5"):
        AdamW(nn.Linear(2, 2), lr=1.0, plain=5)
    assert factors(AdamW(nn.Linear(2, 2), lr=1.0, plain=iter(["weight", "bias"])))["weight"] == 1.0
    with pytest.raises(ArgumentError, match="got a parameter of shape"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_one_tensor_is_no_list():
    with pytest.raises(
        ArgumentError, match=r"AdamW: expected a model, or an iterable .* got one tensor of shape \(3,\)"
    ):
        AdamW(nn.Parameter(torch.zeros(3)), lr=1.0)


def test_sgd_refuses_a_readout_under_which_gradients_shrink():
    whole = nn.Sequential(unn.Linear(4, 4), unn.LinearReadout(4, 2, constraint="to_output_scale"))
    with pytest.raises(
        ArgumentError, match="SGD: expected a readout without constraint.* got 1.constraint='to_output_scale'"
    ):
        SGD(whole, lr=1.0)
    assert Adam(whole, lr=1.0).param_groups
