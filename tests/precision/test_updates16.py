"""bfloat16 weights without masters: stochastic rounding, and Kahan's compensation."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.errors import ArgumentError
from plimsoll.precision import KahanWeights, StochasticWeights
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.precision.weights.bfloat16 import mixed
from tests.support.cases import each

KINDS: dict[str, Callable[..., SixteenBitOptimizer]] = {"stochastic": StochasticWeights, "Kahan": KahanWeights}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def filled(value: float, count: int = 1000) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), value, dtype=torch.bfloat16))


def step(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradient: float, steps: int) -> None:
    for _ in range(steps):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()


# -- both --------------------------------------------------------------------------------------------------------------


@kinds
def test_updates_too_small_for_bfloat16_add_up(kind: Callable[..., SixteenBitOptimizer]) -> None:
    weight, lost = filled(1.0), filled(1.0)
    step(kind(torch.optim.SGD([weight], lr=2.0**-13)), weight, 1.0, 64)
    step(torch.optim.SGD([lost], lr=2.0**-13), lost, 1.0, 64)
    assert (lost == 1).all()
    # Of 64 steps of 2^-13 = 1/32 of the spacing below 1: a mean of 2 spacings, a variance of at most 64/4 each.
    bound = 6 * math.sqrt(64 / 4 / 1000) * 2.0**-8 if kind is StochasticWeights else 0
    assert abs(weight.double().mean() - (1 - 2.0**-7)) <= bound


@kinds
def test_the_state_is_float32_and_other_parameters_are_as_ever(kind: Callable[..., SixteenBitOptimizer]) -> None:
    weight, norm, reference = filled(1.0, 8), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = kind(torch.optim.AdamW([weight, norm], lr=1e-3))
    plain = torch.optim.AdamW([reference], lr=1e-3)
    for _ in range(3):
        for p in (weight, norm, reference):
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        plain.step()
    assert torch.equal(norm, reference)
    assert {x.dtype for state in optimizer.state.values() for x in state.values()} == {torch.float32}


@kinds
@each("value", [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, 3e38])
def test_every_value_is_stepped(kind: Callable[..., SixteenBitOptimizer], value: float) -> None:
    weight = nn.Parameter(torch.tensor([value, 1.0], dtype=torch.bfloat16))
    expected = weight.detach().float() - 0.25
    optimizer = kind(torch.optim.SGD([weight], lr=0.25))
    step(optimizer, weight, 1.0, 1)
    assert torch.equal(weight[1:].float(), expected[1:])
    if kind is KahanWeights or not math.isfinite(value):
        assert weight[0] == expected[0].bfloat16() or (math.isnan(value) and weight[0].isnan())
    else:
        assert abs(weight[0].float() - expected[0]) <= abs(expected[0]) * 2.0**-7
    step(optimizer, weight, 0.0, 1)
    assert optimizer.master_of(weight)[1] == 0.75
    assert not math.isinf(value) or weight[0] == value  # an infinity is none the worse for what is kept beside it


# -- stochastic rounding -----------------------------------------------------------------------------------------------


def test_a_step_is_float32s_rounded_with_the_noise_of_its_key() -> None:
    torch.manual_seed(3)
    weights = [nn.Parameter(torch.randn(100).bfloat16()) for _ in range(2)]
    references = [nn.Parameter(p.detach().float()) for p in weights]
    optimizer = StochasticWeights(torch.optim.AdamW(weights, lr=0.01), seed=11, chunk_bytes=1)
    plain = torch.optim.AdamW(references, lr=0.01)
    for number in range(3):
        for p, q in zip(weights, references, strict=True):
            p.grad = torch.randn(100).bfloat16()
            q.grad = p.grad.float()
        optimizer.step()
        plain.step()
        with torch.no_grad():
            for index, (p, q) in enumerate(zip(weights, references, strict=True)):
                key = mixed(mixed(mixed(11) + number) + index)
                q.copy_(pl.cast(q, "bf16", rounding="stochastic", generator=key))
                assert torch.equal(p.float(), q)


def test_seeds_steps_and_parameters_have_noise_of_their_own() -> None:
    def noise(seed: int) -> list[Tensor]:
        weights = [filled(1.0), filled(1.0)]
        optimizer = StochasticWeights(torch.optim.SGD(weights, lr=2.0**-9), seed=seed)
        found = []
        for _ in range(2):
            for p in weights:
                p.data.fill_(1.0)
                p.grad = torch.ones_like(p)
            optimizer.step()
            found += [p.detach().clone() for p in weights]
        return found

    once, again, other = noise(0), noise(0), noise(1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    patterns = {tuple(x.tolist()) for x in (*once, *other)}
    assert len(patterns) == 8
    for x in (*once, *other):  # half of the values go down: 1000 coins
        assert abs((x < 1).float().mean() - 0.5) < 5 * 0.5 / math.sqrt(1000)


@each("seed", [1.5, "1", None])
def test_a_seed_is_an_integer(seed: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="StochasticWeights: expected seed to be an integer; got seed="):
        StochasticWeights(torch.optim.SGD([weight]), seed=seed)


def test_it_keeps_nothing_beside_the_weights() -> None:
    assert StochasticWeights(torch.optim.SGD([filled(1.0)], lr=0.1)).nbytes == 0


def test_mixing_keys_spreads_them() -> None:
    # The first words of SplitMix64 from seed 0: the published generator's, of which this is one step.
    assert mixed(0) == 0xE220A8397B1DCDAF
    assert mixed(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert len({mixed(n) >> 40 for n in range(1000)}) > 990


# -- Kahan's compensation ----------------------------------------------------------------------------------------------


def test_weight_decay_is_inside_the_compensation() -> None:
    # Each step decays by 1e-4 of the weight, a fortieth of bfloat16's spacing below 1.
    weight, lost = filled(1.0, 4), filled(1.0, 4)
    optimizer = KahanWeights(torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1))
    step(optimizer, weight, 0.0, 500)
    step(torch.optim.AdamW([lost], lr=1e-3, weight_decay=0.1), lost, 0.0, 500)
    assert (lost == 1).all()
    expected = (1 - 1e-4) ** 500
    assert (optimizer.master_of(weight) - expected).abs().max() < 500 * 2.0**-17
    assert (weight.float() - expected).abs().max() <= 2.0**-9 + 500 * 2.0**-17


def test_the_compensation_is_what_rounding_cut_off() -> None:
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    start = weight.detach().float()
    optimizer = KahanWeights(torch.optim.SGD([weight], lr=2.0**-7))
    weight.grad = torch.randn(1000).bfloat16()
    exact = start - weight.grad.float() * 2.0**-7
    optimizer.step()
    (compensation,) = optimizer.pairs[0].store.kept
    assert compensation.dtype == torch.bfloat16
    assert torch.equal(compensation, (exact - weight.detach().float()).bfloat16())
    assert torch.equal(weight, pl.cast(exact, "bf16", rounding="nearest_away").bfloat16())


def test_weight_and_compensation_take_four_bytes() -> None:
    assert KahanWeights(torch.optim.SGD([filled(1.0)], lr=0.1)).nbytes == 2000
