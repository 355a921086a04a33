"""`fake_quantize`: one format forward, one backward, straight through, in every mode of autograd."""

import pytest
import torch

from plimsoll import cast, fake_quantize
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from tests.support.cases import each

PAIRS = [
    ("e4m3", "e5m2"),
    ("bf16", "bf16"),
    (None, "e5m2"),
    ("e4m3", None),
    ("mxfp8_e4m3", "mxfp8_e5m2"),
    ("nvfp4", "fp16"),
]


def directions(x, upstream, *arguments, **keywords):
    x = x.detach().clone().requires_grad_()
    y = fake_quantize(x, *arguments, **keywords)
    y.backward(upstream)
    return y.detach(), x.grad


@each(("forward", "backward"), PAIRS)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_each_direction_has_its_format(forward, backward, dtype):
    x, upstream = torch.randn(6, 40).to(dtype), torch.randn(6, 40).to(dtype)
    y, gradient = directions(x, upstream, forward, backward)
    assert torch.equal(y, x if forward is None else cast(x, forward))
    assert torch.equal(gradient, upstream if backward is None else cast(upstream, backward))


def test_the_gradient_passes_where_the_value_saturates():
    y, gradient = directions(torch.tensor([1e6, -1e6]), torch.ones(2), "e4m3")
    assert y.tolist() == [448.0, -448.0] and gradient.tolist() == [1.0, 1.0]


@each(("forward", "backward"), PAIRS)
def test_compiled_equals_eager(forward, backward):
    x, upstream = torch.randn(6, 40), torch.randn(6, 40)
    compiled = torch.compile(lambda x: fake_quantize(x, forward, backward), fullgraph=True)
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    y.backward(upstream)
    expected, gradient = directions(x, upstream, forward, backward)
    assert torch.equal(y, expected) and torch.equal(leaf.grad, gradient)


@each(("forward", "backward"), PAIRS)
def test_gradients_of_each_example_under_vmap(forward, backward):
    batch, weight = torch.randn(3, 4, 40), torch.randn(4, 40)

    def loss(x):
        return (fake_quantize(x, forward, backward) * weight).sum()

    found = torch.func.vmap(torch.func.grad(loss))(batch)
    assert torch.equal(found, torch.stack([torch.func.grad(loss)(example) for example in batch]))


def test_differentiable_twice():
    x = torch.randn(8, requires_grad=True)
    (first,) = torch.autograd.grad(fake_quantize(x, "e4m3", "e5m2").pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    quantized = cast(x, "e4m3")
    assert torch.equal(first.detach(), cast(3 * quantized.square(), "e5m2"))
    assert torch.equal(second, cast(6 * quantized, "e5m2"))


def test_directions_draw_different_noise_of_one_key():
    x = torch.full((4096,), 1 + 1 / 16)
    for key in (5, torch.tensor(5)):
        y, gradient = directions(x, x, "e4m3", "e4m3", rounding="stochastic", generator=key)
        assert torch.equal(y, cast(x, "e4m3", rounding="stochastic", generator=5))
        agree = float((y == gradient).double().mean())
        assert 0.45 < agree < 0.55
    generator = torch.Generator().manual_seed(0)
    y, gradient = directions(x, x, "e4m3", "e4m3", rounding="stochastic", generator=generator)
    assert not torch.equal(y, gradient)


def test_block_arguments_reach_blocks_only():
    x = torch.randn(40, 6)
    y, gradient = directions(x, x, "mxfp4", "e5m2", axis=0, scale_rule="ceil")
    assert torch.equal(y, cast(x, "mxfp4", axis=0, scale_rule="ceil")) and torch.equal(gradient, cast(x, "e5m2"))


def test_training_through_it_learns():
    features, target = torch.randn(256, 8), torch.randn(8, 1)
    weight = torch.zeros(8, 1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        error = fake_quantize(features, "e4m3") @ fake_quantize(weight, "e4m3", "e5m2") - features @ target
        error.square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), target, atol=0.1, rtol=0.1)


def test_refusals():
    x = torch.randn(3)
    with pytest.raises(ArgumentError, match="fake_quantize: expected arguments of cast without out"):
        fake_quantize(x, "e4m3", out=x)
    with pytest.raises(ArgumentError, match="fake_quantize: expected arguments of cast without dtype"):
        fake_quantize(x, "e4m3", dtype=torch.float16)
    with pytest.raises(UnsupportedTensorError, match="fake_quantize: expected a tensor of plain floating values"):
        fake_quantize(torch.arange(3), "e4m3")
    with pytest.raises(ArgumentError, match="fake_quantize: expected a generator with rounding='stochastic' only"):
        fake_quantize(x, "e4m3", generator=3)
    with pytest.raises(ArgumentError, match="fake_quantize: expected scale_rule and axis with a block format only"):
        fake_quantize(x, "e4m3", "e5m2", axis=0)
    with pytest.raises(ArgumentError, match="fake_quantize: expected scale to be a number above 0; got scale=-1"):
        fake_quantize(x, backward="e4m3", scale=-1)
    with pytest.raises(TypeError, match="roundin"):
        fake_quantize(x, "e4m3", roundin="up")
