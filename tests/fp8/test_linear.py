"""`fp8.Linear` against the same layer without FP8: they differ by rounding alone; and in all that it must withstand."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plimsoll import fp8, kernels, row_layout
from plimsoll.errors import ArgumentError, StateError, UnsupportedTensorError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.functional import Factors
from tests.support.cases import each

KINDS: list[dict[str, Any]] = [
    {"scaling": "unit"},
    {"scaling": "tensor"},
    {"scaling": "tensor", "margin": 2},
    {"scaling": "tensor", "history": 2},
]
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def distance(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found - expected).detach().double().norm() / expected.detach().double().norm())


def drawn(**kind: Any) -> fp8.Linear:
    torch.manual_seed(0)
    return fp8.Linear(64, 48, **kind)


def by_hand(layer: fp8.Linear, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """What the layer must give at unit scaling, bit for bit: torch's casts, float32 products, one rounding."""
    factors, rows = layer.fp8_recipe.factors, x.shape[0]
    xs, ws, gs = x.to(E4).float(), layer.weight.detach().to(E4).float(), gradient.to(E5).float()
    y = xs @ ws.t() * factors.output + (layer.bias.detach() * factors.output).to(x.dtype)
    return {
        "output": y.to(x.dtype),
        "input": (gs @ ws * factors.inputs[0]).to(x.dtype),
        "weight": gs.t() @ xs * rows**-0.5,
        "bias": gradient.sum(0, dtype=torch.float32) * rows**-0.5,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unit_scaling_bit_for_bit(dtype: torch.dtype) -> None:
    layer = drawn()
    nn.init.normal_(layer.bias)
    x = torch.randn(32, 64).to(dtype).requires_grad_()
    gradient = torch.randn(32, 48).to(dtype)
    y = layer(x)
    y.backward(gradient)
    expected = by_hand(layer, x.detach(), gradient)
    found = {"output": y, "input": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


OWN = Factors(output=0.0625, inputs=(0.25,), moment=1.75)  # as behind a ReLU, whose mean is not 0


@each("factors", [None, OWN, Factors(output=0.5, inputs=(2.0,), weight=0.125)])
def test_unit_scaling_is_that_of_the_unit_functions(factors: Factors | None) -> None:
    torch.manual_seed(0)
    layer = fp8.Linear(64, 48, factors=factors)
    x = torch.randn(48, 64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    y, expected = layer(x), U.linear(other, weight, bias, factors=factors)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    expected.backward(gradient)
    assert distance(y, expected) < 0.05
    assert distance(x.grad, other.grad) < 0.08
    assert distance(layer.weight.grad, weight.grad) < 0.08
    torch.testing.assert_close(layer.bias.grad, bias.grad)
    assert 0.8 < float(layer.weight.detach().std()) < 1.2 and not layer.bias.any()


@each("kind", KINDS[1:], ids=str)
@each("size", [1e-6, 1.0, 1e4])
def test_scales_from_the_data_serve_tensors_of_any_scale(kind: dict[str, Any], size: float) -> None:
    layer = drawn(**kind)
    x = (torch.randn(40, 64) * size).requires_grad_()
    gradient = torch.randn(40, 48) / size
    y = layer(x)
    y.backward(gradient)
    assert distance(y, nn.functional.linear(x, layer.weight, layer.bias)) < 0.06
    assert distance(x.grad, gradient @ layer.weight) < 0.08
    assert distance(layer.weight.grad, gradient.t() @ x) < 0.08
    for role, tensor in {"activations": x, "weights": layer.weight, "gradients": gradient}.items():
        name, scale = layer.casts()[role]
        assert isinstance(scale, Tensor) and scale.dim() == 0
        top = float(tensor.detach().abs().max() * scale) * 2.0 ** kind.get("margin", 0)
        limit = 448.0 if name == "e4m3" else 57344.0
        assert limit / 2 < top <= limit, "the largest power of two that fits"


def test_casts_of_constant_scales_are_numbers() -> None:
    assert drawn().casts() == {"activations": ("e4m3", 1.0), "weights": ("e4m3", 1.0), "gradients": ("e5m2", 1.0)}


@each("kind", KINDS, ids=str)
@each("shape", [(1, 50), (7, 50), (2, 3, 50), (50,), (0, 50), (3, 0, 50)], ids=str)
def test_any_shape(kind: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = fp8.Linear(50, 21, **kind)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == (*shape[:-1], 21) and y.is_contiguous()
    assert x.grad is not None and x.grad.shape == x.shape
    assert layer.weight.grad is not None and layer.weight.grad.shape == (21, 50)
    if x.numel() == 0:
        assert not layer.weight.grad.any()
    else:
        plain = U.linear(x, layer.weight, layer.bias, factors=layer.fp8_recipe.factors)
        assert distance(y, plain) < 0.1
    assert "padded to 64 by 32" in repr(layer)


@each("kind", KINDS, ids=str)
@each("sizes", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_inputs_or_no_outputs(kind: dict[str, Any], sizes: tuple[int, int]) -> None:
    layer = fp8.Linear(*sizes, **kind)
    with torch.no_grad():
        layer.bias.fill_(0.5)
    for shape in ((3, sizes[0]), (2, 3, sizes[0]), (0, sizes[0]), (sizes[0],)):
        x = torch.ones(shape, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == (*shape[:-1], sizes[1]) and x.grad is not None and x.grad.shape == x.shape
        assert sizes[0] or torch.equal(y, torch.full_like(y, 0.5 * layer.fp8_recipe.factors.output))
        assert torch.equal(layer(x.detach()), y)


@each("kind", KINDS, ids=str)
def test_layouts_in_memory_do_not_matter(kind: dict[str, Any]) -> None:
    x, gradient = torch.randn(64, 32), torch.randn(48, 32)
    results = []
    for turned in (False, True):
        layer = drawn(**kind)
        given = x.t().contiguous() if not turned else x.t()
        given = given.detach().requires_grad_()
        y = layer(given)
        y.backward(gradient.t() if turned else gradient.t().contiguous())
        results.append((y, given.grad, layer.weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    drawn(**kind)(x.t()[:1].expand(8, 64)).sum().backward()  # an expanded gradient


def test_frozen_parts_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, str]] = []
    original = kernels.fp8_cast

    def spy(x: Tensor, dtype: torch.dtype, scale: Any, layout_: Any, *rest: Any) -> Any:
        asked.append((dtype, layout_))
        return original(x, dtype, scale, layout_, *rest)

    monkeypatch.setattr(kernels, "fp8_cast", spy)
    layer = drawn()
    with torch.no_grad():
        assert not layer(torch.randn(16, 64)).requires_grad
    assert asked == [(E4, "rows"), (E4, "rows")]
    asked.clear()
    layer(torch.randn(16, 64)).sum().backward()
    assert asked == [(E4, "rows"), (E4, "both"), (E5, "columns")], "the input needs no gradient"
    asked.clear()
    layer.requires_grad_(False)
    x = torch.randn(16, 64, requires_grad=True)
    layer(x).sum().backward()
    assert asked == [(E4, "both"), (E4, "rows"), (E5, "rows")] and x.grad is not None
    assert asked.clear() is None
    layer.bias.requires_grad_(True)
    layer(torch.randn(16, 64)).sum().backward()
    assert asked == [(E4, "rows"), (E4, "rows")] and layer.bias.grad is not None


@each("kind", KINDS, ids=str)
def test_nan_is_seen_and_inf_saturates(kind: dict[str, Any]) -> None:
    layer = drawn(**kind)
    x = torch.randn(16, 64)
    x[3, 5] = torch.nan
    x[7, 7] = torch.inf
    bank, other = kernels.new_bank(2), kernels.new_bank(1)
    layer.count_into(bank, other, {"activations": 1, "gradients": 0})
    y = layer(x.requires_grad_())
    assert y[3].isnan().all() and y[:3].isfinite().all() and y[7].isfinite().all()
    y.nansum().backward()
    assert layer.weight.grad is not None and layer.weight.grad[:, 5].isnan().all()
    assert int(bank[1, row_layout.NANS]) == 1 and int(bank[1, row_layout.POS_INFS]) == 1
    assert layer(torch.randn(16, 64)).isfinite().all(), "one bad batch leaves no trace in later ones"


def test_autocast_and_mixed_dtypes() -> None:
    layer = drawn().bfloat16()
    x = torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16
    inside = drawn()
    with torch.autocast("cpu", torch.bfloat16):
        found = inside(x)
    exact = drawn()(x)
    assert torch.equal(found, exact.bfloat16()), "sums stay float32 under autocast"


def test_counts_are_those_of_the_tensors_that_are_cast() -> None:
    layer = drawn(scaling="tensor")
    forward, backward = kernels.new_bank(3), kernels.new_bank(1)
    layer.count_into(forward, backward, {"activations": 0, "weights": 2, "gradients": 0})
    x, gradient = torch.randn(16, 64), torch.randn(16, 48)
    for _ in range(2):  # a row holds the last call only
        layer(x.requires_grad_()).backward(gradient)
    expected = kernels.new_bank(3)
    kernels.measure_into([x.detach(), layer.weight.detach(), gradient], expected, [0, 2, 1])
    assert torch.equal(
        forward[:, row_layout.HISTOGRAM :], expected[[0, 0, 2], row_layout.HISTOGRAM :] * (forward[:, :1] > 0)
    )
    assert torch.equal(backward[0, row_layout.HISTOGRAM :], expected[1, row_layout.HISTOGRAM :])
    assert not forward[1].any()
    twin = copy.deepcopy(layer)
    twin(x * 1000)
    assert int(forward[0, row_layout.COUNT]) == x.numel() and twin.fp8_counting is None
    layer.count_into(None, None, {})
    forward.zero_()
    layer(x)
    assert not forward.any()


def test_what_count_into_refuses() -> None:
    layer, bank = drawn(), kernels.new_bank(2)
    with pytest.raises(ArgumentError, match="expected rows of activations, weights, gradients; got 'bias'"):
        layer.count_into(bank, None, {"bias": 0})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="expected two banks; got one for both directions"):
        layer.count_into(bank, bank, {"weights": 0})
    with pytest.raises(ArgumentError, match="expected a bank on cpu with a row 2 for weights; got one of shape"):
        layer.count_into(bank, None, {"weights": 2})
    with pytest.raises(ArgumentError, match="expected a bank on cpu with a row 0 for gradients; got None"):
        layer.count_into(bank, None, {"gradients": 0})


@each("kind", KINDS, ids=str)
def test_checkpointing_changes_no_bit(kind: dict[str, Any]) -> None:
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(fp8.Linear(64, 48, **kind), nn.Tanh(), fp8.Linear(48, 32, **kind))
        for step in range(4):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) * 2.0**step
            y = checkpoint(model, x, use_reentrant=False) if wrapped else model(x)
            y.square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        results.append([y, *gradients, *model.buffers()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@each("kind", KINDS, ids=str)
def test_a_layer_used_twice_before_the_backward(kind: dict[str, Any]) -> None:
    layer, x = drawn(**kind), torch.randn(16, 64)
    (layer(2 * x) + layer(x)).square().mean().backward()
    plain = nn.Linear(64, 48)
    plain.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    factors = layer.fp8_recipe.factors
    both = [U.linear(t, plain.weight, plain.bias, factors=factors) for t in (x, 2 * x)]
    (both[0] + both[1]).square().mean().backward()
    assert distance(layer.weight.grad, plain.weight.grad) < 0.1


@each("kind", KINDS, ids=str)
def test_copies_and_states(kind: dict[str, Any]) -> None:
    layer, x = drawn(**kind), torch.randn(16, 64)
    for step in range(3):
        layer(x * 2.0**step).square().mean().backward()
    assert layer.state_dict().keys() >= {"weight", "bias"}
    assert any("fp8" in name for name in layer.state_dict()) == bool(kind.get("history"))
    fresh = fp8.Linear(64, 48, **kind)
    fresh.load_state_dict(layer.state_dict())
    found = []
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        for size in (100.0, 0.1):
            other.zero_grad()
            y = other(x * size)
            y.square().mean().backward()
        found.append([y, other.weight.grad, *other.buffers()])
        assert repr(other) == repr(layer)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_weights_cached_between_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        one, other = drawn(**kind), drawn(**kind)
        batches = torch.randn(3, 16, 64)
        for x in batches:
            one(x.requires_grad_()).square().mean().backward()
        with fp8.cached_weights(nn.Sequential(other)):
            for x in batches:
                other(x).square().mean().backward()
                held = other.fp8_cached
                assert held is not None and other(x) is not None and other.fp8_cached is held
            assert pickle.loads(pickle.dumps(other)).fp8_cached is None
        assert other.fp8_cached is None and not other.fp8_caching
        if not kind.get("history"):  # the calls above are steps of their own
            assert torch.equal(one.weight.grad, other.weight.grad)


def test_a_cached_weight_must_not_change() -> None:
    layer, x = drawn(), torch.randn(16, 64)
    with fp8.cached_weights(layer):
        layer(x)
        with pytest.raises(StateError, match="expected no block around this one"), fp8.cached_weights(layer):
            pass
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(StateError, match="got one that was changed in place since it was cast. End the block"):
            layer(x)
    assert torch.equal(layer(x), layer(x))


def test_a_first_micro_batch_without_gradient_of_the_input_is_cast_again_with_it() -> None:
    layer = drawn()
    with fp8.cached_weights(layer):
        layer(torch.randn(16, 64))
        x = torch.randn(16, 64, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None and x.grad.any()


def test_on_the_meta_device_and_made_real() -> None:
    for kind in KINDS:
        with torch.device("meta"):
            layer = fp8.Linear(64, 48, **kind)
            assert layer(torch.empty(5, 64)).shape == (5, 48)
        layer = layer.to_empty(device="cpu")
        layer.reset_parameters()
        x = torch.randn(16, 64, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(16, 64, requires_grad=True)
    (first,) = torch.autograd.grad(drawn()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_what_it_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"expected an input of \(\.\.\., 64\); got shape \(4, 63\). Check"):
        drawn()(torch.randn(4, 63))
    with pytest.raises(
        UnsupportedTensorError, match="expected float32, bfloat16 or float16; got input of torch.float64"
    ):
        drawn()(torch.randn(4, 64).double())
    with pytest.raises(UnsupportedTensorError, match="got weight of torch.float64"):
        drawn().double()(torch.randn(4, 64))
    for wrong, said in (
        ({"scaling": "mx"}, "expected scaling to be 'unit' or 'tensor'; got scaling='mx'"),
        ({"history": 3}, "expected history and margin with scaling='tensor' only; got history=3"),
        ({"scaling": "tensor", "history": -1}, "expected history to be an integer of at least 0; got history=-1"),
        ({"scaling": "tensor", "margin": 1.5}, "expected margin to be an integer from 0 to 32; got margin=1.5"),
        ({"scaling": "tensor", "margin": 33}, "expected margin to be an integer from 0 to 32; got margin=33"),
        ({"constraint": "mean"}, "expected constraint to be None, 'gmean'"),
        ({"factors": 3.0}, "expected factors to be Factors with 1 input"),
        ({"in_features": -1}, "fp8.Linear: expected in_features to be an integer of at least 0; got in_features=-1"),
        ({"out_features": 2.5}, "expected out_features to be an integer of at least 0; got out_features=2.5"),
    ):
        with pytest.raises(ArgumentError, match=said):
            fp8.Linear(**{"in_features": 64, "out_features": 48, **wrong})
    x, layer = torch.randn(4, 64), drawn()
    for transform in (torch.func.vmap, torch.func.jacrev, lambda f: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(UnsupportedTensorError, match=r"fp8.Linear: .* outside of torch.func transforms"):
            transform(layer)(x)
