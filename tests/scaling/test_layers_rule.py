"""The two rules by which layer scales are chosen."""

import math

import pytest
import torch
from scipy.special import erfinv
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.formats import get
from plimsoll.scaling import LayerScaler
from plimsoll.scaling.layerwise.exponents import HIGHEST, LOWEST, Moments, by_moments, by_spectra, top_of
from plimsoll.spectrum import Spectrum, measure
from tests.support.cases import each
from tests.support.scaling.layer_models import needs_wide_gradients

FP16 = get("fp16")


def spectra_rule(tops: list[int | None], start: int = 0, present: list[int] | None = None, slack: int = 0) -> list[int]:
    return by_spectra(tops, start, present or [0] * len(tops), fmt=FP16, margin=2, slack=slack)


def test_the_largest_value_comes_to_lie_a_margin_below_the_end() -> None:
    assert spectra_rule([-3, -20, 4]) == [16, 33, 9]
    for top, exponent in zip([-3, -20, 4], spectra_rule([-3, -20, 4]), strict=True):
        largest = math.ldexp(2.0 - 2.0**-10, top + exponent)
        assert largest * 4 <= FP16.max < largest * 8


def test_an_unknown_unit_takes_what_its_neighbour_nearer_to_the_loss_has() -> None:
    assert spectra_rule([None, -10, None, None, -30], start=7) == [7, 23, 23, 23, 43]


def test_neighbours_share_an_exponent_where_it_will_do() -> None:
    assert spectra_rule([-3, -5, -7, -8], slack=4) == [16, 16, 16, 21]
    assert spectra_rule([-3, -2], slack=4) == [16, 15]  # never one that is too high
    assert spectra_rule([-3, -9], present=[0, 20], slack=4) == [16, 20]  # the present one, if the neighbour's will not


def test_exponents_have_bounds() -> None:
    assert spectra_rule([-149, 120]) == [HIGHEST, LOWEST]


def test_the_top_of_spectra() -> None:
    assert top_of([measure(torch.tensor([0.75, -3.0])), measure(torch.tensor([1.0]))]) == 1
    assert top_of([measure(torch.zeros(3)), Spectrum.empty(), measure(torch.tensor([math.nan]))]) is None


def published(gradient: Tensor, weight: Tensor, carried: float) -> float:
    """One layer's factor before its bounds, from the published formulas, on tensors."""
    fan = weight.shape[0]
    mean_square = [(t.double().std(unbiased=False) ** 2 + t.double().mean() ** 2).item() for t in (gradient, weight)]
    deviation = math.sqrt(mean_square[0] * mean_square[1]) * math.sqrt(0.5 * fan) * carried
    lower = 2.0**-24 / (math.sqrt(2.0) * erfinv(1e-3) * deviation)
    largest = gradient.abs().max().item() * weight.abs().max().item() * carried
    return min(max(lower, 1.0), 65504 / fan / largest)


@each("exponent", [-40, -34, -30, -28, -26, -20, 0, 20])
def test_the_published_rule_against_its_formulas(exponent: int) -> None:
    torch.manual_seed(0)
    gradient, weight = torch.randn(64, 48) * 2.0**exponent, torch.randn(48, 32) / 7
    unit = Moments(gradient=measure(gradient), weight=measure(weight), fan=48)
    expected = math.floor(math.log2(min(published(gradient, weight, 1.0), 16.0)))
    assert by_moments([unit], 0, fmt=FP16) == [expected]


def test_the_published_rule_multiplies_at_most_16_times_a_layer_and_1024_times_in_all() -> None:
    tiny, weight = measure(torch.randn(64) * 2.0**-60), measure(torch.randn(8, 8))
    unit = Moments(gradient=tiny, weight=weight, fan=8)
    assert by_moments([unit] * 5, 3, fmt=FP16) == [7, 11, 13, 13, 13]


def test_the_published_rule_lowers_what_would_overflow_and_leaves_what_it_does_not_know() -> None:
    large, weight = measure(torch.full((4,), 2.0**12)), measure(torch.ones(8, 8))
    assert by_moments([Moments(gradient=large, weight=weight, fan=64)], 0, fmt=FP16) == [-3]
    unknown = [Moments(gradient=None, weight=weight), Moments(gradient=large, weight=None)]
    assert by_moments(unknown, 5, fmt=FP16) == [5, 5]


@needs_wide_gradients
def test_the_published_rule_helps_a_chain_by_what_it_may() -> None:
    """It stops at 1,024, so a chain is rescued to a depth of its own; not as deep as by spectra."""
    found = {}
    for rule in ("zhao", "spectra"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).half()
        for layer in model:
            nn.init.normal_(layer.weight, std=1 / 50 / 32**0.5)
        scaler = LayerScaler(model, rule=rule, init_scale=2.0**4, every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(12):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(16, 32).half()).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        found[rule] = scaler.scales
        lost = {name: (model[int(name)].weight.grad == 0).float().mean().item() for name in scaler.scales}
        assert lost["5"] < 0.1 and scaler.outcome.stepped
    assert max(found["zhao"].values()) == 1024.0
    assert found["spectra"]["0"] > 2.0**20


def test_a_scaler_that_looks_again_goes_by_what_gradients_are_now() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LayerScaler(model, every=1000)

    def steps(factor: float) -> dict[str, float]:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return dict(scaler.scales)

    at_first = steps(1.0)
    assert steps(2.0**-12) == at_first  # nothing is measured for 1,000 steps
    scaler.look_again(["0"])
    later = steps(2.0**-12)
    assert later["0"] >= 2.0**8 * at_first["0"] and later["1"] == at_first["1"]
    scaler.look_again()
    assert steps(2.0**-12)["1"] >= 2.0**8 * at_first["1"]
    with pytest.raises(ArgumentError, match="look_again: expected modules that have a scale; got 2. There are 0, 1"):
        scaler.look_again(["0", "2"])
    scaler.close()
