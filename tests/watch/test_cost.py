"""The cost of watching: which steps are sampled, which are timed, and what is computed of the times. Not its size."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.cli.script.cost_session import measure_example
from plimsoll.tensor_collections import NAMES, OF_MODULES
from plimsoll.watch import cost
from plimsoll.watch.cost import EVERYTHING, FLOOR, NEVER, CostProbe, CostReport, interval
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.steps.step_boundary import Steps
from tests.support.cases import each

ROUNDS = 2


class Clock:
    """Time that passes in a model's forward only, and as long as planted for the kind of step that runs."""

    def __init__(self, planted: dict[str, float]) -> None:
        self.planted, self.now = planted, 1.0
        self.kinds: list[str] = []
        self.slow = 1.0  # of the machine; every kind of step is slower later on

    def perf_counter(self) -> float:
        return self.now


def measured(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> CostReport:
    """The report of a small training, with planted times."""
    monkeypatch.setattr(cost, "time", clock)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    reports: list[CostReport] = []
    with pl.watch(model, optimizer, run=folder, every=NEVER, quiet=True):
        steps = next(s for s in torch_hooks.listeners() if isinstance(s, Steps) and s.session.model() is model)
        probe = CostProbe(steps, optimizer, ROUNDS, reports.append)
        while not probe.finished:
            clock.kinds.append(probe._kind)
            assert len(clock.kinds) < 1000
            clock.now += clock.slow * clock.planted.get(probe._kind, 10.0)
            clock.slow *= 1.001
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
    return reports[0]


def test_times_become_extra_times_and_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {FLOOR: 12.0, "weights": 11.0, "updates": 10.5, EVERYTHING: 14.0}
    clock = Clock(planted)
    report = measured(tmp_path / "run", clock, monkeypatch)
    costs = {found.name: found for found in report.costs}
    assert list(costs) == [FLOOR, *NAMES, EVERYTHING]
    drift = 1.001 ** len(clock.kinds)  # the machine's over the whole training
    for name, found in costs.items():
        extra = planted.get(name, 10.0) - 10.0
        # Steps of one round lie a round apart at most: that much of the drift is in their difference.
        assert found.extra == pytest.approx(extra / 10.0, abs=0.03)
        assert found.extra_seconds == pytest.approx(extra, abs=0.3 * drift)
    assert 10.0 <= report.step_seconds <= 10.0 * drift
    assert costs[EVERYTHING].of_floor == costs[EVERYTHING].extra_seconds / costs[FLOOR].extra_seconds
    assert report.every["0.01"] == interval(costs[EVERYTHING].extra, 0.01)
    assert (report.model, report.parameters, report.rounds) == ("Sequential", 90, ROUNDS)
    assert json.loads(json.dumps(asdict(report)))["every"].keys() == {"0.01", "0.02", "0.05"}


def test_each_kind_of_step_samples_its_collection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock({})
    measured(tmp_path / "run", clock, monkeypatch)
    run = pl.Run(tmp_path / "run")
    for name in NAMES:
        expected = [step for step, kind in enumerate(clock.kinds) if kind in (name, EVERYTHING)]
        assert run.tensors[name]
        for tensor in run.tensors[name]:
            # Step 0 is due by every schedule, and is not timed.
            assert list(run.series(name, tensor, "norm")[0]) == [0, *expected]
    counted = Counter(clock.kinds)
    assert {counted[kind] for kind in (FLOOR, *NAMES, EVERYTHING)} == {2 * (ROUNDS + 1)}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the tensors that `torch.aminmax` reads, as the floor does."""
    sizes: list[int] = []
    original = torch.aminmax

    def aminmax(x: torch.Tensor) -> object:
        sizes.append(x.numel())
        return original(x)

    monkeypatch.setattr(torch, "aminmax", aminmax)
    return sizes


def test_the_floor_reads_the_values_that_a_sample_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    clock = Clock({})
    measured(tmp_path / "run", clock, monkeypatch)
    run = pl.Run(tmp_path / "run")
    step = clock.kinds.index(EVERYTHING)
    sampled: set[tuple[str, str, float, int]] = set()
    for name in NAMES:
        for tensor in run.tensors[name] if name != "updates" else ():
            spectrum = run.spectrum(name, tensor, step)
            # A module's output is the next one's input: one tensor, and one norm.
            sampled.add((name, "" if name in OF_MODULES else tensor, spectrum.norm, spectrum.count))
    assert sum(read) == clock.kinds.count(FLOOR) * sum(count for *_, count in sampled)


def test_the_example_leaves_the_random_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    report = measure_example(rounds=1, layers=1, width=16)
    assert torch.equal(torch.get_rng_state(), before)
    assert [found.name for found in report.costs] == [FLOOR, *NAMES, EVERYTHING]


@each(
    ("extra", "budget", "expected"),
    [(0.2, 0.01, 20), (0.201, 0.01, 21), (0.2, 0.05, 4), (0.004, 0.01, 1), (-0.1, 0.01, 1), (0.0, 0.02, 1)],
)
def test_the_interval_keeps_to_the_budget(extra: float, budget: float, expected: int) -> None:
    assert interval(extra, budget) == expected


def test_the_floor_measures_no_gradient_of_what_nothing_uses(tmp_path: Path) -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.chunk(2)

    model = nn.Sequential(nn.Linear(8, 8), Halves())
    optimizer = torch.optim.SGD(model.parameters())
    with pl.watch(model, optimizer, run=tmp_path / "run", every=NEVER, quiet=True):
        steps = next(s for s in torch_hooks.listeners() if isinstance(s, Steps) and s.session.model() is model)
        floor = cost._Floor(steps)
        floor.attach()
        model(torch.randn(4, 8))[0].sum().backward()
        floor.remove()
    assert model[0].weight.grad is not None
