"""In float32, layer scales change no bit of any gradient, whatever they are and however a model is built."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plimsoll.scaling.layerwise.scaler import LayerScaler
from tests.support.cases import each
from tests.support.scaling.layer_models import MODELS, D, made

BATCH = 6


def loss_of(output: Any) -> Tensor:
    tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    return sum((torch.sin(t * (i + 1)).mean() for i, t in enumerate(tensors)), torch.zeros(()))


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {name: p.grad for name, p in model.named_parameters()}
    return {**found, "(input)": x.grad}


def inputs() -> Tensor:
    return torch.randn(BATCH, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


def with_exponents(scaler: LayerScaler, seed: int) -> None:
    """Exponents far apart, all different, in no order."""
    chosen = random.Random(seed)
    scaler._layers.exponents = [chosen.randrange(-14, 25) for _ in scaler._layers.names]


def assert_equal(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None and torch.equal(got[name], gradient), name


def scaled_gradients(name: str, seed: int, measuring: bool) -> dict[str, Tensor | None]:
    model, x = made(name), inputs()
    optimizer = torch.optim.SGD([*model.parameters(), x], lr=0.0)
    scaler = LayerScaler(model)
    with_exponents(scaler, seed)
    scaler._layers.meter.measuring = measuring
    scaler.scale(loss_of(model(x))).backward()
    scaler.unscale_(optimizer)
    return gradients(model, x)


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # torch's, of nested checkpoints
@each("measuring", [False, True], ids=["", "measured"])
@each("name", MODELS)
def test_gradients_are_the_same_to_the_bit(name: str, measuring: bool) -> None:
    model, x = made(name), inputs()
    loss_of(model(x)).backward()
    expected = gradients(model, x)
    assert any(g is not None and g.abs().max() > 0 for g in expected.values())
    for seed in range(3):
        assert_equal(scaled_gradients(name, seed, measuring), expected)
