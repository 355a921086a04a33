"""Trainings that are wired wrongly, and right ones that look like them, watched for real."""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.precision import KahanWeights, MasterWeights
from plimsoll.report.verdicts.verdict_sentence import phrase_of, verdict
from plimsoll.runs import Run
from plimsoll.scaling import StaticScaler
from tests.support.cases import each
from tests.support.diagnosis.trainings import adamw, seeded_mlp

RULES = ["untrained-parameters", "optimizer-idle", "gradients-mishandled", "decay-lost", "updates-swallowed"]


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)


def nothing(*_: object) -> None:
    """Between the backward and the step."""


def train(
    path: Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: Callable[[nn.Module], Any] = adamw,
    *,
    steps: int = 24,
    every: int = 2,
    scaler: Callable[[], torch.amp.GradScaler] | None = None,
    zero: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer.zero_grad(),
    between: Callable[[nn.Module, torch.optim.Optimizer, Any], object] = nothing,
    step: Callable[[torch.optim.Optimizer, Any], object] | None = None,
    accumulate: int = 1,
    schedule: Callable[[int], float] | None = None,
) -> list[Finding]:
    """A watched training, and the findings on how it is wired."""
    model = seeded_mlp() if model is None else model if isinstance(model, nn.Module) else model()
    made, scaling = optimizer(model), None if scaler is None else scaler()
    with pl.watch(model, made, run=path, every=every):
        for i in range(steps):
            if schedule is not None:
                made.param_groups[0]["lr"] = schedule(i)
            zero(made)
            for _ in range(accumulate):
                x = torch.randn(16, 8, dtype=next(model.parameters()).dtype)
                loss = nn.functional.cross_entropy(model(x).float(), x[:, :4].argmax(dim=1)) / accumulate
                (loss if scaling is None else scaling.scale(loss)).backward()
            between(model, made, scaling)
            if step is not None:
                step(made, scaling)
            elif scaling is not None:
                scaling.step(made)
                scaling.update()
            else:
                made.step()
    return diagnose(path, rules=RULES)


def zero_by_data(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.data.zero_()


def at_every_other(act: Callable[[Any], object]) -> Callable[[Any], object]:
    """The same at the first of two calls."""
    calls = itertools.count()
    return lambda argument: act(argument) if next(calls) % 2 == 0 else None


def divide(model: nn.Module, _: object, scaler: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad / scaler.get_scale()


def unscale_and_clip(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.1)


def unscale_at_once(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """After the first of two micro-batches; the second one follows."""
    scaler.unscale_(optimizer)
    x = torch.randn(16, 8)
    scaler.scale(nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)) / 2).backward()


def step_by_hand(optimizer: Any, scaler: Any) -> None:
    """A step that the script takes, or skips, by what it sees of the unscaled gradients."""
    scaler.unscale_(optimizer)
    if all(bool(p.grad.isfinite().all()) for group in optimizer.param_groups for p in group["params"]):
        optimizer.step()
    scaler.update()


class Doubled(torch.amp.GradScaler):
    """A scaler that gets each loss twice; the first time, a division comes in between."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(super().scale(outputs) / 2)


def unscale_and_try_again(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """The gradients of the step are dropped, in place, and those of two micro-batches take their place."""
    scaler.unscale_(optimizer)
    optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        x = torch.randn(16, 8)
        scaler.scale(nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))).backward()
    for p in model.parameters():
        p.grad.div_(scaler.get_scale())


def unscale_and_score_another(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """The backward of another model's loss, with the same scaler, after this one's gradients are unscaled."""
    scaler.unscale_(optimizer)
    other = nn.Linear(8, 4)
    scaler.scale(other(torch.randn(16, 8)).square().mean()).backward()


# -- what is right says nothing

RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "zeroed in place": {"zero": lambda o: o.zero_grad(set_to_none=False)},
    "zeroed by data": {"zero": zero_by_data},
    "zeroed after the step": {
        "zero": nothing, "step": lambda o, s: (o.step(), o.zero_grad(set_to_none=False)),
    },
    "accumulated": {"accumulate": 3},
    "accumulated in place": {"accumulate": 3, "zero": lambda o: o.zero_grad(set_to_none=False)},
    "scaled": {"scaler": scaler},
    "scaled at 1": {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=1.0), "step": lambda o, s: o.step()},
    "scaler that is off": {"scaler": lambda: torch.amp.GradScaler("cpu", enabled=False), "step": lambda o, s: o.step()},
    "divided by hand": {"scaler": scaler, "between": divide, "step": lambda o, s: o.step()},
    "clipped": {"between": lambda m, o, s: clip_grad_norm_(m.parameters(), 0.1)},
    "unscaled, and stepped or skipped by hand": {
        "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100), "step": step_by_hand,
    },
    "unscaled and clipped": {"scaler": scaler, "between": unscale_and_clip},
    "unscaled and clipped, accumulated": {"scaler": scaler, "between": unscale_and_clip, "accumulate": 3},
    "unscaled before another model's backward": {"scaler": scaler, "between": unscale_and_score_another},
    "unscaled, dropped and computed again": {"scaler": scaler, "between": unscale_and_try_again},
    "unscaled too early at a scale of 1": {
        "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=1.0), "between": unscale_at_once,
    },
    "warm-up from 0": {"schedule": lambda i: 1e-4 * min(i, 10)},
    "decay to 0": {"schedule": lambda i: 1e-3 * max(1 - i / 20, 0)},
    "cosine to 0": {"steps": 60, "schedule": lambda i: 5e-4 * (1 + math.cos(math.pi * i / 60))},
    "masters": {"model": lambda: seeded_mlp().bfloat16(), "optimizer": lambda m: MasterWeights(adamw(m))},
    "masters, clipped": {
        "model": lambda: seeded_mlp().bfloat16(), "optimizer": lambda m: MasterWeights(adamw(m)),
        "between": lambda m, o, s: clip_grad_norm_(m.parameters(), 0.1),
    },
    "compensated": {"model": lambda: seeded_mlp().bfloat16(), "optimizer": lambda m: KahanWeights(adamw(m))},
    "SGD": {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_training_is_silent(name: str, tmp_path: Path) -> None:
    assert [str(f) for f in train(tmp_path / "run", **RIGHT[name])] == []


class TwoSteps(torch.optim.Optimizer):
    """Calls the step of an optimizer inside it from a method of its own, as SAM does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1e-2})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=1e-2)

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_an_optimizer_whose_parameters_another_inside_it_steps_is_not_idle(tmp_path: Path) -> None:
    assert train(tmp_path / "inside", optimizer=TwoSteps, step=lambda o, s: o.second_step()) == []

    def halves(model: nn.Module) -> Any:
        optimizer = TwoSteps(model)  # the first layer is in no other's groups
        optimizer.base_optimizer = torch.optim.SGD(model[2].parameters(), lr=1e-2)  # type: ignore[index]
        return optimizer

    idle = train(tmp_path / "half", optimizer=halves, step=lambda o, s: o.second_step())
    assert [f.evidence["optimizer"] for f in idle if f.rule == "optimizer-idle"] == ["TwoSteps"]


def test_an_optimizer_that_is_gone_when_the_watch_closes_has_stepped(tmp_path: Path) -> None:
    model = seeded_mlp()
    with pl.watch(model, run=tmp_path / "run", every=2):
        optimizer = adamw(model)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        del optimizer
    assert [e for e in Run(tmp_path / "run").events() if e.kind == "wiring"] == []


# -- what is wrong is named


def by_hand(path: Path, **arguments: Any) -> tuple[str, str, str]:
    found = [f for f in train(path, **arguments) if f.severity != "info"]
    assert len(found) == 1, [str(f) for f in found]
    return found[0].rule, found[0].severity, str(found[0].evidence.get("cause", ""))


def clip_by_an_infinite_norm(model: torch.nn.Module) -> None:
    """What clipping does if the norm is computed in FP16 and overflows there."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(1 / torch.tensor(70000.0).half())


WRONG: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "never zeroed": ({"zero": nothing}, ("gradients-mishandled", "warning", "never set to zero")),
    "never zeroed, clipped": (
        {"zero": nothing, "between": RIGHT["clipped"]["between"]},
        ("gradients-mishandled", "warning", "never set to zero"),
    ),
    "never zeroed, accumulated": (
        {"zero": nothing, "accumulate": 2}, ("gradients-mishandled", "warning", "never set to zero"),
    ),
    "zeroed every other step": (
        {"zero": at_every_other(lambda o: o.zero_grad())},
        ("gradients-mishandled", "warning", "set to zero at some steps only"),
    ),
    "scaled twice": (
        {"scaler": lambda: Doubled("cpu", init_scale=2.0**5, growth_interval=100)},
        ("gradients-mishandled", "alarm", "those of a loss that was scaled twice"),
    ),
    "never unscaled": (
        {"scaler": scaler, "step": lambda o, s: o.step()}, ("gradients-mishandled", "alarm", "never unscaled"),
    ),
    "unscaled among micro-batches": (
        {"scaler": scaler, "between": unscale_at_once},
        ("gradients-mishandled", "alarm", "unscaled before all of a step are added up"),
    ),
    "unscaled twice": (
        {"scaler": scaler, "between": divide}, ("gradients-mishandled", "warning", "divided by the loss scale twice"),
    ),
    "unscaled twice, accumulated": (
        {"scaler": scaler, "between": divide, "accumulate": 3},
        ("gradients-mishandled", "warning", "divided by the loss scale twice"),
    ),
    "clipped while scaled": (
        {"scaler": scaler, "between": lambda m, o, s: clip_grad_norm_(m.parameters(), 0.1)},
        ("gradients-mishandled", "warning", "clipped to 0.1 while scaled"),
    ),
    "values clipped while scaled": (
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**12),
         "between": lambda m, o, s: clip_grad_value_(m.parameters(), 0.5)},
        ("gradients-mishandled", "warning", "clipped to 0.5 while scaled"),
    ),
    "zeroed before the step": (
        {"between": lambda m, o, s: o.zero_grad()}, ("optimizer-idle", "alarm", "its parameters have no gradients"),
    ),
    "multiplied by 0 before the step": (
        {"between": lambda m, o, s: clip_by_an_infinite_norm(m)},
        ("gradients-mishandled", "alarm", "all zero when the optimizer steps, and not after the backward"),
    ),
    "zeroed in place before the step": (
        {"between": lambda m, o, s: o.zero_grad(set_to_none=False)},
        ("gradients-mishandled", "alarm", "all zero when the optimizer steps, and not after the backward"),
    ),
    "zeroed before the step of masters": (
        {"model": lambda: seeded_mlp().bfloat16(), "optimizer": lambda m: KahanWeights(adamw(m)),
         "between": lambda m, o, s: o.zero_grad()},
        ("optimizer-idle", "alarm", "its parameters have no gradients"),
    ),
    "never stepped": ({"step": nothing}, ("optimizer-idle", "alarm", "it has never stepped")),
    "parameters of a copy": (
        {"optimizer": lambda m: adamw(seeded_mlp())}, ("optimizer-idle", "alarm", "its parameters are not the model's"),
    ),
    "rate 0": (
        {"optimizer": lambda m: adamw(m, lr=0.0)}, ("optimizer-idle", "alarm", "its learning rate is 0"),
    ),
    "rate 0 too early": (
        {"schedule": lambda i: 1e-3 * (i < 3)}, ("optimizer-idle", "warning", "its learning rate is 0"),
    ),
    "rate that ran down": (
        {"steps": 60, "schedule": lambda i: 1e-3 * 0.5**i},
        ("optimizer-idle", "warning", "its learning rate has fallen to nearly 0"),
    ),
    "rate NaN": ({"schedule": lambda i: float("nan") if i == 20 else 1e-3},
                 ("optimizer-idle", "alarm", "its learning rate is NaN")),
    "rate Inf": ({"schedule": lambda i: float("inf") if i == 20 else 1e-3},
                 ("optimizer-idle", "alarm", "its learning rate is Inf")),
    "head alone": (
        {"optimizer": lambda m: adamw(m[4])}, ("untrained-parameters", "warning", "in no optimizer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:plimsoll. 4 parameters get gradients:RuntimeWarning")
def test_a_wrong_training_is_named(name: str, tmp_path: Path) -> None:
    arguments, wanted = WRONG[name]
    assert by_hand(tmp_path / "run", **arguments) == wanted


def sentences(path: Path, rules: tuple[str, ...] = ("optimizer-idle",)) -> list[str]:
    view = View(Run(path))
    found = diagnose(path, rules=rules)
    return [f"{(said := phrase_of(f, view, found)).what}; {said.remedy}" for f in found]


IDLE = {
    "zeroed before the step": (
        "AdamW steps, and its parameters have no gradients, since step 2; call zero_grad() before the backward"
    ),
    "never stepped": "AdamW never stepped; call optimizer.step() after each backward",
    "parameters of a copy": "the parameters of AdamW are not the model's; make it from model.parameters()",
    "rate 0": "the learning rate of AdamW is 0 since step 0; set a rate, or look at the schedule",
    "rate 0 too early": "the learning rate of AdamW is 0 since step 3; set a rate, or look at the schedule",
    "rate that ran down": "the learning rate of AdamW has fallen to nearly 0 since step 18; look at the schedule",
    "rate NaN": "the learning rate of AdamW was NaN at step 20; look at the schedule",
    "rate Inf": "the learning rate of AdamW was Inf at step 20; look at the schedule",
}


@each("name", IDLE)
def test_each_way_to_be_idle_has_a_sentence_and_a_remedy_of_its_own(name: str, tmp_path: Path) -> None:
    train(tmp_path / name, **WRONG[name][0])
    assert sentences(tmp_path / name) == [IDLE[name]]


def test_a_generator_whose_outputs_are_detached_is_not_told_to_call_zero_grad(tmp_path: Path) -> None:
    generator, critic = seeded_mlp(), nn.Linear(4, 1)
    optimizer = adamw(generator)
    with pl.watch(generator, optimizer, run=tmp_path, every=2):
        for _ in range(24):
            optimizer.zero_grad()
            critic(generator(torch.randn(16, 8)).detach()).mean().backward()
            optimizer.step()
    said = (
        "AdamW steps, and its parameters have no gradients, since step 2; look for a detach() or no_grad() between "
        "them and the loss"
    )
    assert sentences(tmp_path) == [said]
    (found,) = diagnose(tmp_path, rules=("optimizer-idle",))
    assert "zero_grad" not in found.advice and "the loss does not depend on it" in found.advice


def test_erased_gradients_have_a_whole_sentence_and_a_remedy_of_their_own(tmp_path: Path) -> None:
    train(tmp_path / "run", between=lambda m, o, s: clip_by_an_infinite_norm(m))
    said = (
        "gradients are all zero when the optimizer steps, and not after the backward, seen since step 0; compute the "
        "norm for clipping in FP32, and look for a misplaced zero_grad()"
    )
    assert sentences(tmp_path / "run", ("gradients-mishandled",)) == [said]


def test_a_rate_that_is_another_again_is_one_of_the_past(tmp_path: Path) -> None:
    train(tmp_path / "all", steps=60, schedule=lambda i: 1e-3 * (not 10 <= i < 40))
    assert sentences(tmp_path / "all") == [
        "the learning rate of AdamW was 0 from step 10 to step 39; set a rate, or look at the schedule"
    ]
    two = lambda m: torch.optim.AdamW([{"params": m[0].parameters(), "lr": 0.0}, {"params": m[2:].parameters()}])  # noqa: E731
    train(tmp_path / "some", optimizer=two)
    assert sentences(tmp_path / "some") == [
        "a learning rate of AdamW is 0 since step 0; set a rate, or look at the schedule"
    ]


def test_a_backward_without_an_optimizer_has_a_sentence(tmp_path: Path) -> None:
    model = seeded_mlp()
    with pl.watch(model, run=tmp_path / "run", every=2):
        for _ in range(8):
            model(torch.randn(16, 8)).square().mean().backward()
    assert sentences(tmp_path / "run") == [
        "no optimizer with the model's parameters stepped; call optimizer.step() after each backward"
    ]


def test_an_exponential_schedule_may_end_near_zero(tmp_path: Path) -> None:
    found = train(tmp_path / "run", steps=60, schedule=lambda i: 10.0 ** (-3 - 9 * i / 60))
    assert [str(f) for f in found if f.severity != "info"] == []


def test_weight_decay_that_bf16_rounds_away_is_named_and_kept_decay_is_not(tmp_path: Path) -> None:
    def found(name: str, model: nn.Module, **arguments: Any) -> list[str]:
        listed = train(tmp_path / name, model, lambda m: adamw(m, **arguments))
        return [f.rule for f in listed if f.rule == "decay-lost"]

    assert found("lost", seeded_mlp().bfloat16(), weight_decay=1.0) == ["decay-lost"]
    assert found("little", seeded_mlp().bfloat16(), weight_decay=0.01) == []  # 24 steps of it are nothing
    assert found("kept", seeded_mlp().bfloat16(), weight_decay=1.0, lr=1e-2) == []  # more than half a unit
    assert found("wide", seeded_mlp(), weight_decay=1.0) == []


# -- a loss scale that is too high, and what no scale can mend


def scaled(
    path: Path, scaler: Any, *, undefined: str = "", steps: int = 16, loss_dtype: torch.dtype = torch.float32
) -> list[Finding]:
    """A watched training under FP16 autocast; `undefined` adds an operation whose gradient is not finite."""
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pl.watch(model, optimizer, run=path, every=2):
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            with torch.autocast("cpu", dtype=torch.float16):
                y = model(x)
            loss = nn.functional.cross_entropy(y.to(loss_dtype), x[:, :4].argmax(dim=1))
            if undefined == "nan":  # 0 / 0
                loss = loss + (y.float() * 0).square().sum().sqrt()
            elif undefined == "inf":  # 1 / 0, at one place
                first = y.float()[0, 0]
                loss = loss + (first - first.detach()).sqrt()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return diagnose(path)


def fixed(scale: float, backoff: float = 0.9999) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=backoff, growth_interval=10**6)


TOO_HIGH = {
    "static": lambda: StaticScaler(2.0**24, device="cpu"),
    "hardly falls": lambda: fixed(2.0**24),
    "far too high": lambda: fixed(2.0**40),
}


@pytest.mark.parametrize("name", TOO_HIGH)
def test_a_loss_scale_that_is_fixed_too_high_is_to_be_lowered(name: str, tmp_path: Path) -> None:
    found = [f for f in scaled(tmp_path / "run", TOO_HIGH[name]()) if f.severity != "info"]
    assert [(f.rule, f.severity) for f in found] == [("nonfinite", "alarm")]
    assert found[0].evidence["cause"] == "the loss scale is too high" and found[0].actions == ("lower_scale",)
    assert found[0].advice.startswith("Lower the loss scale below 2^")
    view = View(Run(tmp_path / "run"))
    assert re.search(r"the loss scale \(.*\) is too high, .* lower the loss scale", verdict(view, found))


def test_a_scale_above_the_top_of_a_half_precision_loss_is_to_be_lowered(tmp_path: Path) -> None:
    scaler = StaticScaler(2.0**24, device="cpu")  # the gradient of the loss itself is Inf in FP16, and NaN what follows
    (found,) = (f for f in scaled(tmp_path / "run", scaler, loss_dtype=torch.float16) if f.severity != "info")
    assert found.rule == "nonfinite" and found.evidence["cause"] == "the loss scale is too high"


@pytest.mark.parametrize("undefined", ["nan", "inf"])
def test_no_scale_is_blamed_for_what_no_scale_can_mend(undefined: str, tmp_path: Path) -> None:
    found = scaled(tmp_path / "run", fixed(2.0**10), undefined=undefined, steps=30)
    (alarm,) = (f for f in found if f.severity == "alarm")
    assert alarm.rule == "nonfinite" and "cause" not in alarm.evidence and "scale" not in alarm.advice.lower()


@pytest.mark.parametrize("scaler", [lambda: fixed(2.0**26, 0.5), lambda: fixed(2.0**10)], ids=["falls", "low enough"])
def test_a_search_for_the_scale_is_no_fault(scaler: Callable[[], Any], tmp_path: Path) -> None:
    assert [str(f) for f in scaled(tmp_path / "run", scaler(), steps=30) if f.severity == "alarm"] == []


def test_steps_that_a_script_leaves_out_for_its_own_factor_are_named(tmp_path: Path) -> None:
    model = seeded_mlp().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for _ in range(12):
            optimizer.zero_grad()
            (model(torch.randn(16, 8).half()).float().square().mean() * 2.0**24).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
                optimizer.step()
    (found,) = (f for f in diagnose(tmp_path / "run") if f.severity == "alarm")
    assert found.evidence["cause"] == "it has never stepped, and its gradients hold NaN or Inf"
    assert "lower it by powers of two" in found.advice
    said = "SGD never stepped, and the gradients hold NaN or Inf; lower the loss scale, or call locate()"
    assert sentences(tmp_path / "run") == [said]


# -- Adam whose state is FP16


def in_half(path: Path, **arguments: Any) -> list[Finding]:
    model = seeded_mlp().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **arguments)
    with pl.watch(model, optimizer, run=path, every=10):
        optimizer.zero_grad()
        model(torch.randn(16, 8).half()).float().square().mean().backward()
        optimizer.step()
    return [f for f in diagnose(path) if f.rule in ("second-moment-lost", "epsilon-dominates")]


def test_an_epsilon_that_is_zero_in_fp16_is_an_alarm_at_the_first_step(tmp_path: Path) -> None:
    (found,) = in_half(tmp_path / "run")
    assert (found.rule, found.severity, found.since_step) == ("second-moment-lost", "alarm", 0)
    assert found.evidence["epsilon_is_zero"] == "yes" and "fp16" in str(found.evidence["format"])
    assert in_half(tmp_path / "large", eps=1e-4) == []
    assert in_half(tmp_path / "edge", eps=2.0**-24) == []


def test_the_second_moments_are_held_against_the_runs_own_epsilon(tmp_path: Path) -> None:
    def found(name: str, **thresholds: float) -> list[Finding]:
        return diagnose(tmp_path / name, rules=["epsilon-dominates"], thresholds=thresholds)

    for name, epsilon in {"default": 1e-8, "large": 1.0}.items():
        train(tmp_path / name, optimizer=lambda m, epsilon=epsilon: adamw(m, eps=epsilon), every=1)
    assert found("default") == []
    (large,) = found("large")
    assert large.evidence["epsilon"] == 1.0
    assert found("large", **{"epsilon-dominates.epsilon": 1e-6}) == []


def test_an_epsilon_that_dominates_at_the_start_only_is_a_note(tmp_path: Path) -> None:
    def small_until(last: int) -> Callable[..., None]:
        calls = itertools.count()

        def between(model: nn.Module, *_: object) -> None:
            factor = 1e-9 if next(calls) <= last else 1.0
            torch._foreach_mul_([p.grad for p in model.parameters()], factor)

        return between

    for name, last, severity in (
        ("at the start", 7, "info"),
        ("until it ends", 23, "warning"),
        ("for most of it", 14, "warning"),
        ("late", 20, "warning"),
    ):
        train(tmp_path / name, between=small_until(last), every=1)
        (found,) = diagnose(tmp_path / name, rules=["epsilon-dominates"])
        assert (found.severity, found.until_step) == (severity, last), name
        (said,) = [phrase_of(found, View(Run(tmp_path / name)), [found])]
        assert ("until step 7" in said.what) == (severity == "info") != bool(said.remedy), name


class InUnits(torch.optim.Optimizer):
    """Adam whose moments are those of its gradients times a factor, and so is its epsilon (Prodigy)."""

    def __init__(self, model: nn.Module, factor: float, epsilon: float) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": epsilon})
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            first, second = (self.state[p].setdefault(k, torch.zeros_like(p)) for k in ("exp_avg", "exp_avg_sq"))
            first.mul_(0.9).add_(p.grad, alpha=0.1 * self.factor)
            second.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001 * self.factor**2)
            epsilon = self.factor * self.param_groups[0]["eps"]
            p.sub_(self.param_groups[0]["lr"] * first / (second.sqrt() + epsilon))


def test_second_moments_in_units_of_another_size_say_nothing_by_their_size(tmp_path: Path) -> None:
    for name, factor, epsilon, rules in (
        ("of a small rate", 1e-6, 1e-8, set[str]()),
        ("of the gradients", 1.0, 1.0, {"epsilon-dominates"}),
        ("none", 1.0, 1e-8, set[str]()),
    ):
        train(tmp_path / name, optimizer=lambda m, f=factor, e=epsilon: InUnits(m, f, e), every=1)
        found = diagnose(tmp_path / name, rules=["epsilon-dominates", "spike-forerunner"])
        assert {f.rule for f in found if f.collection != "updates"} == rules, name


# -- weights that something else writes


class Average:
    """A moving average of a model's weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.weights, self.decay = [p.detach().clone() for p in model.parameters()], decay

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        for slow, p in zip(self.weights, model.parameters(), strict=True):
            slow.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        for slow, p in zip(self.weights, model.parameters(), strict=True):
            kept = p.clone()
            p.copy_(slow)
            slow.copy_(kept)


def left_in_the_model(model: nn.Module, average: Average) -> None:
    average.follow(model)
    with torch.no_grad():
        for slow, p in zip(average.weights, model.parameters(), strict=True):
            p.copy_(slow)


def swapped_and_restored(model: nn.Module, average: Average) -> None:
    average.follow(model)
    average.swap(model)
    with torch.no_grad():
        model(torch.randn(4, 8))
    average.swap(model)


@torch.no_grad()
def masked(model: nn.Module, average: Average) -> None:
    """Nine in ten weights are pruned."""
    for p in model.parameters():
        p.mul_(torch.arange(p.numel()).view_as(p) % 10 == 0)


@torch.no_grad()
def held(model: nn.Module, average: Average) -> None:
    """Every weight is put back exactly, as frozen ones may be."""
    for slow, p in zip(average.weights, model.parameters(), strict=True):
        p.copy_(slow)


@torch.no_grad()
def looked_ahead(model: nn.Module, average: Average) -> None:
    """Half of each update is kept."""
    for slow, p in zip(average.weights, model.parameters(), strict=True):
        slow.lerp_(p, 0.5)
        p.copy_(slow)


@torch.no_grad()
def shortened(model: nn.Module, average: Average) -> None:
    """Each weight has a norm of 1 at most."""
    for p in model.parameters():
        p.div_(p.norm().clamp(min=1))


AFTER: dict[str, tuple[Callable[[nn.Module, Average], None], bool]] = {
    "left in the model": (left_in_the_model, True),
    "swapped and restored": (swapped_and_restored, False),
    "masked": (masked, False),
    "held": (held, False),
    "looked ahead": (looked_ahead, False),
    "shortened": (shortened, False),
}


@pytest.mark.parametrize("name", AFTER)
def test_an_average_that_stays_in_the_model_is_named(name: str, tmp_path: Path) -> None:
    after, wrong = AFTER[name]
    model = seeded_mlp()
    average = Average(model, 0.999)

    def step(optimizer: torch.optim.Optimizer, _: object) -> None:
        optimizer.step()
        after(model, average)

    found = train(tmp_path / "run", model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), step=step)
    causes = [(f.rule, f.severity, f.evidence.get("cause")) for f in found if f.severity != "info"]
    assert causes == [("optimizer-idle", "warning", "its updates are undone after each step")] * wrong
    said = (
        "the updates of SGD are undone after each step since step N; look for what writes the weights, such as an "
        "average of them"
    )
    assert [re.sub(r"\d+", "N", each) for each in sentences(tmp_path / "run")] == [said] * wrong


def test_an_inner_loop_that_is_put_back_undoes_nothing(tmp_path: Path) -> None:
    """Meta-learning: an inner step is taken back, and the outer optimizer makes a far smaller one."""
    model = seeded_mlp()
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.001)
    with pl.watch(model, [inner, outer], run=tmp_path / "run", every=2):
        for _ in range(12):
            before = [p.detach().clone() for p in model.parameters()]
            for optimizer in (inner, outer):
                optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()
                if optimizer is outer:
                    with torch.no_grad():
                        for p, kept in zip(model.parameters(), before, strict=True):
                            p.copy_(kept)
                optimizer.step()
    assert [str(f) for f in diagnose(tmp_path / "run", rules=["optimizer-idle"])] == []


# -- a backward that gives no gradients itself


def test_zeros_that_come_from_the_backward_are_not_said_to_be_made_after_it(tmp_path: Path) -> None:
    """A sigmoid that is rounded to 1 has the derivative 0: it gets a gradient, and passes on zeros."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Sigmoid())
    nn.init.constant_(model[2].bias, 200.0)
    optimizer = adamw(model)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for _ in range(24):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    assert [str(f) for f in diagnose(tmp_path / "run") if f.rule == "gradients-mishandled"] == []


class Parts(nn.Module):
    """An encoder, a head, a part that is never called, and a target that follows the encoder."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut = cut
        self.target, self.encoder = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head, self.unused = nn.Linear(16, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.target(x)
        y = self.encoder(x).relu()
        return self.head(y.detach() if self.cut else y)


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_that_is_cut_off_is_told_from_parts_that_are_not_used(cut: bool, tmp_path: Path) -> None:
    def trained(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("target")], lr=0.1)

    found = {f.severity: f for f in train(tmp_path / "run", Parts(cut), trained)}
    assert set(found["info"].where) == {"unused.weight", "unused.bias"}
    if cut:
        assert set(found["warning"].where) == {"encoder.weight", "encoder.bias"}
    assert ("warning" in found) == cut


def test_what_is_trained_later_is_named_no_more(tmp_path: Path) -> None:
    model, path = seeded_mlp(), tmp_path / "run"
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    watch = pl.watch(model, optimizer, run=path, every=2)
    with pytest.warns(RuntimeWarning, match="2 parameters get gradients"):  # noqa: PT031
        for i in range(30):
            if i == 15:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    watch.close()
    assert diagnose(path, rules=RULES) == []
    assert [f.where for f in diagnose(path, rules=RULES, until=14)] == [("0.weight", "0.bias")]


@pytest.mark.parametrize("to_none", [False, True])
def test_two_models_that_train_in_turn_are_right(to_none: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    makes, judges = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), seeded_mlp()
    made, judged = adamw(makes), adamw(judges)
    first = pl.watch(makes, made, run=tmp_path / "makes", every=2)
    second = pl.watch(judges, judged, run=tmp_path / "judges", every=2)
    for _ in range(15):
        fake = makes(torch.randn(8, 4))
        judged.zero_grad(set_to_none=to_none)
        (judges(torch.randn(8, 8)).mean() - judges(fake.detach()).mean()).backward()
        judged.step()
        made.zero_grad(set_to_none=to_none)
        judges(fake).mean().backward()  # gradients of the judge that its next zero_grad removes
        made.step()
    first.close()
    second.close()
    assert diagnose(tmp_path / "makes", rules=RULES) == [] == diagnose(tmp_path / "judges", rules=RULES)
