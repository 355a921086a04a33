"""A scale per parameter: what its products hold, who sits out, and that nothing else is changed."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from plimsoll.emulate import emulate
from plimsoll.errors import ArgumentError
from plimsoll_lab.experiments.clip.training import Each, ParameterScaler, Scales
from tests.support.cases import each


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))


@contextmanager
def scaled(model: nn.Module, each: Each = "tensor", scale: float = 2.0**10) -> Generator[ParameterScaler]:
    scaler = ParameterScaler(model, each=each, init_scale=scale)
    try:
        yield scaler
    finally:
        scaler.close()


def gradients(model: nn.Module, x: Tensor, scale: float, *, fp16: bool = True) -> list[Tensor]:
    model.zero_grad()
    if fp16:
        with emulate("fp16"):
            loss = model(x).float().square().mean()
    else:
        loss = model(x).square().mean()
    (loss * scale).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@each("fp16", [True, False])
@each("each", ["tensor", "element"])
def test_where_fp16_holds_all_the_gradients_are_those_without_it(each: Each, fp16: bool) -> None:
    model, x = model_of(), torch.randn(5, 3, 8, requires_grad=True)
    plain = gradients(model, x, 2.0**10, fp16=fp16)
    assert x.grad is not None
    of_input, x.grad = x.grad.clone(), None
    with scaled(model, each) as scaler:
        own = gradients(model, x, 2.0**10, fp16=fp16)
        assert len(scaler.scales) == 2
        assert all(not scales.clean.any() for scales in scaler.scales) is not fp16  # it follows FP16 products only
    assert x.grad is not None
    for a, b in zip([of_input, *plain], [x.grad, *own], strict=True):
        torch.testing.assert_close(b, a, rtol=2e-3 if fp16 else 1e-6, atol=1e-4 if fp16 else 1e-6)
    assert [g.dtype for g in own] == [torch.float32] * 4


def product(exponent: int) -> tuple[Tensor, Tensor]:
    """A gradient and an input, whose product is this power of two."""
    return torch.tensor([[2.0 ** (exponent // 2)]]).half(), torch.tensor([[2.0 ** (exponent - exponent // 2)]]).half()


def test_what_the_loss_scale_leaves_too_small_a_scale_of_its_own_saves() -> None:
    g, x = product(-30)
    scales = Scales(torch.zeros(1, 1), "tensor")
    found = [scales.gradient(g, x).item() for _ in range(80)]
    assert found[0] == 0.0 and found[-1] == 2.0**-30
    assert scales.exponent.item() == 8  # one binade each 10 steps


def test_a_product_that_overflows_lowers_its_scale_by_one_binade() -> None:
    scales = Scales(torch.zeros(1, 1), "tensor")
    g, x = product(18)
    found = [scales.gradient(g, x).item() for _ in range(4)]
    assert found == [float("inf")] * 3 + [2.0**18]
    assert scales.exponent.item() == -3


def test_a_gradient_that_broke_further_up_lowers_nothing() -> None:
    scales = Scales(torch.zeros(1, 2), "tensor")
    found = scales.gradient(torch.tensor([[torch.inf]]).half(), torch.tensor([[0.0, 1.0]]).half())
    assert not found.isfinite().any() and scales.exponent.item() == 0


def test_elements_that_span_more_than_fp16_need_a_scale_each() -> None:
    g = torch.tensor([[2.0**10], [2.0**-20]]).half()
    x = torch.tensor([[2.0**10, 0.0], [0.0, 2.0**-20]]).half()
    whole, apart = Scales(torch.zeros(1, 2), "tensor"), Scales(torch.zeros(1, 2), "element")
    for _ in range(200):
        last, each = whole.gradient(g, x), apart.gradient(g, x)
    assert last.tolist() == [[2.0**20, 0.0]] and each.tolist() == [[2.0**20, 2.0**-40]]
    assert whole.nbytes == 2 and apart.nbytes == 4


def test_an_element_that_overflows_sits_out_and_the_others_do_not() -> None:
    scales = Scales(torch.zeros(1, 2), "element")
    g, x = torch.tensor([[2.0**10]]).half(), torch.tensor([[2.0**8, 1.0]]).half()
    assert scales.gradient(g, x).tolist() == [[0.0, 2.0**10]]
    assert scales.exponent.tolist() == [[-1, 0]]


def test_a_parameter_that_broke_sits_out_and_the_others_step() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with scaled(model) as scaler:
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        first = model[0].weight
        assert first.grad is not None
        first.grad[0, 0] = torch.inf
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert moved == [False, True, True, True]
        assert scaler.sat_out == 1 and scaler.outcome.stepped and scaler.get_scale() == 2.0**10


def test_where_nothing_is_finite_the_batch_is_skipped_and_the_loss_scale_halved_until_later() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with scaled(model) as scaler:
        for step in range(12):
            loss = model(torch.randn(4, 8)).square().mean()
            scaler.scale(loss * torch.nan if step == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.outcome.stepped is (step > 0)
            assert scaler.get_scale() == (2.0**9 if step < 10 else 2.0**10)
            optimizer.zero_grad()
        assert scaler.sat_out == 0


def test_the_state_counts_the_weights_of_linear_layers_and_no_others() -> None:
    model = model_of()
    with scaled(model, "element") as scaler:
        gradients(model, torch.randn(4, 8), 1.0)
        assert scaler.state_bytes == 2 * (8 * 16 + 16 * 4)
    handles = model._forward_pre_hooks, model._forward_hooks
    assert not any(handles)


def test_a_layer_with_a_bias_is_left_at_the_loss_scale() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with scaled(model) as scaler:
        gradients(model, torch.randn(2, 4), 1.0)
        assert scaler.scales == []


def test_another_granularity_is_refused() -> None:
    with pytest.raises(ArgumentError, match="ParameterScaler: expected each to be 'tensor' or 'element'; got 'row'"):
        ParameterScaler(model_of(), each="row")  # type: ignore[arg-type]
