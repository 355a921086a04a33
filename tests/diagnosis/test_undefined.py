"""NaN that a loss scaler skips as if its scale were too high, and that no scale can avoid."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Event, Run
from tests.support.diagnosis.stories import constant, make_story, since


def again(step: int) -> bool:
    """Whether a step is one of those that a scaler skips; none of them is sampled."""
    return step >= 43 and step % 8 == 3 and step % 5 != 0


def falling(step: int) -> float:
    return 2.0 ** (10 - sum(again(before) for before in range(step)))


def skipping(path: Path, size: Callable[[str, int], float]) -> list[Finding]:
    story = make_story(scale=falling, skipped=lambda step: float(again(step)), gradient_std=size, samples=50)
    return diagnose(story.write(path), rules=["nonfinite", "scale-collapse"])


def test_steps_skipped_far_below_the_top_are_no_overflow(tmp_path: Path) -> None:
    (alarm,) = (f for f in skipping(tmp_path / "run", constant(2.0**-12)) if f.severity == "alarm")
    assert alarm.rule == "nonfinite" and str(alarm.evidence["cause"]).startswith("no overflow")
    assert float(alarm.evidence["powers_of_two_free"]) >= 16
    assert "No loss scale helps" in alarm.advice and "0 / 0" in alarm.advice and "3e-8" in alarm.advice
    view = View(Run(tmp_path / "run"))
    assert "nothing around these steps is near an overflow" in verdict(view, diagnose(view))


def test_steps_skipped_among_values_near_the_top_are(tmp_path: Path) -> None:
    # As the scale falls, gradients grow: the samples around each skipped step reach the format's largest value.
    found = skipping(tmp_path / "run", since(40, lambda _, step: 2.0**12 / falling(step), constant(1.0)))
    assert {f.rule: f.severity for f in found} == {"scale-collapse": "alarm", "nonfinite": "info"}


def test_two_far_steps_are_not_enough(tmp_path: Path) -> None:
    story = make_story(skipped=lambda step: float(step in (51, 83)), gradient_std=constant(2.0**-30))
    assert [f.severity for f in diagnose(story.write(tmp_path / "run"), rules=["nonfinite"])] == ["info"]


# -- a scaler that begins far too high


def searching(path: Path, size: float, lasts: int = 25) -> dict[str, str]:
    """Severities of a run whose scale falls from 2^16 for so many steps, and stays there."""
    story = make_story(
        scale=lambda step: 2.0 ** (16 - min(step, lasts)), skipped=lambda step: float(step < lasts),
        gradient_std=constant(size), samples=50,
    )  # fmt: skip
    found = diagnose(story.write(path), rules=["nonfinite", "scale-collapse"])
    return {finding.rule: finding.severity for finding in found}


def test_a_scale_below_1_that_large_gradients_need_is_no_collapse(tmp_path: Path) -> None:
    assert searching(tmp_path / "wanted", 2.0**20) == {"nonfinite": "info"}
    assert searching(tmp_path / "not", 2.0**-12) == {"nonfinite": "info", "scale-collapse": "alarm"}


def test_a_search_that_finds_no_scale_goes_on_and_on(tmp_path: Path) -> None:
    assert searching(tmp_path / "run", 2.0**20, lasts=300)["nonfinite"] == "alarm"


def test_a_scale_that_falls_with_a_loss_of_nan_is_no_collapse(tmp_path: Path) -> None:
    """Every third batch overflows in the forward: the scaler halves its scale at each, and no scale helps."""

    def nan(step: int) -> bool:
        return step >= 30 and step % 3 == 0 and not 60 <= step < 75

    story = make_story(
        loss=lambda step: math.nan if nan(step) else 1.0, skipped=lambda step: float(nan(step)),
        scale=lambda step: 2.0 ** (16 - sum(nan(before) for before in range(step))), gradient_std=constant(2.0**-12),
        samples=100,
    )  # fmt: skip
    found = diagnose(story.write(tmp_path / "run"), rules=["nonfinite", "scale-collapse", "scale-low"])
    assert [(finding.rule, finding.since_step) for finding in found if finding.severity == "alarm"][:1] == [
        ("nonfinite", 30)
    ]
    assert "scale-collapse" not in {finding.rule for finding in found}


def test_a_fall_that_came_back_and_lost_nothing_is_a_note(tmp_path: Path) -> None:
    def fallen(path: Path, size: float) -> str:
        story = make_story(
            scale=lambda step: 2.0 ** (16 - max(0, min(step - 60, 6, 90 - step))), gradient_std=constant(size),
            skipped=lambda step: float(60 <= step < 66), samples=100,
        )  # fmt: skip
        (found,) = diagnose(story.write(path), rules=["scale-collapse"])
        return found.severity

    assert fallen(tmp_path / "large", 2.0**-4) == "info"
    assert fallen(tmp_path / "small", 2.0**-34) == "warning"


# -- whether there are batches to skip to


@pytest.mark.parametrize("every", [1, 8])
def test_batches_are_to_be_skipped_only_where_others_are_sound(every: int, tmp_path: Path) -> None:
    begun = Event(step=64, kind="origin", message="", details={"where": "activations", "names": ["net:output"]})
    story = make_story(loss=lambda step: math.nan if step >= 64 and step % every == 0 else 1.0, events=(begun,))
    (alarm,) = diagnose(story.write(tmp_path / "run"), rules=["nonfinite"])
    assert ("Skipping helps little" in alarm.advice) == (every == 1)
    assert ("Skip such batches" in alarm.advice) == (every == 8)


# -- where the watch has traced NaN to, and what the record of the same step shows


def traced(path: Path, where: str, names: list[str], *, broken: str = "", given: str = "") -> Finding:
    """The alarm of a run with such an event at step 60, which is sampled; `broken`: a layer with NaN there."""
    story = make_story(
        loss=lambda step: math.nan if step == 60 else 1.0, scale=lambda step: None,
        change_activation=lambda x, layer, step: x * math.nan if (f"{layer}:output", step) == (broken, 60) else x,
        events=(Event(step=60, kind="origin", message="", details={"where": where, "names": names, "given": given}),),
    )  # fmt: skip
    (found,) = diagnose(story.write(path), rules=["nonfinite"])
    return found


def test_a_layer_that_is_recorded_as_finite_is_not_named(tmp_path: Path) -> None:
    layer, other = "blocks.2.mlp:output", "blocks.1.attn:output"
    found = traced(tmp_path / "finite", "activations", [layer])
    assert not found.where and found.evidence["first_seen_in"] == "the loss, of outputs that were finite"
    assert traced(tmp_path / "broken", "activations", [layer], broken=layer).where == (layer,)
    assert traced(tmp_path / "other", "activations", [layer], broken=other).where == (other,)
    assert traced(tmp_path / "unknown", "activations", ["head:output"]).where == ("head:output",)


def test_of_compiled_code_the_record_names_the_layer(tmp_path: Path) -> None:
    names = ["blocks.0.attn", "blocks.5.mlp"]
    assert traced(tmp_path / "broken", "compiled", names, broken="blocks.1.attn:output").where == (
        "blocks.1.attn:output",
    )
    view = View(Run(tmp_path / "broken"))
    assert "activations of blocks.1.attn contained NaN or Inf at step 60" in verdict(view, diagnose(view))


@pytest.mark.parametrize(
    ("where", "given", "said"),
    [
        ("targets", "targets", "the targets of the loss contained NaN or Inf at step 60"),
        ("loss", "weights", "the weights of the loss contained NaN or Inf at step 60"),
        (
            "loss", "constant",
            "the constants of the loss (targets, weights, masks, factors) contained NaN or Inf at step 60",
        ),
    ],
)  # fmt: skip
def test_what_a_loss_was_given_is_named_with_the_data_as_remedy(
    where: str, given: str, said: str, tmp_path: Path
) -> None:
    found = traced(tmp_path / "run", where, [], given=given)
    assert not found.where and found.collection is None
    assert "Look at the data" in found.advice and "No layer made this" in found.advice
    assert verdict(View(Run(tmp_path / "run")), [found]).startswith(f"Problem: {said}; check the data of that step")


# -- a real training


class Norm(nn.Module):
    """A norm in FP16, which has no number for an epsilon of 1e-12."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        h = x.half()
        return (h / ((h * h).mean(dim=-1, keepdim=True) + torch.tensor(self.epsilon).half()).sqrt()).float()


@pytest.mark.parametrize("epsilon", [1e-12, 1e-4])
def test_a_norm_whose_epsilon_is_zero_is_named(epsilon: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("norm", Norm(epsilon))
    model.add_module("net", nn.Linear(8, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for step in range(90):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            if step % 8 == 5:
                x[0], y[0] = 0.0, -100  # padding, whose label does not count: the loss is finite
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    found = [f for f in diagnose(tmp_path / "run") if f.severity != "info"]
    if epsilon == 1e-4:
        assert found == []
        return
    assert [(f.rule, f.severity, f.where) for f in found] == [("nonfinite", "alarm", ("norm:output",))]
    assert found[0].evidence["first_seen_in"] == "activations norm:output"
    assert str(found[0].evidence["cause"]).startswith("no overflow") and "not recorded" not in str(found[0].evidence)
