"""TF32: set for the loop's own work and for nothing else; emulated where the hardware has none."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.precision import prepare
from plimsoll.precision.levels import arithmetic
from plimsoll.precision.levels.arithmetic import has_tf32, tf32
from tests.support.precision.training import adamw, batches, loss_of, net, run


def settings() -> list[str]:
    backends: Any = torch.backends
    return [place.fp32_precision for place in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]


def test_the_settings_are_put_back_whatever_they_were() -> None:
    matmul: Any = torch.backends.cuda.matmul
    before = settings()
    for value in ("none", "ieee", "tf32"):
        matmul.fp32_precision = value
        was = settings()
        with tf32():
            assert settings() == ["tf32"] * 3
        assert settings() == was
        with pytest.raises(ZeroDivisionError), tf32():
            _ = 1 / 0
        assert settings() == was
    matmul.fp32_precision = before[0]


def test_it_can_be_nested_and_leaves_the_older_flags_readable() -> None:
    older = torch.get_float32_matmul_precision()
    with tf32(), tf32():
        pass
    assert torch.get_float32_matmul_precision() == older


def test_on_hardware_that_has_it_forward_backward_and_evaluation_are_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "has_tf32", lambda device: True)
    model = net()
    optimizer = adamw(model)
    loop = prepare(model, optimizer, "tf32")
    seen: dict[str, list[str]] = {}
    model.head.register_forward_hook(lambda *_: seen.__setitem__("forward", settings()))
    model.head.register_full_backward_hook(lambda *_: seen.__setitem__("backward", settings()))
    optimizer.register_step_pre_hook(lambda *_: seen.__setitem__("step", settings()))
    before = settings()
    with loop.forward():
        loss = loss_of(model, batches(1)[0])
    assert settings() == before
    loop.step(loss)
    assert settings() == before != ["tf32"] * 3
    assert seen == dict.fromkeys(("forward", "backward", "step"), ["tf32"] * 3)
    seen.clear()
    with loop.evaluate():
        model(batches(1)[0][0])
    assert seen["forward"] == ["tf32"] * 3


def test_elsewhere_the_operands_of_products_are_rounded() -> None:
    assert not has_tf32(torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Linear(64, 3, bias=False)
    twin = copy.deepcopy(model)
    x = torch.randn(5, 64)
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "tf32")
    with loop.forward():
        y = model(x)
        loss = y.sum()
    expected = pl.cast(x, "tf32").double() @ pl.cast(twin.weight.detach(), "tf32").double().T
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)
    assert (y.double() - x.double() @ twin.weight.detach().double().T).abs().max() > 1e-5
    before = model.weight.detach().clone()
    loop.step(loss)
    gradient = (before - model.weight.detach())[0].double()
    torch.testing.assert_close(gradient, pl.cast(x, "tf32").double().sum(0), rtol=0, atol=1e-5)


def test_a_tf32_run_is_near_the_fp32_run_and_not_the_same() -> None:
    losses = []
    for name in ("fp32", "tf32"):
        model = net()
        losses.append(run(prepare(model, adamw(model), name), batches(10)))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2) and losses[0] != losses[1]
