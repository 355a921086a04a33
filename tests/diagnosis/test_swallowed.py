"""Weights that stay where they were, in real trainings: lost with a plain 16-bit optimizer, and with no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, diagnose
from plimsoll.watch.parameters.followed_weights import BIASED, INEXACT, ON_AVERAGE, OVER_STEPS, FollowedWeights, way_of
from tests.support.cases import each

STEPS = 8
SPARED = {"bf16-master": "masters", "bf16-stochastic": "stochastic", "bf16-kahan": "kahan", "fp16-master": "masters"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(dim=1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-6)  # far below the spacing of most weights


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6)


def prepared(path: Path, precision: Any, make: Callable[[nn.Module], Any] = adamw, steps: int = STEPS) -> pl.Run:
    model = network()
    with pl.prepare(model, make(model), precision) as loop:
        loop.attach(pl.watch(model, loop.optimizer, run=path, every=1, scaler=loop.scaler), owned=True)
        for step in range(steps):
            x, y = batch(step)
            with loop.forward():
                loss = nn.functional.cross_entropy(model(x).float(), y)
            loop.step(loss)
    return pl.Run(path)


def by_hand(path: Path, dtype: torch.dtype, mark: str | None = None, resume: bool | None = None) -> pl.Run:
    """The plain loop, with the optimizer on the 16-bit weights themselves."""
    model = network().to(dtype)
    optimizer: Any = sgd(model)
    if mark is not None:
        optimizer.plimsoll_update = mark
    with pl.watch(model, optimizer, run=path, every=1, resume=resume):
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
    return pl.Run(path)


def swallowed(run: pl.Run) -> list[Finding]:
    return [finding for finding in diagnose(run.path) if finding.rule == "updates-swallowed"]


def reported(run: pl.Run) -> list[tuple[int, str, str]]:
    events = [event for event in run.events() if event.kind == "update"]
    assert all(set(event.details["parameters"]) == set(run.tensors["weights"]) for event in events)
    return [(event.step, str(event.details["optimizer"]), str(event.details["update"])) for event in events]


def unmoved(run: pl.Run) -> float:
    """The share of the first layer's weights that were to move and did not."""
    table = run.table("updates", "0.weight").to_pydict()
    return sum(table["unmoved"]) / sum(table["pushed"])


@pytest.mark.parametrize("precision", SPARED)
def test_weights_that_stay_are_no_loss_where_nothing_is_lost(precision: str, tmp_path: Path) -> None:
    run = prepared(tmp_path / "run", precision)
    assert unmoved(run) > 0.75, "the rule would say something, if it did not know"
    assert swallowed(run) == []
    assert reported(run) == [(0, "AdamW", SPARED[precision])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_plain_16_bit_model_is_an_alarm(dtype: torch.dtype, tmp_path: Path) -> None:
    run = by_hand(tmp_path / "run", dtype)
    (found,) = swallowed(run)
    assert found.severity == "alarm" and found.since_step == 0
    assert reported(run) == [(0, "SGD", "own")]


def test_fp32_weights_need_no_event(tmp_path: Path) -> None:
    assert reported(prepared(tmp_path / "run", "amp-bf16")) == []


def test_an_optimizer_of_ones_own_tells_by_an_attribute(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "run", torch.bfloat16, mark="stochastic")
    assert unmoved(run) > 0.75 and swallowed(run) == []


def test_an_attribute_that_says_nothing_spares_nothing(tmp_path: Path) -> None:
    (found,) = swallowed(by_hand(tmp_path / "run", torch.bfloat16, mark="somehow"))
    assert found.severity == "alarm"


class Adam16(torch.optim.Optimizer):
    """Adam of 16-bit weights, computed in FP32 and rounded in some way that it does not declare."""

    def __init__(self, params: Any, way: str, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})
        self.way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state, g = self.state[p], p.grad.float()
            if not state:
                state.update(t=0, m=torch.zeros_like(g), v=torch.zeros_like(g), exact=p.float())
            state["t"] += 1
            mean = state["m"].lerp_(g, 0.1) / (1 - 0.9 ** state["t"])
            square = state["v"].mul_(0.999).addcmul_(g, g, value=0.001) / (1 - 0.999 ** state["t"])
            update = -self.param_groups[0]["lr"] * mean / (square.sqrt() + 1e-8)
            state["exact"] += update
            exact = (state["exact"] if self.way == "from a copy" else p.float() + update).view(torch.int32)
            if self.way == "by chance":
                exact = exact + torch.randint_like(exact, 1 << 16)
            if self.way in ("by chance", "toward zero"):
                exact = exact & -65536
            p.copy_(exact.view(torch.float32))


def in_16_bits(path: Path, way: str) -> pl.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).bfloat16()
    optimizer = Adam16(model.parameters(), way)
    with pl.watch(model, optimizer, run=path, every=1):
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()
    return pl.Run(path)


@each("way", ["by chance", "from a copy"])
def test_an_optimizer_that_declares_nothing_and_loses_nothing_is_known_by_its_weights(way: str, tmp_path: Path) -> None:
    run = in_16_bits(tmp_path / way, way)
    assert reported(run) == [(0, "Adam16", "own"), (0, "Adam16", "lossless on average")]
    assert unmoved(run) > 0.5 and swallowed(run) == []


@each("way, loses", [("by chance", False), ("to nearest", True)])
def test_rounding_by_chance_is_known_in_a_small_model_too(way: str, loses: bool, tmp_path: Path) -> None:
    """1,348 weights are too few for the sizes of single updates to show it; followed ones show it on the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).bfloat16()
    optimizer = Adam16(model.parameters(), way)
    with pl.watch(model, optimizer, run=tmp_path / way, every=10):
        for _ in range(40):
            x = torch.randn(64, 16)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.bfloat16()).float(), x[:, :4].argmax(1)).backward()
            optimizer.step()
    run = pl.Run(tmp_path / way)
    assert unmoved(run) > 0.75 and bool(swallowed(run)) == loses
    assert reported(run)[1:] == [(0, "Adam16", BIASED if loses else ON_AVERAGE)]


def test_rounding_to_nearest_is_an_alarm_and_shows_nothing_else(tmp_path: Path) -> None:
    run = in_16_bits(tmp_path / "run", "to nearest")
    (found,) = swallowed(run)
    assert reported(run) == [(0, "Adam16", "own")] and found.severity == "alarm"


def test_rounding_toward_zero_is_named(tmp_path: Path) -> None:
    (found,) = swallowed(in_16_bits(tmp_path / "run", "toward zero"))
    assert (found.severity, found.since_step, found.evidence["cause"]) == ("alarm", 0, "toward zero")
    assert "they shrink" in found.meaning


@each("second, loses", [("to nearest", True), ("from a copy", False)])
def test_each_of_two_optimizers_is_judged_by_its_own_weights(second: str, loses: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2)]
    model = nn.Sequential(*parts, nn.Linear(64, 4).requires_grad_(False)).bfloat16()
    model[1][0] = nn.Linear(64, 64).bfloat16()
    optimizers = [Adam16(part.parameters(), way) for part, way in zip(parts, ("by chance", second), strict=True)]
    with pl.watch(model, optimizers, run=tmp_path / second, every=1):
        for step in range(STEPS):
            x, y = batch(step)
            model.zero_grad()
            nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    found = swallowed(pl.Run(tmp_path / second))
    assert [finding.severity for finding in found] == (["alarm"] if loses else [])
    assert all(name.startswith("1.") for finding in found for name in finding.where)


RATES = {"sgd": 2e-2, "momentum": 2e-3, "adam": 1e-4}


class Compensated(torch.optim.Optimizer):
    """An optimizer of BF16 weights that keeps what rounding took from an update, for the next one.

    Args:
        params: The weights.
        kind: "sgd", "momentum" or "adam".
        returns: What the next update gets of what was lost: all (1), nothing (0), or all with the wrong sign (-1).
        state: The name of the state that keeps it.
        dtype: The format of that state.
    """

    def __init__(
        self, params: Any, kind: str, returns: int = 1, *, state: str = "lost", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(params, {"lr": RATES[kind]})
        self.kind, self.returns, self.name, self.dtype = kind, returns, state, dtype
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            state, g = self.state[p], p.grad.float()
            if not state:
                state.update({"m": torch.zeros_like(g), "v": torch.zeros_like(g), self.name: g.to(self.dtype) * 0})
            if self.kind == "momentum":
                g = state["m"].mul_(0.9).add_(g)
            if self.kind == "adam":
                mean = state["m"].lerp_(g, 0.1) / (1 - 0.9**self.steps)
                square = state["v"].lerp_(g * g, 0.001) / (1 - 0.999**self.steps)
                g = mean / (square.sqrt() + 1e-8)
            wanted = self.returns * state[self.name].float() - self.param_groups[0]["lr"] * g
            before = p.float()
            p.copy_(before + wanted)
            state[self.name].copy_(wanted - (p.float() - before))


def shown(seed: int, noise: float, *args: Any, **how: Any) -> str | None:
    """What weights show within 65 steps with gradients that stay but for noise, as that of small batches."""
    random = torch.Generator().manual_seed(seed)
    p, to = nn.Parameter(torch.rand(128, 64, generator=random).sub(0.5).div(4).bfloat16()), torch.empty(128, 64)
    to.normal_(std=1e-3, generator=random)
    optimizer, followed, way = Compensated([p], *args, **how), FollowedWeights(), None
    for _ in range(65):
        p.grad = (to + noise * torch.empty_like(to).normal_(std=1e-3, generator=random)).bfloat16()
        optimizer.step()
        sums = followed.after_step({"weight": p})
        way = way or (way_of(sums) if sums is not None else None)
        if way:
            break
    return way


@each("noise", [0.0, 1.0])
@each("kind", list(RATES))
def test_what_rounding_loses_comes_back_later_only_with_a_compensation(kind: str, noise: float) -> None:
    for seed in range(4):
        assert shown(seed, noise, kind, 1) == OVER_STEPS
        assert shown(seed, noise, kind, 1, dtype=torch.float32) == OVER_STEPS
        assert shown(seed, noise, kind, 0) == BIASED
        assert shown(seed, noise, kind, -1) in (BIASED, INEXACT)


def compensated(
    path: Path, *args: Any, size: int = 128, rate: float | None = None, every: int = 4, **how: Any
) -> pl.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).bfloat16()
    optimizer = Compensated(model.parameters(), *args, **how)
    optimizer.param_groups[0]["lr"] = rate or optimizer.param_groups[0]["lr"]
    centers, y = torch.randn(10, 16), torch.randint(10, (128,))
    x = (centers[y] + torch.randn(128, 16)).bfloat16()
    with pl.watch(model, optimizer, run=path, every=every):
        for _ in range(18):
            rows = torch.randperm(128)[:size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]).float(), y[rows]).backward()
            optimizer.step()
    return pl.Run(path)


@each("size", [32, 128])
def test_a_compensation_is_known_by_its_weights(size: int, tmp_path: Path) -> None:
    run = compensated(tmp_path / str(size), "sgd", size=size)
    assert swallowed(run) == [] and unmoved(run) > 0.5
    assert (0, "Compensated", OVER_STEPS) in reported(run)


BROKEN = [("sgd", -1, 128), ("sgd", -1, 32), ("adam", 0, 32)]


@each("kind, returns, size", BROKEN)
@each("state", ["lost", "compensation"])
def test_a_compensation_that_brings_nothing_back_is_an_alarm_under_any_name(
    kind: str, returns: int, size: int, state: str, tmp_path: Path
) -> None:
    run = compensated(tmp_path / f"{kind}{size}{state}", kind, returns, size=size, state=state)
    (found,) = swallowed(run)
    assert (found.severity, found.since_step) == ("alarm", 0)
    assert reported(run)[1:] in ([(0, "Compensated", BIASED)], [(0, "Compensated", INEXACT)])


def test_weights_that_move_both_ways_but_elsewhere_are_an_alarm_still(tmp_path: Path) -> None:
    """A compensation of the wrong sign lets coarse weights move now and then, as rounding at random does."""
    run = compensated(tmp_path / "run", "sgd", -1, size=32, rate=5e-3, every=1)
    (found,) = swallowed(run)
    assert found.severity == "alarm" and reported(run)[-1][2] == BIASED


def test_an_optimizer_of_torchao_says_it_by_its_argument(tmp_path: Path) -> None:
    model = network().bfloat16()
    optimizer: Any = sgd(model)
    optimizer.bf16_stochastic_round = True
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        x, y = batch(0)
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    assert reported(pl.Run(tmp_path / "run")) == [(0, "SGD", "stochastic")]


def test_what_changes_within_a_run_counts_from_there_on(tmp_path: Path) -> None:
    schedule = [(0, "bf16-stochastic"), (STEPS, "fp16-pure")]
    run = prepared(tmp_path / "run", schedule, sgd, steps=2 * STEPS)
    assert reported(run) == [(0, "SGD", "stochastic"), (STEPS, "SGD", "own")]
    (found,) = swallowed(run)
    assert found.severity == "alarm" and found.since_step == STEPS


def test_a_run_that_goes_on_without_rounding_at_random_is_judged_from_there_on(tmp_path: Path) -> None:
    prepared(tmp_path / "run", "bf16-stochastic")
    (found,) = swallowed(by_hand(tmp_path / "run", torch.bfloat16, resume=True))
    assert found.severity == "alarm" and found.since_step == STEPS


@pytest.mark.parametrize("precision", ["fp16-master", "bf16-master"])
def test_the_updates_of_masters_are_the_weights_own(precision: str, tmp_path: Path) -> None:
    """A watch reads after the optimizer's step, when the weights are to be written already."""
    model = network()
    with pl.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), precision) as loop:
        loop.attach(pl.watch(model, loop.optimizer, run=tmp_path / "run", every=1), owned=True)
        before = model[0].weight.detach().double()
        with loop.forward():
            loss = nn.functional.cross_entropy(model(batch(0)[0]).float(), batch(0)[1])
        assert loop.step(loss).stepped
        moved = model[0].weight.detach().double() - before
    spectrum = pl.Run(tmp_path / "run").spectrum("updates", "0.weight", 0)
    assert spectrum.absmax == moved.abs().max().item() > 0
    assert spectrum.zeros == int((moved == 0).sum())


class Relative(torch.optim.Optimizer):
    """Steps that are a share of each weight's size, as those of LARS."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and bool(p.grad.any()):
                    p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


@each("begin", [0.0, 0.1])
def test_a_head_of_zeros_that_steps_relative_to_weights_never_move_is_named(begin: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for p in model[2].parameters():
        p.data.copy_(begin * torch.randn(p.shape))
    run = tmp_path / str(begin)
    optimizer = Relative(model.parameters(), {"lr": 0.02})
    with pl.watch(model, optimizer, run=run, every=5):
        for _ in range(60):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
    found = [f for f in diagnose(run) if f.severity != "info" and f.rule != "loss-at-chance"]
    if begin:
        assert found == []
    else:
        assert [f.rule for f in found] == ["optimizer-idle"], found
        assert "All weights of 2." in found[0].advice and "LAMB" in found[0].advice


@pytest.mark.parametrize("broken", [0, STEPS])
def test_weights_of_nan_are_no_updates_lost_to_rounding(broken: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = sgd(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        for step in range(STEPS + 6):
            x, y = batch(step)
            optimizer.zero_grad()
            factor = float("nan") if step >= broken else 1.0
            (factor * nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
    found = {finding.rule: finding for finding in diagnose(tmp_path / "run")}
    assert "updates-swallowed" not in found
    nonfinite = found["nonfinite"]
    assert nonfinite.severity == "alarm" and nonfinite.evidence["weights_since"] in (broken, broken + 1)
    assert nonfinite.advice.startswith("The weights contain NaN or Inf, so nothing trains any more")
