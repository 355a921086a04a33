"""Plans by consequence: the predicted loss against arithmetic on the tensors, the choice against all choices."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import plimsoll as pl
from plimsoll.diagnosis import View, plan
from plimsoll.diagnosis.planning.budgeted_choice import Option, cheapest
from plimsoll.diagnosis.planning.format_choice import Judge, Verdict
from plimsoll.diagnosis.planning.loss_forecast import Consequence, Forecast
from plimsoll.diagnosis.planning.make_plan import frontier
from plimsoll.diagnosis.planning.modules import modules_of
from plimsoll.errors import ArgumentError, FormatError, NotRecordedError
from plimsoll.formats import Plan, get
from plimsoll.formats.cost_table import CostTable, cost_table
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.planned import MULTIPLY, train, written

SHIFTS = {"weights": 6, "activations": 5, "gradients": 12}
ROWS, IN, OUT = 32, 24, 40
STEPS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "run"
    train("fp32", 40, path, every=5)
    return path


def tensors(step: int) -> dict[tuple[str, str], Tensor]:
    """Two linear layers in a chain, with their gradients by arithmetic."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, IN, generator=generator)
    a, b = torch.randn(OUT, IN, generator=generator) / IN**0.5, torch.randn(IN, OUT, generator=generator) / OUT**0.5
    h, g = x @ a.T, torch.randn(ROWS, IN, generator=generator) / ROWS / 3
    return {
        ("weights", "a.weight"): a, ("weights", "b.weight"): b,
        ("gradients", "a.weight"): (g @ b).T @ x, ("gradients", "b.weight"): g.T @ h,
        ("activations", "a:input"): x, ("activations", "a:output"): h,
        ("activations", "b:input"): h, ("activations", "b:output"): h @ b.T,
        ("activation_gradients", "a:output"): g @ b, ("activation_gradients", "b:input"): g @ b,
        ("activation_gradients", "b:output"): g,
    }  # fmt: skip


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    losses = [3.0 - math.log(step + 1.0) for step in range(STEPS)]
    return written(tmp_path_factory.mktemp("chain") / "run", [tensors(s) for s in range(STEPS)], losses=losses)


def forecast_of(path: Path) -> Forecast:
    view = View(Run(path))
    return Forecast(view, Judge(view, tolerance=0.01, margin=None), modules_of(view))


def test_the_forward_part_is_the_arithmetic_on_the_tensors(chain: Path) -> None:
    forecast = forecast_of(chain)
    assert forecast.samples == pytest.approx(ROWS)
    found = forecast.of("b", "e4m3", "e5m2", SHIFTS)
    late = [tensors(step) for step in range(STEPS // 2, STEPS)]
    wanted = np.mean([
        _spread(of["gradients", "b.weight"], of["weights", "b.weight"], "e4m3", 6)
        + _spread(of["activation_gradients", "b:input"], of["activations", "b:input"], "e4m3", 5)
        for of in late
    ])  # fmt: skip
    # Sums over 4 steps of some 5,000 values, whose squared errors deviate by about as much as their mean.
    assert found.loss_divergence**2 == pytest.approx(wanted, rel=0.15)
    assert found.forward == pytest.approx(ROWS / 2 * found.loss_divergence**2)


def _spread(gradient: Tensor, x: Tensor, fmt: str, shift: int) -> float:
    """The mean square of the sum of gradient times error, over all orders of the errors."""
    error = pl.cast(x, fmt, scale=2.0**shift) - x
    return float(gradient.square().sum() * error.square().sum() / x.numel())


def test_the_first_order_divergence_is_that_of_errors_drawn_at_random(chain: Path) -> None:
    last = tensors(STEPS - 1)
    gradient, weight = last["gradients", "b.weight"], last["weights", "b.weight"]
    error = (pl.cast(weight, "e4m3", scale=64.0) - weight).flatten()
    generator = torch.Generator().manual_seed(5)
    draws = [
        float(gradient.flatten() @ error[torch.randperm(len(error), generator=generator)]) for _ in range(2000)
    ]  # fmt: skip
    # The relative standard error of a variance over n normal draws is sqrt(2 / n): 3.2 %.
    assert np.mean(np.square(draws)) == pytest.approx(_spread(gradient, weight, "e4m3", 6), rel=5 * (2 / 2000) ** 0.5)


def test_the_update_divergence_is_that_of_a_real_backward(chain: Path) -> None:
    found = forecast_of(chain).of("b", "e4m3", "e5m2", SHIFTS)
    squares = []
    for step in range(STEPS // 2, STEPS):
        made = tensors(step)
        g, h = made["activation_gradients", "b:output"], made["activations", "b:input"]
        exact = g.T @ h
        rounded = pl.cast(g, "e5m2", scale=2.0**12).T @ pl.cast(h, "e4m3", scale=2.0**5)
        squares.append(float((rounded - exact).square().sum() / exact.square().sum()))
    assert found.update_divergence == pytest.approx(math.sqrt(np.mean(squares)), rel=0.1)


def test_the_slope_is_that_of_the_loss_against_the_logarithm_of_steps(chain: Path) -> None:
    forecast = forecast_of(chain)
    assert forecast.slope == pytest.approx(1.0) and forecast.loss == pytest.approx(3.0 - math.log(STEPS))


def test_a_gradient_that_vanishes_at_the_logits_costs_half_of_its_sum(chain: Path) -> None:
    forecast, low = forecast_of(chain), {**SHIFTS, "gradients": -40}
    sums = [float(tensors(s)["activation_gradients", "b:output"].abs().sum()) for s in range(STEPS // 2, STEPS)]
    more = forecast.of("b", "e4m3", "e5m2", low).updates
    # All of the gradient is lost: its relative error is 1, of the module itself and of the one before.
    assert more == pytest.approx(np.mean(sums) / 2 + 1 - 2**-0.5, rel=0.05)
    assert forecast.of("a", "e4m3", "e5m2", low).updates == pytest.approx(
        forecast._shares["a"] * (1 - 2**-0.5), rel=0.1
    )


def test_a_gradient_that_vanishes_in_part_costs_less(tmp_path: Path) -> None:
    steps = [tensors(step) for step in range(2)]
    for made in steps:  # of a row's eight classes, seven are wrong: four at a probability of 2^-7, three at 2^-5
        wrong = torch.tensor([2.0**-7] * 4 + [2.0**-5] * 3).expand(ROWS, 7) / ROWS
        made["activation_gradients", "b:output"] = torch.cat([wrong, -wrong.sum(1, keepdim=True)], 1)
    forecast = forecast_of(written(tmp_path / "run", steps, losses=[1.0, 1.0]))
    # At this scale E4M3 rounds values below 2^-11 to zero: the four, a quarter of the wrong classes' probability.
    # Losses of equal size have no slope, so nothing else counts.
    found = forecast.of("b", "e4m3", "e4m3", {**SHIFTS, "gradients": 1})
    assert found.updates == pytest.approx(2.0**-5 / 2 * math.sqrt(1 / 4))


def _trained_by_sgd(last: Callable[[Tensor], Tensor], run: Path | None = None) -> tuple[float, float]:
    """The loss of the last quarter, and the mean of all logits at the end. The last gradient goes through `last`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch = None if run is None else pl.watch(model, optimizer, run=run, every=10, quiet=True)
    first, second, losses = torch.randn(16, 12) / 4, torch.randn(12, 10), list[float]()
    logits = torch.zeros(())
    for _ in range(200):
        x = torch.randn(64, 16)
        classes = ((x @ first).tanh() @ second).argmax(1)
        classes = torch.where(torch.rand(64) < 0.1, torch.randint(0, 10, (64,)), classes)
        logits = model(x)
        logits.register_hook(last)
        loss = F.cross_entropy(logits, classes)
        losses.append(loss.item())
        if watch is not None:
            watch.log(loss=loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return float(np.mean(losses[150:])), logits.mean().item()


def test_sgd_pays_for_what_pulls_all_logits_together(tmp_path: Path) -> None:
    def cast(gradient: Tensor) -> Tensor:
        # The smallest value of E2M3 is 2^-10 at this scale. Probabilities below 2^-5 are lost in a mean over 64 rows.
        return pl.cast(gradient, "e2m3", scale=2.0**7)

    exact, _ = _trained_by_sgd(lambda gradient: gradient, tmp_path / "run")
    narrow, together = _trained_by_sgd(cast)
    balanced, _ = _trained_by_sgd(lambda gradient: cast(gradient) - cast(gradient).mean(1, keepdim=True))
    forecast = forecast_of(tmp_path / "run")
    gradients, rise = forecast._collection("activation_gradients"), narrow - exact
    lost, added, _ = gradients.sums(["4:output"], get("e2m3"), 7)
    assert together / 2 < forecast._drift(forecast._sizes["4"], lost - added) < together * 2
    found = forecast.interval(forecast.of("4", "e5m10", "e2m3", {"gradients": 7}).updates)
    assert found.low < rise / forecast.loss < found.high
    # The same values are lost where each row's mean is taken out, and nothing pulls at all logits.
    assert abs(balanced - exact) < rise / 4


@each("scale", [1.0, 2.0**10])
def test_a_cast_takes_away_what_it_loses_less_what_it_raises(scale: float, tmp_path: Path) -> None:
    steps = [tensors(step) for step in range(4)]
    for step, made in enumerate(steps):
        generator = torch.Generator().manual_seed(step)
        made["activation_gradients", "b:output"] = scale * 2 ** (-14 * torch.rand(64, 200, generator=generator))
    forecast = forecast_of(written(tmp_path / f"{scale}", steps, losses=[1.0] * 4, scale=scale))
    values = torch.stack([made["activation_gradients", "b:output"] for made in steps[2:]]) / scale
    rounded = pl.cast(values, "e2m3", scale=2.0**4)  # smallest value 2^-7
    lost, added, whole = forecast._collection("activation_gradients").sums(["b:output"], get("e2m3"), 4)
    kept = rounded > 0
    near = kept & (values < 2.0**-7)
    assert whole == pytest.approx(values.sum() / 2, rel=1e-3)
    assert lost == pytest.approx(values[~kept].sum() / 2, rel=0.02)
    assert added == pytest.approx((rounded - values)[near].sum() / 2, rel=0.05)


def _run_of(path: Path, **settings: object) -> Forecast:
    """A run of one step whose optimizer has these settings."""
    return forecast_of(written(path, [tensors(0)], losses=[1.0] * 100, settings={"optimizer": settings}))


def test_the_rate_of_sgd_is_known_and_weight_decay_bounds_the_pull(tmp_path: Path) -> None:
    plain = _run_of(tmp_path / "sgd", name="SGD", lr=0.1, momentum=0.75, weight_decay=0)
    assert plain._rate == pytest.approx(0.4)
    drift = plain._drift(plain._sizes["b"], 0.5)
    assert drift == pytest.approx(0.4 * 100 * 0.5 * plain._sizes["b"].inputs / (ROWS * IN))
    decays = _run_of(tmp_path / "decay", name="SGD", lr=0.1, momentum=0.75, weight_decay=0.25)  # for ten steps
    assert decays._drift(decays._sizes["b"], 0.5) == pytest.approx(drift / 10)
    assert _run_of(tmp_path / "adam", name="Adam", lr=0.1)._rate is None
    assert _run_of(tmp_path / "odd", name="SGD", lr="fast", momentum=None)._rate == 0


def test_momentum_adds_up_gradients_that_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.8)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2, quiet=True) as watch:
        for _ in range(200):
            # Each step has a gradient of its own.
            loss = (model(torch.randn(8, 32)) * torch.randn(8, 32)).sum()
            watch.log(loss=loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert forecast_of(tmp_path / "run")._rate == pytest.approx(1e-3 / (1 - 0.8), rel=0.1)


def test_data_is_felt_as_much_as_what_the_next_module_multiplies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    goal, felt = torch.randn(32, 10), list[float]()
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )

    def note(module: torch.nn.Linear, _: object, output: Tensor) -> None:
        output.register_hook(lambda g: felt.append(float((g @ module.weight).square().sum())))

    model[0].register_forward_hook(note)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, quiet=True) as watch:
        for _ in range(120):
            x = torch.randn(64, 32)
            loss = F.cross_entropy(model(x), (x @ goal).argmax(1))
            watch.log(loss=loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    sizes, wanted = forecast_of(tmp_path / "run")._sizes["0"], np.mean(felt[60::10])
    assert sizes.passed < wanted / 2
    assert sizes.input_gradient == pytest.approx(wanted, rel=0.4)


def test_more_digits_never_predict_more(trained: Path) -> None:
    forecast, shifts = forecast_of(trained), {"weights": 4, "activations": 2, "gradients": 12}
    for name in MULTIPLY:
        rises = [forecast.of(name, f"e5m{m}", f"e5m{m}", shifts).increase for m in (1, 2, 3, 5, 8)]
        assert rises == sorted(rises, reverse=True) and rises[-1] > 0


# -- the choice


def _option(increase: float, cost: float) -> Option:
    found = Consequence(loss_divergence=0.0, update_divergence=0.0, forward=increase, updates=0.0)
    return Option(forward="e4m3", backward="e5m2", verdict=Verdict(), consequence=found, cost=cost)


@each("seed", range(20))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    offers = [[_option(*random.lognormal(0, 2, 2)) for _ in range(random.integers(1, 5))] for _ in range(5)]
    every = [(sum(o.cost for o in c), sum(o.increase for o in c)) for c in itertools.product(*offers)]
    budget = float(np.quantile([increase for _, increase in every], random.uniform(0, 1)))
    found = cheapest(offers, budget * 1.0001)
    assert found is not None and len(found) == len(offers)
    assert all(option in offer for option, offer in zip(found, offers, strict=True))
    assert sum(o.increase for o in found) <= budget * 1.0001
    assert sum(o.cost for o in found) == pytest.approx(min(cost for cost, i in every if i <= budget), rel=1e-5)
    assert cheapest(offers, min(increase for _, increase in every) * 0.999) is None


def test_of_equal_costs_the_smaller_increase_is_chosen() -> None:
    offers = [[_option(3.0, 1.0), _option(1.0, 1.0), _option(2.0, 1.0)], [_option(1.0, 2.0), _option(0.5, 2.0)]]
    assert [o.increase for o in cheapest(offers, 100.0)] == [1.0, 0.5]


@pytest.mark.parametrize("target", ["fp8", "fp16"])
def test_a_plan_stays_within_its_budget_and_spends_it(trained: Path, target: str) -> None:
    free = plan(trained, target)
    assert free.predicted_loss is not None and free.budget is None
    assert 0 < free.predicted_loss.low < free.predicted_loss.estimate < free.predicted_loss.high
    made = [plan(trained, target, budget=free.predicted_loss.high * part) for part in (1.01, 0.5, 0.1, 0.01)]
    assert all(one.predicted_loss.high <= one.budget for one in made)
    costs = [one.cost for one in made]
    assert costs == sorted(costs)
    if target == "fp8":
        assert made[0].formats == free.formats and made[0].cost == free.cost == 0.5
        assert 0.5 < costs[1] < costs[3] <= 1.0
        assert "narrower formats would add more to the loss than the budget allows" in made[1].notes["head"]
    for one in made:
        rises = {name: sum(pair) for name, pair in one.increases.items()}
        assert sum(rises.values()) == pytest.approx(one.predicted_loss.estimate)


def test_a_plan_within_a_budget_can_be_trained_and_saved(trained: Path, tmp_path: Path) -> None:
    free = plan(trained, "fp8")
    made = plan(trained, "fp8", budget=free.predicted_loss.high / 2, costs="h100")
    assert ("e4m3", "bf16") in {(made.module(name).forward, made.module(name).backward) for name in MULTIPLY}
    made.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == made
    losses, _ = train(tmp_path / "plan.toml", 3)
    assert all(map(math.isfinite, losses))


@each("budget", [0, -0.1, math.nan, math.inf, "1 %", True])
def test_a_budget_is_a_share_above_zero(trained: Path, budget: object) -> None:
    with pytest.raises(ArgumentError, match="plan: expected budget to be a number above 0; got budget="):
        plan(trained, "fp8", budget=budget)


def test_a_budget_below_the_widest_formats_names_the_least(tmp_path: Path) -> None:
    # Values that were recorded in FP64 are rounded in FP32 too.
    path = written(tmp_path / "run", [tensors(step) for step in range(2)], fmt="fp64", losses=[2.0, 1.0])
    with pytest.raises(
        ArgumentError, match=r"plan: expected a budget of at least \S+, the predicted increase"
    ) as error:
        plan(path, "fp8", budget=1e-18)
    least = float(str(error.value).split("at least ")[1].split(",")[0])
    assert set(plan(path, "fp8", budget=least).formats.values()) == {"fp32"}


def test_without_losses_a_plan_has_a_cost_and_no_prediction(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [tensors(0)])
    made = plan(path, "fp8")
    assert made.predicted_loss is None and made.cost == 0.5 and not made.increases
    with pytest.raises(
        NotRecordedError, match=r"plan: expected a run with its loss.*; got activation_gradients,.*no loss"
    ):
        plan(path, "fp8", budget=0.1)


def test_what_blocks_were_not_recorded_is_not_predicted(chain: Path) -> None:
    made = plan(chain, "mxfp8")
    assert set(made.formats.values()) == {"mxfp8_e4m3"} and not made.increases
    assert made.remarks[-1].startswith("The loss is not predicted, as no module's tensors or blocks")
    assert made.predicted_loss is None and "the loss rises" not in str(made.consequence)
    assert set(plan(chain, "mxfp8", budget=1.0).formats.values()) == {"bf16"}


def test_modules_that_stay_in_bf16_say_nothing_of_the_others(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
            self.mix = torch.nn.MultiheadAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.head(self.mix(x, x, x, need_weights=False)[0])

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, quiet=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 32, 16)).square().mean().backward()
            optimizer.step()
    made = plan(tmp_path / "run", "mxfp8")  # whose blocks are not recorded
    assert made.formats["mix"] == "bf16" and made.formats["head"] == "mxfp8_e4m3" and made.predicted_loss is None
    assert plan(tmp_path / "run", "fp8").predicted_loss is not None


def test_recorded_errors_calibrate_the_prediction(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, shadow_every=1, quiet=True) as watch:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(64, 32)).float().square().mean()
            watch.log(loss=loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    factor, count = forecast_of(tmp_path / "run").calibration
    # The formula knows the casts of the operands. The step rounds results as well, and has errors of the forward.
    assert count == 3 and 0.5 < factor < 8
    exact, none = forecast_of(tmp_path / "run"), forecast_of(tmp_path / "run")
    none.__dict__["calibration"] = (1.0, 0)
    ours, plain = (f.of("0", "e4m3", "e5m2", SHIFTS) for f in (exact, none))
    assert ours.updates == pytest.approx(factor * plain.updates) and ours.forward == plain.forward


# -- costs


def test_costs_are_bytes_or_the_longer_of_reading_and_arithmetic() -> None:
    sizes = (4096.0 * 4096, 8192.0 * 4096, 8192.0 * 4096)
    assert cost_table("bytes").cost(*sizes, "bf16", "bf16") == 4 * sum(sizes)
    assert cost_table("bytes").cost(*sizes, "e4m3", "bf16") == 2 * (sizes[0] + sizes[1]) + 4 * sizes[2]
    operations = 2 * 4096.0 * 4096 * 8192
    table = cost_table("H100")
    assert table.cost(*sizes, "bf16", "bf16") == pytest.approx(3 * operations / 989e12)
    assert table.cost(*sizes, "e4m3", "e5m2") == pytest.approx(3 * operations / 1979e12)
    assert table.cost(*sizes, "e4m3", "bf16") == pytest.approx(operations / 1979e12 + 2 * operations / 989e12)
    assert cost_table("a100").cost(*sizes, "e4m3", "e5m2") == cost_table("a100").cost(*sizes, "bf16", "bf16")
    assert cost_table("b200").cost(*sizes, "mxfp4", "mxfp4") == pytest.approx(3 * operations / 9e15)
    narrow = (4096.0 * 4096, 4096.0, 4096.0)  # one row: reading the weight takes longer
    assert table.cost(*narrow, "bf16", "bf16") == pytest.approx(4 * sum(narrow) / 3.35e12)


def test_a_device_may_be_a_mapping_or_a_file(tmp_path: Path) -> None:
    given = {"bandwidth": 1e12, "rates": {"bf16": 1e14, "e4m3": 3e14}}
    file = tmp_path / "mine.toml"
    file.write_text("bandwidth = 1e12\n[rates]\nbf16 = 1e14\ne4m3 = 3e14\n")
    assert cost_table(file) == CostTable(name="mine", **given)
    assert cost_table(given).rates == given["rates"]


@each(
    ("given", "error", "message"),
    [
        ("h200x", ArgumentError, r"plan: expected costs to be one of bytes, a100, .*; got costs='h200x'"),
        (5, ArgumentError, r"plan: expected costs to be one of bytes, a100, .*; got costs=5\."),
        ({"speed": 1.0}, ArgumentError, r"plan: expected costs with bandwidth .*; got costs=\{'speed': 1.0\}"),
        ({"rates": {"bf16": 1e14}}, ArgumentError, "plan: expected costs with bandwidth"),
        ({"bandwidth": 0.0}, ArgumentError, "plan: expected costs with bandwidth"),
        ({"bandwidth": 1.0, "rates": {"bf16": "fast"}}, ArgumentError, "plan: expected costs with bandwidth"),
        ({"bandwidth": 1.0, "rates": {"bf61": 1.0}}, FormatError, r"plan: expected rates by format\. .*bf61"),
    ],
)
def test_costs_that_cannot_be_are_refused(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cost_table(given)


# -- the frontier


def test_the_frontier_falls_and_has_the_plans_on_it(trained: Path) -> None:
    points = frontier(View(Run(trained)), "fp8")
    costs, rises = [p.cost for p in points], [p.increase.estimate for p in points]
    assert frontier(View(Run(trained)), "FP8") == points
    with pytest.raises(ArgumentError, match="plan: expected a target among .*; got 'e4m3'. e4m3 is a format"):
        frontier(View(Run(trained)), "e4m3")
    assert len(points) > 4 and costs == sorted(costs) and rises == sorted(rises, reverse=True)
    free = plan(trained, "fp8")
    assert (points[0].cost, points[0].increase.estimate) == pytest.approx((free.cost, free.predicted_loss.estimate))
    middle = points[len(points) // 2]
    made = plan(trained, "fp8", budget=middle.increase.high * 1.0001)
    assert made.cost == pytest.approx(middle.cost)


def test_the_frontier_of_an_incomplete_run_is_empty(tmp_path: Path) -> None:
    assert frontier(View(Run(written(tmp_path / "run", [tensors(0)]))), "fp8") == []
