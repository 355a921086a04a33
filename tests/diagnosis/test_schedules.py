"""Schedules that lower the rate while it is needed, and weight decay that is added to gradients."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.kernels import device_value
from plimsoll.report.verdicts.verdict_sentence import phrase_of
from plimsoll.runs import Run
from plimsoll.watch.steps.wiring import schedules
from tests.support.cases import each
from tests.support.diagnosis.faults import wired
from tests.support.diagnosis.stories import LAYERS, constant, make_story
from tests.support.diagnosis.trainings import adamw, seeded_mlp

DATA = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(DATA), DATA[:, :4].argmax(dim=1))


def one_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def momentum(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def of_schedules(path: Path) -> list[Finding]:
    assert "failure" not in {event.kind for event in Run(path).events()}  # of the watch itself
    return diagnose(path, rules=["schedule-misread"])


def phrase(path: Path, finding: Finding) -> str:
    return phrase_of(finding, View(Run(path)), [finding]).what


# -- a plateau of a metric that improves


def with_plateau(
    path: Path, metrics: list[Any], mode: str = "min", *, rate: float = 0.1, resumes: bool = False, **more: Any
) -> list[Finding]:
    """What is said of a schedule that is given these metrics, one a step."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = ReduceLROnPlateau(optimizer, mode, **{"patience": 2, **more})  # type: ignore[arg-type]
    if resumes:
        scheduler.step(metrics[0])
    with pl.watch(model, optimizer, run=path, every=5, quiet=True):
        for metric in metrics[resumes:]:
            one_step(model, optimizer)
            scheduler.step(metric)
    return of_schedules(path)


RISES = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
FALLS = [2.0, 1.8, 1.6, 1.4, 1.2, 1.0]
MISREAD: dict[str, tuple[list[Any], dict[str, Any], int]] = {  # metrics, arguments, and the step of the finding
    "an accuracy": (RISES, {}, 3),
    "a loss that is to rise": (FALLS, {"mode": "max"}, 3),
    "as tensors": ([torch.tensor(x) for x in RISES], {}, 3),
    "a logarithm of a likelihood": ([-x for x in FALLS], {}, 3),
    "from zero on": ([0.0, *RISES], {}, 3),
    "a little at first": ([0.3, 0.31, 0.31, 0.31, 0.6, 0.6, 0.6], {}, 6),
    "with more patience": ([0.3, *[0.31] * 5, *[0.7] * 20], {"patience": 10}, 11),
    "without patience": (RISES, {"patience": 0}, 3),
    "by more than counts": ([10 * x for x in RISES], {"threshold": 1.5, "threshold_mode": "abs"}, 3),
}  # fmt: skip


@each("name", list(MISREAD))
def test_a_schedule_that_waits_for_the_wrong_direction_is_named(name: str, tmp_path: Path) -> None:
    metrics, arguments, step = MISREAD[name]
    (found,) = with_plateau(tmp_path / name, metrics, **arguments)
    assert (found.severity, found.since_step, found.evidence["optimizer"]) == ("warning", step, "SGD")
    waits, advice = ("rise", "mode='min'") if arguments.get("mode") == "max" else ("fall", "mode='max'")
    assert f"waits for the metric to {waits}, and it has" in phrase(tmp_path / name, found) and advice in found.advice
    assert found.evidence["first"] == pytest.approx(float(metrics[0]))


def test_the_words_have_the_metrics(tmp_path: Path) -> None:
    (found,) = with_plateau(tmp_path / "run", RISES)
    assert "(0.3 to 0.5)" in phrase(tmp_path / "run", found)  # the mean of the last three at that step


READ_RIGHT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "an accuracy that is to rise": (RISES + [0.8] * 6, {"mode": "max"}),
    "a loss that is to fall": (FALLS + [1.0] * 6, {}),
    "a loss that improved once": ([1.0, 0.9, *[1.5] * 8], {}),
    "by less than counts": ([1.0, 0.99999, *[1.5] * 8], {}),
    "a loss that improves again": ([1.0, 1.05, 1.05, 1.05, *[1.5] * 3, 0.9, *[1.5] * 3], {"patience": 9}),
    "it stays": ([1.0, 1.001, 1.0, 1.002] * 3, {}),
    "nine percent": ([1.0] + [1.09] * 9, {}),
    "one of noise": ([1.0, 1.0, 1.0, 1.25, 1.0], {}),
    "never lowered": (RISES, {"patience": 9}),
    "at its lowest rate already": (RISES, {"min_lr": 0.1}),
    "three calls": (RISES[:3], {"patience": 0}),
    "fewer than the last few": ([0.3, 0.4, 0.5], {"patience": 0}),
    "a NaN among them": ([0.3, math.nan, *RISES, *RISES], {}),
    "an Inf at first": ([math.inf, 0.5, *[0.4] * 9], {}),
    "a change that does not count": (RISES, {"threshold": 1.0, "threshold_mode": "abs"}),
    "a share that does not count": ([10 * x for x in RISES], {"threshold": 0.9}),
    "the last few alone": ([*[1.0] * 5, *[1.15] * 3], {"patience": 6}),
    "gone on from a checkpoint": ([0.2, *RISES], {"resumes": True}),
    "gone on, and best at once": ([0.5, *RISES], {"resumes": True}),
}  # fmt: skip


@each("name", list(READ_RIGHT))
def test_a_schedule_that_reads_its_metric_right_is_not(name: str, tmp_path: Path) -> None:
    metrics, arguments = READ_RIGHT[name]
    assert with_plateau(tmp_path / name, metrics, **arguments) == []


def test_a_training_that_diverges_is_no_schedules_fault(tmp_path: Path) -> None:
    event = wired("plateau misread", 60, mode="min", first=0.31, now=0.82, metrics=6)
    for name, loss, found in (
        ("risen", lambda s: 2.0 + s / 50, 0),
        ("risen after it", lambda s: 2.0 if s <= 60 else 9.0, 1),
        ("fallen", lambda s: 2.0 - s / 500, 1),
    ):
        assert len(of_schedules(make_story(events=(event,), loss=loss).write(tmp_path / name))) == found, name


def test_a_schedule_of_another_model_is_not_meant(tmp_path: Path) -> None:
    model, other = seeded_mlp(), seeded_mlp()
    optimizer, theirs = adamw(model), torch.optim.SGD(other.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(theirs, patience=2)
    with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for metric in RISES:
            one_step(model, optimizer)
            scheduler.step(metric)
    assert of_schedules(tmp_path / "run") == []


def test_a_watched_schedule_does_what_it_did(tmp_path: Path) -> None:
    def rates(watched: bool) -> list[float]:
        model = seeded_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=1)
        w = pl.watch(model, optimizer, run=tmp_path / "run", quiet=True) if watched else None
        seen = []
        for metric in [1.0, 2.0, 3.0, 0.5, 0.6, 0.7]:
            one_step(model, optimizer)
            scheduler.step(metrics=metric)
            seen.append(scheduler.get_last_lr()[0])
        with pytest.raises((TypeError, ValueError)):
            scheduler.step("none")  # type: ignore[arg-type]
        if w is not None:
            w.close()
        return [*seen, float(scheduler.last_epoch)]

    assert rates(watched=True) == rates(watched=False)


def test_a_metric_on_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coming(device_value.DeviceValue):
        def ready(self) -> bool:
            return here

        def value(self) -> float:
            read.append(super().value())
            return read[-1]

    here, read = False, list[float]()
    monkeypatch.setattr(schedules, "number", lambda metric: Coming(torch.tensor(metric)))
    course = schedules.MetricCourse("min", 3)
    for metric in RISES[:4]:
        course.take(metric)
    assert read == []
    kept = course.snapshot()
    assert kept.moved_away(1e-4, relative=True) == pytest.approx(0.5)
    here = True
    course.take(0.1)  # what came meanwhile is read now
    assert len(read) == 9 and course.snapshot().moved_away(1e-4, relative=True) != kept.first
    assert math.isnan(course.moved_away(1e-4, relative=True)) and kept.count == 4


UNDEFINED: dict[str, tuple[list[Any], dict[str, Any], int, int]] = {  # metrics, arguments, step, metrics of NaN or Inf
    "an overflow": ([math.inf] * 5, {}, 2, 3),
    "from some call on": ([2.0, 1.5, *[math.nan] * 4], {}, 4, 3),
    "of the other mode": ([0.5, *[-math.inf] * 4], {"mode": "max"}, 3, 3),
    "as tensors": ([torch.tensor(1.0), *[torch.tensor(math.nan)] * 4], {}, 3, 3),
    "without patience": ([2.0, math.nan, 1.5], {"patience": 0}, 1, 1),
}  # fmt: skip


@each("name", list(UNDEFINED))
def test_a_schedule_whose_metrics_are_no_numbers_is_named(name: str, tmp_path: Path) -> None:
    metrics, arguments, step, count = UNDEFINED[name]
    (found,) = with_plateau(tmp_path / name, metrics, **arguments)
    assert (found.severity, found.since_step, found.evidence["metrics"]) == ("warning", step, count)
    assert "has lowered the rate" in phrase(tmp_path / name, found) and "NaN or Inf" in found.meaning


@each(
    "metrics",
    [
        [2.0, math.nan, math.nan, 1.9, 1.8, 1.7],  # one that comes in time
        [2.0, math.nan, 2.0, 2.0, 2.0, 2.0],  # one of the four without improvement
        [1.0, math.inf, math.inf, 1.2, 1.0, 1.0],
    ],
)
def test_a_schedule_with_a_few_such_metrics_is_not(metrics: list[float], tmp_path: Path) -> None:
    assert with_plateau(Path(tempfile.mkdtemp(dir=tmp_path)), metrics) == []


def test_metrics_of_a_loss_that_is_nan_are_no_schedules_fault(tmp_path: Path) -> None:
    event = wired("plateau undefined", 60, metrics=3)
    for name, loss, found in (("broken", lambda s: math.nan if s > 58 else 1.0, 0), ("sound", lambda s: 1.0, 1)):
        assert len(of_schedules(make_story(events=(event,), loss=loss).write(tmp_path / name))) == found, name


# -- a schedule that begins again


def again(
    path: Path, schedule: Callable[[Any], Any], made_at: tuple[int, ...], *, steps: int = 40, every: int = 1,
    make: Callable[..., Any] = torch.optim.Adam, then: Callable[[Any, Any, Any], Any] = lambda o, old, new: None,
    watched_from_the_start: bool = False,
) -> list[Finding]:  # fmt: skip
    """What is said of a schedule that is made again at these steps."""
    model = seeded_mlp()
    optimizer = make(model.parameters(), lr=1e-2)
    base = optimizer.param_groups[0]["lr"]
    scheduler = None if watched_from_the_start else schedule(optimizer)
    with pl.watch(model, optimizer, run=path, every=5, quiet=True):
        scheduler = scheduler or schedule(optimizer)
        for step in range(steps):
            if step in made_at:
                optimizer.param_groups[0]["lr"] = base
                old, scheduler = scheduler, schedule(optimizer)
                then(optimizer, old, scheduler)
            one_step(model, optimizer)
            if step % every == every - 1:
                scheduler.step()
    return [f for f in of_schedules(path) if f.evidence.get("cause") == "begins again"]


def cosine(length: int) -> Callable[[Any], Any]:
    return lambda o: CosineAnnealingLR(o, length)


def warm_up(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 200))


AGAIN: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], dict[str, Any], int]] = {
    "a cosine at a resume": (cosine(40), (30,), {}, 30),
    "seen from its making on": (cosine(40), (30,), {"watched_from_the_start": True}, 30),
    "once an epoch": (cosine(20), (20,), {"every": 2}, 20),
    "a line": (lambda o: LinearLR(o, 1.0, 0.1, 30), (12,), {}, 12),
    "of one cycle": (lambda o: OneCycleLR(o, 1e-2, 60), (20,), {}, 20),
    "a warm-up in each epoch": (warm_up, (10, 20, 30), {}, 20),
    "of SGD with momentum": (cosine(40), (30,), {"make": momentum}, 30),
}


@each("name", list(AGAIN))
def test_a_schedule_that_begins_again_before_its_end_is_named(name: str, tmp_path: Path) -> None:
    schedule, made_at, arguments, since = AGAIN[name]
    (found,) = again(tmp_path / name, schedule, made_at, **arguments)
    assert (found.severity, found.since_step) == ("warning", since)
    assert "was made again and starts over" in phrase(tmp_path / name, found)
    assert "load_state_dict" in found.advice


def loads(optimizer: Any, old: Any, new: Any) -> None:
    rate = optimizer.param_groups[0]["lr"]
    new.load_state_dict(old.state_dict())
    optimizer.param_groups[0]["lr"] = old.get_last_lr()[0] if new.last_epoch else rate


def starts_over(optimizer: Any, old: Any, new: Any) -> None:
    optimizer.state.clear()


NOT_AGAIN: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], dict[str, Any]]] = {
    "its state is loaded": (cosine(40), (30,), {"then": loads}),
    "it has come to its end": (cosine(20), (20,), {}),
    "cycles by hand": (cosine(10), (10, 20, 30), {}),
    "with restarts of its own": (lambda o: CosineAnnealingWarmRestarts(o, 10), (), {}),
    "a warm-up once more": (warm_up, (20,), {}),
    "that has come to its top": (lambda o: LambdaLR(o, lambda n: min(1.0, n / 8, (20 - n) / 20)), (12, 24), {}),
    "in steps": (lambda o: MultiStepLR(o, [5, 10, 15]), (12,), {}),
    "constant": (lambda o: LambdaLR(o, lambda n: 1.0), (10, 20, 30), {}),
    "the optimizer begins again too": (cosine(40), (30,), {"then": starts_over}),
    "cut in its first steps": (cosine(40), (4,), {}),
}


@each("name", list(NOT_AGAIN))
def test_a_schedule_that_goes_on_or_has_ended_is_not(name: str, tmp_path: Path) -> None:
    schedule, made_at, arguments = NOT_AGAIN[name]
    assert again(tmp_path / name, schedule, made_at, **arguments) == []


def test_two_phases_are_no_schedule_that_begins_again(tmp_path: Path) -> None:
    made = iter([cosine(40), cosine(30), lambda o: LinearLR(o, 0.1, 1.0, 20)])

    def phase(optimizer: Any) -> Any:
        return next(made)(optimizer)

    assert again(tmp_path / "run", phase, (15, 30), steps=50) == []


def test_a_part_of_a_sequence_is_not_made_again(tmp_path: Path) -> None:
    def sequence(optimizer: Any) -> Any:
        return SequentialLR(optimizer, [cosine(30)(optimizer), cosine(30)(optimizer)], [10])

    assert again(tmp_path / "run", sequence, (), watched_from_the_start=True) == []


def test_rates_that_begin_again_are_not_called_the_square_of_the_rate(tmp_path: Path) -> None:
    """A warm-up that is cut off at a hundredth has the square of a rate of 0.01 as its highest."""
    model = seeded_mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for _ in range(4):
            scheduler = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 2000))
            for _ in range(20):
                one_step(model, optimizer)
                scheduler.step()
    (found,) = of_schedules(tmp_path / "run")
    assert found.evidence["cause"] == "begins again" and found.since_step == 40


# -- a rate that is multiplied by itself


def with_rates(
    path: Path, schedule: Callable[[Any], Any], *, rate: float = 3e-3, steps: int = 40, every: int = 1, before: int = 0,
    make: Callable[..., Any] = torch.optim.Adam,
) -> list[Finding]:  # fmt: skip
    """What is said of a schedule; the watch begins after some steps."""
    model = seeded_mlp()
    optimizer = make(model.parameters(), lr=rate)
    scheduler = schedule(optimizer)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            one_step(model, optimizer)
            if step % every == every - 1:
                scheduler.step()

    train(0, before)
    with pl.watch(model, optimizer, run=path, every=5, quiet=True):
        train(before, before + steps)
    return of_schedules(path)


SQUARED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "a line": (lambda o: LambdaLR(o, lambda n: 3e-3 * (1 - n / 50)), {}),
    "after a warm-up": (lambda o: LambdaLR(o, lambda n: 3e-3 * min(n / 5, 1.0) * 0.9 ** max(n - 5, 0)), {}),
    "in steps": (lambda o: LambdaLR(o, lambda n: 3e-3 * 0.5 ** (n // 10)), {}),
    "once an epoch": (lambda o: LambdaLR(o, lambda n: 3e-3 * 0.5**n), {"every": 25}),
    "of plain SGD": (lambda o: LambdaLR(o, lambda n: 0.05 * 0.9**n), {"rate": 0.05, "make": torch.optim.SGD}),
}  # fmt: skip


@each("name", list(SQUARED))
def test_a_schedule_that_returns_the_rate_is_named(name: str, tmp_path: Path) -> None:
    schedule, arguments = SQUARED[name]
    (found,) = with_rates(tmp_path / name, schedule, **arguments)
    assert (found.severity, found.since_step) == ("warning", 0)
    assert found.evidence["highest"] == pytest.approx(float(found.evidence["base"]) ** 2)
    assert "has multiplied the rate of" in phrase(tmp_path / name, found) and "return a factor" in found.advice


def test_a_second_group_is_judged_too(tmp_path: Path) -> None:
    model = seeded_mlp()
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2:].parameters(), "lr": 2e-3}]
    optimizer = torch.optim.Adam(groups)
    scheduler = LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 2e-3 * 0.9**n])
    with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for _ in range(24):
            one_step(model, optimizer)
            scheduler.step()
    (found,) = of_schedules(tmp_path / "run")
    assert found.evidence["base"] == 2e-3


NOT_SQUARED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "a factor": (lambda o: LambdaLR(o, lambda n: 1 - n / 50), {}),
    "a base of 1": (lambda o: LambdaLR(o, lambda n: 1e-3 * 0.9**n), {"rate": 1.0}),
    "a base of 0.1": (lambda o: LambdaLR(o, lambda n: 0.1 * 0.9**n), {"rate": 0.1}),
    "nearly the square": (lambda o: LambdaLR(o, lambda n: 3.001e-3 * 0.9**n), {}),
    "too few steps": (lambda o: LambdaLR(o, lambda n: 3e-3 * 0.9**n), {"steps": 19}),
    "an epoch of warm-up at the square": (lambda o: LinearLR(o, 3e-3, 1.0, 1), {"every": 25}),
    "a warm-up and a decay": (
        lambda o: SequentialLR(o, [LinearLR(o, 3e-3, 1.0, 1), LambdaLR(o, lambda n: 0.5**n)], [1]), {"every": 13},
    ),
    "tenths of it": (lambda o: MultiStepLR(o, [10, 20, 30]), {"rate": 1e-2}),
    "tenths of it, seen from later on": (lambda o: MultiStepLR(o, [10, 20, 50]), {"rate": 1e-2, "before": 21}),
    "and with momentum": (lambda o: MultiStepLR(o, [10, 20, 50]), {"rate": 1e-2, "before": 21, "make": momentum}),
    "no schedule": (lambda o: LambdaLR(o, lambda n: 1.0), {}),
}  # fmt: skip


@each("name", list(NOT_SQUARED))
def test_a_schedule_that_returns_a_factor_is_not(name: str, tmp_path: Path) -> None:
    schedule, arguments = NOT_SQUARED[name]
    assert with_rates(tmp_path / name, schedule, **arguments) == []


def test_a_run_that_goes_on_is_not_judged_by_its_highest_rate(tmp_path: Path) -> None:
    """Plain SGD has no state that shows that it has stepped before; the first step of the run does."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = MultiStepLR(optimizer, [10, 20, 50])
    for part in range(2):
        with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True, start_step=21 * part or None):
            for _ in range(21 + 20 * part):
                one_step(model, optimizer)
                scheduler.step()
    assert of_schedules(tmp_path / "run") == []


# -- decay that is added to gradients


def with_decay(path: Path, make: Callable[[nn.Module], Any], *, steps: int = 100, scaler: Any = None) -> list[Finding]:
    """What is said of the decay in a training on batches of random rows."""
    model = seeded_mlp()
    optimizer = make(model)
    with pl.watch(model, optimizer, run=path, every=5, quiet=True):
        for _ in range(steps):
            x = torch.randn(256, 8)
            loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
    assert "failure" not in {event.kind for event in Run(path).events()}
    return diagnose(path, rules=["decay-dominates"])


def made(kind: Any, decay: float, rate: float = 5e-3, **more: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), lr=rate, weight_decay=decay, **more)


def of_matrices(decay: float, of_others: float) -> Callable[[nn.Module], Any]:
    """Adam with one decay of matrices and another one of biases."""

    def make(model: nn.Module) -> Any:
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() > 1) == matrices], "weight_decay": of_these}
            for matrices, of_these in ((True, decay), (False, of_others))
        ]
        return torch.optim.Adam(groups, lr=5e-3)

    return make


def warmed(decay: float, rate: float) -> Callable[[nn.Module], Any]:
    """SGD whose rate begins at next to nothing."""

    def make(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


optim = torch.optim
DOMINATES: dict[str, tuple[Callable[[nn.Module], Any], Any]] = {
    "Adam": (made(optim.Adam, 0.1), None),
    "NAdam": (made(optim.NAdam, 0.1), None),
    "RAdam": (made(optim.RAdam, 0.1, rate=2e-2), None),
    "RMSprop": (made(optim.RMSprop, 0.1), None),
    "of matrices alone": (of_matrices(0.1, 0.0), None),
    "SGD": (made(optim.SGD, 0.1, 0.1, momentum=0.9), None),
    "SGD with a warm-up": (warmed(0.1, 0.1), None),
    "with a loss scale": (made(optim.Adam, 0.1), lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10)),
}


@each("name", list(DOMINATES))
def test_a_decay_that_rivals_the_gradients_is_named(name: str, tmp_path: Path) -> None:
    make, scaler = DOMINATES[name]
    (found,) = with_decay(tmp_path / name, make, scaler=None if scaler is None else scaler())
    assert found.severity == "warning" and found.evidence["decay"] == 0.1
    assert set(found.where) <= {"0.weight", "2.weight", "4.weight"} and len(found.where) >= 2
    assert found.evidence["size"] <= 0.75 and "AdamW" in found.advice


SPARED = {
    "AdamW": made(optim.AdamW, 0.1),
    "much in AdamW": made(optim.AdamW, 20.0),
    "NAdam that takes it from the weights": made(optim.NAdam, 20.0, decoupled_weight_decay=True),
    "little": made(optim.Adam, 1e-4),
    "less than what is usual in AdamW": made(optim.Adam, 9e-3),
    "none": made(optim.Adam, 0.0),
    "SGD": made(optim.SGD, 5e-4, momentum=0.9),
    "usual in AdamW, in SGD": made(optim.SGD, 0.1, 1e-2),  # a thousand steps are left
    "of biases alone": of_matrices(0.0, 0.1),
}  # fmt: skip


@each("name", list(SPARED))
def test_a_decay_elsewhere_or_a_small_one_is_not(name: str, tmp_path: Path) -> None:
    assert with_decay(tmp_path / name, SPARED[name]) == []


def test_a_small_decay_of_a_model_that_has_converged_is_not(tmp_path: Path) -> None:
    def make(model: nn.Module) -> Any:
        return optim.Adam(model.parameters(), lr=2e-2, weight_decay=1e-4)

    model = seeded_mlp()
    optimizer = make(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, quiet=True):
        for _ in range(300):  # of the same rows: gradients become as small as the decay
            one_step(model, optimizer)
    view = View(Run(tmp_path / "run"))
    weights, gradients = view.cells("weights"), view.cells("gradients")
    place = weights.names.index("2.weight"), gradients.names.index("2.weight")
    assert 1e-4 * weights.norm[place[0], -1] > 0.5 * gradients.norm[place[1], -1]
    assert diagnose(tmp_path / "run", rules=["decay-dominates"]) == []


def shrinking(path: Path, **changes: Any) -> list[Finding]:
    """What is said of a story in which the decay of all layers is as large as their gradients."""
    decayed = changes.pop("decayed", LAYERS)
    groups = [{"decay": changes.pop("decay", 0.1), "parameters": [f"{layer}.weight" for layer in decayed]}]
    story = make_story(**{
        "events": (wired("decay added", 0, groups=groups),),
        "weight_std": lambda name, s: 2.0**-5 * (0.5 + 0.5 / (1 + s / 20)),
        "gradient_std": constant(2.0**-9),
        **changes,
    })  # fmt: skip
    return diagnose(story.write(path), rules=["decay-dominates"])


def of_layers(count: int, some: float, others: float) -> Callable[[str, int], float]:
    return lambda name, step: some if name in LAYERS[:count] else others


@each(
    ("case", "severity"),
    [
        ({}, "warning"),
        ({"gradient_std": constant(2.0**-7)}, ""),  # four times the decay
        ({"weight_std": constant(2.0**-5)}, ""),  # that have not shrunk
        ({"gradient_std": of_layers(6, 2.0**-9, 2.0**-4)}, "warning"),  # half of them
        ({"gradient_std": of_layers(5, 2.0**-9, 2.0**-4)}, ""),
        ({"gradient_std": lambda name, s: 2.0**-9 if 60 <= s < 85 else 2.0**-4}, "info"),  # at five samples
        ({"gradient_std": lambda name, s: 2.0**-9 if 60 <= s < 80 else 2.0**-4}, ""),
        ({"gradient_std": lambda name, s: 2.0**-9 if s >= 140 else 2.0**-4}, "warning"),
        ({"decay": 0.0099, "gradient_std": constant(2.0**-14)}, ""),
        ({"decay": 0.01, "gradient_std": constant(2.0**-14)}, "warning"),
    ],
)
def test_a_decay_is_judged_by_its_size_and_what_came_of_it(case: dict[str, Any], severity: str, tmp_path: Path) -> None:
    found = shrinking(Path(tempfile.mkdtemp(dir=tmp_path)), **case)
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_what_was_not_recorded_is_not_judged(tmp_path: Path) -> None:
    model = seeded_mlp()
    optimizer = made(optim.Adam, 0.1)(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", collect="gradients", quiet=True):
        for _ in range(12):
            one_step(model, optimizer)
    assert diagnose(tmp_path / "run", rules=["decay-dominates"]) == []
