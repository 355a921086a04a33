"""Scales are powers of two, the largest that fit; delayed ones follow the last steps."""

import math

import pytest
import torch

from plimsoll import fp8
from plimsoll.formats import E4M3, E5M2, Format
from plimsoll.fp8.casting import absmax_of, scale_for


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_the_largest_power_of_two_that_fits(fmt: Format) -> None:
    edges = [math.ldexp(m, e) for e in range(-120, 120, 7) for m in (1.0, 1.75, 1.7500001, 1.9999999)]
    found = torch.tensor(edges, dtype=torch.float32)
    for margin in (0, 3):
        scales = scale_for(found, fmt, margin)
        assert all(math.frexp(s)[0] == 0.5 for s in scales.tolist())
        top = found.double() * scales.double() * 2.0**margin
        inside = (scales > 2.0**-126) & (scales < 2.0**126)
        assert (top[inside] <= fmt.max).all() and (2 * top[inside] > fmt.max).all()
        assert torch.equal(1 / (1 / scales), scales), "inverses are exact"
        assert inside.sum() > 100


def test_where_a_magnitude_says_nothing_the_scale_is_one() -> None:
    found = torch.tensor([0.0, -0.0, math.nan, math.inf, math.copysign(math.nan, -1)])
    assert scale_for(found, E4M3, 2).tolist() == [1.0] * 5
    assert scale_for(absmax_of(torch.zeros(3)), E4M3, 2) == 1.0
    assert float(scale_for(torch.tensor(1e-45), E4M3, 0)) == 2.0**126
    assert float(absmax_of(torch.empty(0, 3))) == 0.0
    assert float(absmax_of(torch.tensor([[-3.0, 2.0]], dtype=torch.bfloat16))) == 3.0
    assert math.isnan(float(absmax_of(torch.tensor([1.0, math.nan]))))


def steps(layer: fp8.Linear, sizes: list[float]) -> list[dict[str, float]]:
    """The scales that each of these steps used."""
    base = torch.ones(16, 32)
    found = []
    for size in sizes:
        layer(base * size).backward(torch.ones(16, 16) / size)
        found.append({role: float(scale) for role, (_, scale) in layer.casts().items()})
    return found


def test_delayed_scales_are_those_of_the_last_steps() -> None:
    layer = fp8.Linear(32, 16, scaling="tensor", history=2)
    found = steps(layer, [1.0, 4.0, 2.0, 0.5, 0.25, 1.0])
    # The first step finds its own magnitude; each later one has the largest of the two before it.
    assert [s["activations"] for s in found] == [256 / m for m in (1.0, 1.0, 4.0, 4.0, 2.0, 0.5)]
    assert [s["gradients"] for s in found] == [32768 / m for m in (1.0, 1.0, 1.0, 0.5, 2.0, 4.0)]


def test_evaluation_leaves_the_history_alone() -> None:
    layer = fp8.Linear(32, 16, scaling="tensor", history=2)
    with torch.no_grad():
        layer(torch.ones(16, 32) * 8)
    assert float(layer.casts()["activations"][1]) == 32, "no history yet: its own magnitude"
    steps(layer, [1.0, 2.0])
    before = [buffer.clone() for name, buffer in layer.state_dict().items() if "fp8" in name]
    with torch.no_grad():
        layer(torch.ones(16, 32) * 100)
    after = [buffer for name, buffer in layer.state_dict().items() if "fp8" in name]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and len(before) == 6


def test_forwards_without_a_backward_are_one_step() -> None:
    layer = fp8.Linear(32, 16, scaling="tensor", history=4)
    steps(layer, [1.0])
    x = torch.ones(16, 32)
    outputs = [layer(x * 2), layer(x * 8), layer(x * 4)]
    sum(y.sum() for y in outputs).backward()
    steps(layer, [1.0])
    assert layer.get_buffer("fp8_history")[0].tolist() == [8.0, 1.0, 0.0, 0.0]


def test_resumed_training_is_training_not_interrupted() -> None:
    sizes = [1.0, 300.0, 2.0, 0.01, 5.0, 5.0]
    torch.manual_seed(0)
    whole = fp8.Linear(32, 16, scaling="tensor", history=3)
    begun = fp8.Linear(32, 16, scaling="tensor", history=3)
    begun.load_state_dict(whole.state_dict())
    expected = steps(whole, sizes)
    found = steps(begun, sizes[:3])
    resumed = fp8.Linear(32, 16, scaling="tensor", history=3)
    resumed.load_state_dict(begun.state_dict())
    assert found + steps(resumed, sizes[3:]) == expected
    fp8.agree(resumed)  # without ranks nothing happens
