"""`fp8.convert`: in place, by globs, with what is left and why; nothing is changed where it refuses."""

import copy

import pytest
import torch
from torch import nn

from plimsoll import fp8
from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit import nn as unit_nn
from plimsoll.unit.nn import Linear as UnitLinear, LinearReadout


def unit_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(UnitLinear(32, 64), unit_nn.GELU(), UnitLinear(64, 32, constraint=None), LinearReadout(32, 16))


def test_in_place_with_the_same_parameters_names_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    assert fp8.convert(model, "tensor", history=2, margin=1) is model and model.fp8_left == []
    assert dict(model.named_modules()) == modules
    assert all(found is parameters[name] for name, found in model.named_parameters())
    assert isinstance(model[0], fp8.Linear) and model[0].fp8_recipe.history == 2
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    assert seen == ["hook"] and not torch.equal(model[0].weight, before)


def test_unit_layers_keep_their_factors_and_readouts_stay() -> None:
    model, x = unit_model(), torch.randn(48, 32)
    plain = copy.deepcopy(model)
    (left,) = fp8.convert(model, "unit").fp8_left
    assert str(left).startswith("3: a readout, whose gradients come straight from the loss")
    found, expected = model(x).detach(), plain(x).detach()
    assert float((found - expected).norm() / expected.norm()) < 0.12
    assert [type(m) for m in model] == [fp8.Linear, unit_nn.GELU, fp8.Linear, LinearReadout]
    assert fp8.convert(unit_model(), "unit", include=("0", "3")).fp8_left[0].why == "not included"
    with_readout = fp8.convert(unit_model(), "unit", include="*")
    assert isinstance(with_readout[3], fp8.Linear) and with_readout[3].fp8_recipe.factors.output == 1 / 32
    assert float((with_readout(x).detach() - expected).norm() / expected.norm()) < 0.16
    marked = nn.Sequential(UnitLinear(16, 16))
    marked[0].unit_kinds = {"weight": "readout"}
    assert len(fp8.convert(marked, "unit").fp8_left) == 1


def test_plain_layers_are_refused_with_unit_scaling_but_at_the_users_word() -> None:
    model = nn.Sequential(UnitLinear(16, 16), nn.Linear(16, 16))
    with pytest.raises(ArgumentError, match="got torch.nn.Linear as 1, whose tensors may have any scale. Convert the"):
        fp8.convert(model, "unit")
    assert type(model[0]) is UnitLinear, "nothing is changed"
    fp8.convert(model, "unit", include=["0", "1"])
    assert model[1].fp8_recipe.factors.output == 1.0
    root = fp8.convert(nn.Linear(16, 16), "unit", include="model")
    assert isinstance(root, fp8.Linear)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"fp8.convert: expected a torch.nn.Module; got NoneType"):
        fp8.convert(None, "tensor")  # type: ignore[arg-type]
    for globs, message in ((5, "a list; got exclude=5"), ([None], r"names of modules or globs; got exclude=\[None\]")):
        with pytest.raises(ArgumentError, match=f"fp8.convert: expected exclude to be {message}"):
            fp8.convert(nn.Linear(16, 16), "tensor", exclude=globs)  # type: ignore[arg-type]


def test_a_second_conversion_is_idempotent_or_refused() -> None:
    model = fp8.convert(unit_model(), "unit")
    state = model[0].fp8_recipe
    assert fp8.convert(model, "unit")[0].fp8_recipe is state
    with pytest.raises(StateError, match="expected a layer that is not in FP8, or was converted alike; got 0 with"):
        fp8.convert(model, "tensor")
    mixed = fp8.convert(model, "tensor", include="3")
    assert mixed[3].fp8_recipe.scaling == "tensor" and mixed[3].fp8_recipe.factors.output == 1 / 32
    assert mixed[0].fp8_recipe is state


def test_what_is_left_and_why() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.ModuleDict(
        {
            "own": Own(16, 16),
            "wide": nn.Linear(16, 16, dtype=torch.float64),
            "kept": nn.Linear(16, 16),
            "bent": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "conv": nn.Conv1d(4, 4, 3),
            "words": nn.Embedding(10, 16),
            "norm": nn.LayerNorm(16),
            "attention": nn.MultiheadAttention(16, 2),
        }
    )
    found = {left.module: left.why for left in fp8.convert(model, "tensor", exclude="kep*").fp8_left}
    assert found.pop("kept") == "excluded"
    assert found.pop("own") == "its class Own may have another forward"
    assert found.pop("wide") == "its weight is torch.float64"
    assert found.pop("bent").startswith("its class ParametrizedLinear")
    assert found.pop("conv") == "its class Conv1d is no linear layer"
    assert found.pop("attention") == "its class MultiheadAttention is no linear layer"
    assert found.pop("attention.out_proj").startswith("its class NonDynamicallyQuantizableLinear")
    assert set(found) <= {"bent.parametrizations.weight.0", "bent.parametrizations.weight"}
    for argument in ("include", "exclude"):
        with pytest.raises(ArgumentError, match=f"expected {argument} to match modules of the model; got 'head'"):
            fp8.convert(model, "tensor", **{argument: "head"})


def test_shared_weights_and_modules_stay_shared() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    model = nn.ModuleList([first, second, first])
    fp8.convert(model, "tensor")
    assert model[0] is model[2] and model[0].weight is model[1].weight and len(list(model.parameters())) == 3
    x = torch.randn(16, 16)
    (model[0](x) + model[1](x)).sum().backward()
    assert model[0].weight.grad is not None
