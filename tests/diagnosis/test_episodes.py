"""NaN and Inf of several causes in one run: the finding is about the one that matters, and not about what is over."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.diagnosis.tables.trend import first_of_deciding, reaching
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Run
from plimsoll.scaling import DynamicScaler, SpectralScaler
from tests.support.diagnosis.stories import LAYERS, Story, constant, make_story

NAN, LAYER = math.nan, LAYERS[4]


def broken(loss: Callable[[int], bool], skips: Callable[[int], bool] = lambda step: step < 4, **more: Any) -> Story:
    """A run whose loss is NaN, by one layer's output, at some steps, and whose scaler skips these and others."""

    def output(x: Tensor, here: str, step: int) -> Tensor:
        return torch.full_like(x, NAN) if here == LAYER and loss(step) else x

    def gradient(x: Tensor, here: str, step: int) -> Tensor:
        return torch.full_like(x, NAN) if loss(step) else x * math.inf if here == LAYERS[-1] and skips(step) else x

    facts = {"change_activation": output, "change_gradient": gradient, **more}
    return make_story(
        loss=lambda step: NAN if loss(step) else 1.0, skipped=lambda step: float(loss(step) or skips(step)), **facts
    )


def found(path: Path, story: Story, until: int | None = None) -> Finding:
    (finding,) = diagnose(story.write(path, until), rules=["nonfinite"])
    return finding


def test_what_lasts_is_named_and_not_the_search_for_the_scale(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: step >= 100))
    assert (finding.severity, finding.since_step, finding.until_step) == ("alarm", 100, 199)
    assert finding.evidence == {
        "steps": 100, "steps_with_loss": 100, "steps_with_gradients": 100, "broke_first": "loss", "steps_before": 4,
        "first_seen_in": f"activations {LAYER}:output", "first_seen_at": 100,
    }  # fmt: skip
    view = View(Run(tmp_path / "run"))
    assert verdict(view, [finding]).startswith(f"Problem: activations of {LAYER} contained NaN or Inf at step 100")


@pytest.mark.parametrize(
    ("until", "severity", "since"), [(2, "info", 0), (60, "info", 0), (100, "alarm", 100), (150, "alarm", 100)]
)
def test_a_beginning_of_the_run_says_what_is_said_of_it_later(
    until: int, severity: str, since: int, tmp_path: Path
) -> None:
    story = broken(lambda step: step >= 100)
    finding = found(tmp_path / "cut", story, until)
    assert (finding.severity, finding.since_step) == (severity, since)
    assert [finding] == diagnose(story.write(tmp_path / "run"), rules=["nonfinite"], until=until)


def test_steps_that_are_skipped_and_solved_are_one_note_as_ever(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: False, lambda step: step < 4 or step in (90, 140)))
    assert (finding.severity, finding.since_step, finding.until_step) == ("info", 0, 140)
    assert finding.evidence["steps"] == finding.evidence["skipped"] == 6 and "steps_before" not in finding.evidence


@pytest.mark.parametrize("skips", [lambda step: False, lambda step: step < 4], ids=["at once", "after skips"])
def test_nan_without_a_finite_step_before_it_began_there(skips: Callable[[int], bool], tmp_path: Path) -> None:
    first = 4 if skips(0) else 0
    finding = found(tmp_path / "run", broken(lambda step: step >= first, skips))
    assert (finding.severity, finding.since_step) == ("alarm", 0)
    assert finding.evidence["broke_first"] == ("gradients" if first else "loss")


@pytest.mark.parametrize(("begin", "severity", "since"), [(60, "alarm", 60), (180, "info", 0)])
def test_skips_that_go_on_to_the_end_began_where_they_go_on(
    begin: int, severity: str, since: int, tmp_path: Path
) -> None:
    story = broken(
        lambda step: False,
        lambda step: step < 4 or step >= begin,
        scale=lambda step: max(2.0 ** (20 - max(step - begin, 0)), 1.0),
    )
    finding = found(tmp_path / "run", story)
    assert (finding.severity, finding.since_step) == (severity, since)


def test_skips_that_go_on_count_more_than_nan_that_is_over(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: step == 20, lambda step: step >= 60))
    assert (finding.severity, finding.since_step, finding.evidence["steps_with_loss"]) == ("alarm", 60, 0)


def test_nan_that_is_over_again_is_the_alarm_still(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: 100 <= step < 103))
    assert (finding.severity, finding.since_step, finding.until_step) == ("alarm", 100, 102)
    assert finding.evidence["first_seen_in"] == f"activations {LAYER}:output"


@pytest.mark.parametrize("early", [(20,), (20, 60), tuple(range(20, 80))], ids=["one", "two", "a spike"])
def test_the_last_of_several_decides_if_it_lasts(early: tuple[int, ...], tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: step in early or step >= 150))
    assert (finding.since_step, finding.evidence["steps"]) == (150, 50)
    assert finding.evidence["steps_before"] == 4 + len(early)


@pytest.mark.parametrize("until", [100, 105, 148, 199])
def test_nan_that_comes_now_and_then_began_when_it_came_first(until: int, tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: step >= 20 and step % 16 == 4), until)
    assert finding.since_step == 20


def test_nan_that_stops_for_a_few_steps_is_one_episode(tmp_path: Path) -> None:
    finding = found(tmp_path / "run", broken(lambda step: step == 100 or step >= 110))
    assert finding.since_step == 100


@pytest.mark.parametrize("skipped", [True, False])
def test_a_step_that_broke_the_weights_is_where_it_began_unless_it_was_skipped(skipped: bool, tmp_path: Path) -> None:
    """Weights are sampled at every twentieth step, and the loss does not see the broken ones."""
    story = make_story(
        scale=lambda step: 1024.0 if skipped else None,
        skipped=lambda step: float(step == 45),
        skips_recorded=skipped,
        change_weight=lambda x, here, step: x * NAN if here == LAYER and step >= 60 else x,
        every=20,
        samples=10,
    )
    finding = found(tmp_path / "run", story)
    assert (finding.severity, finding.since_step) == ("alarm", 60 if skipped else 45)
    assert finding.evidence["weights_since"] == 60


def test_values_that_only_samples_show_are_one_episode(tmp_path: Path) -> None:
    story = make_story(
        change_activation=lambda x, here, step: x * NAN if here == LAYER and step >= 40 else x, every=20, samples=10
    )
    for until in (45, 75, 199):
        assert found(tmp_path / f"run{until}", story, until).since_step == 40


def test_an_undefined_operation_did_not_begin_with_the_search_for_the_scale(tmp_path: Path) -> None:
    def again(step: int) -> bool:
        return step >= 43 and step % 8 == 3 and step % 5 != 0

    def scale(step: int) -> float:
        return 2.0 ** (16 - sum(before < 4 or again(before) for before in range(step)))

    story = make_story(
        samples=100, scale=scale, skipped=lambda step: float(step < 4 or again(step)), gradient_std=constant(1.0)
    )
    finding = found(tmp_path / "run", story)
    assert str(finding.evidence["cause"]).startswith("no overflow") and finding.evidence["steps_before"] == 4
    assert (finding.since_step, finding.where) == (43, ())


def test_records_that_are_far_apart_are_one_episode_if_all_are_broken() -> None:
    steps, bad = np.arange(0, 500, 50), np.arange(10) >= 6
    begins, ends = reaching(steps, bad, 480)
    assert begins.tolist() == [300, 350, 400, 450] and ends.tolist() == [350, 400, 450, 480]
    assert first_of_deciding([(np.array([50]), np.array([50])), (begins, ends)], 480, 10) == 300


# -- a real training


class Ratio(nn.Module):
    """Shares of the sum of squares, in FP16: Inf / Inf once that sum overflows."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x.half().square()
        return (squares / (squares.sum(dim=-1, keepdim=True) + 1)).float()


SCALERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**28),
    "dynamic": lambda: DynamicScaler("cpu", init_scale=2.0**28),
    "spectral": lambda: SpectralScaler("cpu", init_scale=2.0**28),
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(("first", "last"), [(23, 60), (23, 26), (60, 60)], ids=["lasts", "is over", "sound"])
def test_nan_in_a_forward_is_named_after_a_scaler_has_found_its_scale(
    scaler: str, first: int, last: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(8, 16))
    model.add_module("ratio", Ratio())
    model.add_module("head", nn.Linear(16, 4))
    optimizer, scaling = torch.optim.SGD(model.parameters(), lr=0.01), SCALERS[scaler]()
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for step in range(60):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            x = x * 1000 if first <= step < last else x
            optimizer.zero_grad()
            scaling.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaling.step(optimizer)
            scaling.update()
    skips = sorted(View(Run(tmp_path / "run")).skips)
    assert skips[0] == 0 and not {first - 1, first - 2, first - 3} & set(skips)
    (finding,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    if first == 60:
        assert (finding.severity, finding.since_step) == ("info", 0)
        return
    assert (finding.severity, finding.since_step, finding.until_step) == ("alarm", first, last - 1)
    assert (
        finding.evidence["first_seen_in"] == "activations ratio:output" and finding.evidence["first_seen_at"] == first
    )
    assert finding.evidence["broke_first"] == "loss" and finding.evidence["steps_before"] == sum(
        s < first for s in skips
    )


def test_what_nan_makes_of_a_scale_is_no_fault_of_the_scale(tmp_path: Path) -> None:
    """The scale falls a step before NaN comes, and then with each NaN."""
    story = broken(
        lambda step: 100 <= step < 150,
        scale=lambda step: 2.0 ** (20 - min(step, 4) - (step >= 99) - min(max(step - 100, 0), 50)),
    )
    found = diagnose(story.write(tmp_path / "run"), rules=["nonfinite", "scale-collapse"])
    assert [(f.rule, f.since_step) for f in found] == [("nonfinite", 100)]


@pytest.mark.parametrize("finite", [True, False])
def test_falls_after_nan_are_no_swings(finite: bool, tmp_path: Path) -> None:
    def every(step: int) -> bool:
        return step % 8 == 4

    story = broken(
        lambda step: not finite and every(step),
        lambda step: finite and every(step),
        scale=lambda step: 2.0 ** (10 - (step > 4 and step % 8 in (5, 6, 7, 0))),
    )
    rules = {f.rule for f in diagnose(story.write(tmp_path / "run"), rules=["scale-oscillation"])}
    assert rules == ({"scale-oscillation"} if finite else set())
