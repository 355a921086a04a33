from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.precision import MasterWeights
from plimsoll.precision.weights.master_weights import (
    masters_to_model_parameters,
    model_and_master_parameters,
    model_gradients_to_masters,
)
from tests.support.cases import each

both = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4)).to(dtype)
    model[3].float()  # norms stay in float32
    model[2].bias.requires_grad_(False)
    return model


def loss_of(model: nn.Sequential, step: int) -> Tensor:
    dtype = model[0].weight.dtype
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
    return model[3](model[:3](x).float()).pow(2).mean(dim=1).mul(torch.linspace(0, 1, 16)).mean()


def train_with_masters(dtype: torch.dtype, scale: float, compact: bool) -> nn.Module:
    model = network(dtype)
    masters = MasterWeights(torch.optim.AdamW(model.parameters(), lr=0.01), compact=compact)
    for step in range(6):
        masters.zero_grad()
        (loss_of(model, step) * scale).backward()
        masters.collect_gradients()
        for group in masters.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 / scale)
        masters.clip_gradients(0.1)
        masters.step()
    return model


@both
@pytest.mark.parametrize("compact", [False, True])
def test_the_numbers_are_those_of_master_weights(dtype: torch.dtype, compact: bool) -> None:
    if compact and dtype is torch.float16:
        compact = False
    expected, net = train_with_masters(dtype, 256.0, compact), network(dtype)
    model, masters = model_and_master_parameters(net.parameters())
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    for step in range(6):
        (loss_of(net, step) * 256.0).backward()
        model_gradients_to_masters(model, masters, 256.0)
        norm = torch.nn.utils.clip_grad_norm_(masters, 0.1)
        assert norm > 0.1
        optimizer.step()
        masters_to_model_parameters(masters, model)
        net.zero_grad()
    for a, b in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(net[0].weight, network(dtype)[0].weight)


def test_parameters_that_need_no_master_are_their_own() -> None:
    net = network(torch.bfloat16)
    model, masters = model_and_master_parameters(net.parameters())
    assert len(model) == 5  # one is frozen
    assert [p is q for p, q in zip(model, masters, strict=True)] == [False] * 3 + [True] * 2
    assert all(q.requires_grad and q.is_leaf and q.dtype == torch.float32 for q in masters)
    assert all(torch.equal(p, q.to(p.dtype)) for p, q in zip(model, masters, strict=True))


@pytest.mark.parametrize("scale", [8.0, torch.tensor(8.0)])
def test_gradients_are_unscaled_in_float32(scale: float | Tensor) -> None:
    model, masters = model_and_master_parameters([nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2)])
    model[0].grad = torch.tensor([2.0**-24, 3.0]).half()  # the first is subnormal, an eighth of it is zero in float16
    masters[1].grad = torch.ones(2)  # of a step before
    model_gradients_to_masters(model, masters, scale)
    assert masters[0].grad.tolist() == [2.0**-27, 0.375]
    assert masters[1].grad is None
    assert model[0].grad.tolist() == [2.0**-24, 3.0]


def test_a_gradient_that_is_shared_is_divided_once() -> None:
    p = nn.Parameter(torch.ones(2))
    model, masters = model_and_master_parameters([p])
    p.grad = torch.full((2,), 8.0)
    model_gradients_to_masters(model, masters, 8.0)
    assert p.grad.tolist() == [1.0, 1.0]


@each("scale", [0.0, -1.0, float("inf"), float("nan"), torch.tensor(0.0), torch.ones(2), "8"])
def test_a_bad_scale_is_refused(scale: Any) -> None:
    model, masters = model_and_master_parameters([nn.Parameter(torch.ones(2).half())])
    with pytest.raises(ArgumentError, match="model_gradients_to_masters: expected scale to be finite and above zero"):
        model_gradients_to_masters(model, masters, scale)


def test_lists_that_do_not_match_are_refused() -> None:
    model, masters = model_and_master_parameters(network(torch.float16).parameters())
    with pytest.raises(ArgumentError, match="masters_to_model_parameters: expected the two lists of model_and_master"):
        masters_to_model_parameters(masters[:-1], model)
    with pytest.raises(ArgumentError, match="masters_to_model_parameters: expected the two lists"):
        masters_to_model_parameters(model, masters)
    with pytest.raises(ArgumentError, match="model_gradients_to_masters: expected the two lists"):
        model_gradients_to_masters(masters, model)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ArgumentError, match="of which one needs a gradient; got none"):
        model_and_master_parameters(iter(()))
