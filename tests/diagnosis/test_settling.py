"""Sizes that move: a note where they have settled, a warning where they go on."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.diagnosis.tables.trend import goes_on
from plimsoll.report.verdicts.verdict_sentence import phrase_of
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.stories import LAYERS, Size, constant, make_story, of_layer

RANDOM = np.random.default_rng(5)
STEPS = np.arange(0, 400, 10)


def of_rule(rule: str, path: Path, size: Size, fmt: str = "bf16", **more: Any) -> list[Finding]:
    story = make_story(activation_fmt=fmt, activation_std=of_layer(LAYERS[4], size, constant(1.0)), **more)
    return diagnose(story.write(path), rules=[rule])


@each(
    ("values", "moves"),
    [
        (np.log2(1 + STEPS), False),  # with the steps
        (2 * np.log2(1 + STEPS), False),
        (6 * (1 - np.exp(-STEPS / 60)), False),  # settles
        (np.where(STEPS < 320, 0.0, 6.0), False),  # one transition
        (np.where(STEPS < 30, -20.0, 0.0), False),  # from zero
        (0.02 * STEPS, True),
        (-0.02 * STEPS, True),
        (RANDOM.normal(size=len(STEPS)), False),
    ],
)
def test_only_what_moves_as_fast_as_ever_goes_on(values: np.ndarray, moves: bool) -> None:
    noisy = values + 0.1 * RANDOM.normal(size=len(values))
    assert goes_on(STEPS, noisy, least=1.0, confidence=0.99) == moves
    assert not goes_on(STEPS[:12], noisy[:12], least=1.0, confidence=0.99)


def test_a_size_that_has_settled_is_a_note_in_the_past_tense(tmp_path: Path) -> None:
    (still,) = of_rule("distribution-drift", tmp_path / "on", lambda layer, s: 2.0 ** (0.05 * s))
    assert still.severity == "warning" and still.until_step == 195
    (over,) = of_rule("distribution-drift", tmp_path / "over", lambda layer, s: 2.0 ** (0.05 * min(s, 90)))
    assert over.severity == "info" and "moved during the training, and have settled" in over.meaning
    view = View(Run(tmp_path / "over"))
    assert "still" not in phrase_of(over, view, [over]).what
    assert "and still grow" in phrase_of(still, view, [still]).what


@each(
    ("loss", "severity"),
    [
        (lambda step: 2.0 * 0.985**step, "info"),  # halves more than twice in the second half
        (lambda step: 2.0 - 0.002 * step, "warning"),
        (lambda step: 2.0 * 0.9**step + 0.5, "warning"),  # learned long before
        (lambda step: 2.0 - 0.05 * step, "warning"),  # below zero
    ],
)
def test_weights_that_move_while_the_loss_still_halves_are_a_note(
    tmp_path: Path, loss: Callable[[int], float], severity: str
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    moving = of_layer(LAYERS[4], lambda layer, s: 2.0 ** (0.05 * s), constant(1.0))
    (found,) = diagnose(make_story(weight_std=moving, loss=loss).write(path), rules=["distribution-drift"])
    assert (found.severity, "still do" in found.meaning) == (severity, severity == "info")


@each(
    ("loss", "endless"),
    [
        (lambda step: 2.0 - 0.05 * step, True),
        (lambda step: 20.0 - 0.05 * step, False),  # above zero
        (lambda step: -1.0 + 0.5**step, False),  # below zero, where it stays
        (lambda step: -3.0 - 0.1 * (step % 7), False),  # as an agent's
    ],
)
def test_growth_is_put_down_to_a_loss_that_falls_without_a_bound(
    loss: Callable[[int], float], endless: bool, tmp_path: Path
) -> None:
    (found,) = of_rule("distribution-drift", tmp_path / "run", lambda layer, s: 2.0 ** (0.05 * s), loss=loss)
    view = View(Run(tmp_path / "run"))
    said = phrase_of(found, view, [found])
    assert ("wrong sign" in said.remedy and "no lower bound" in found.meaning) == endless
    (shrinks,) = of_rule("distribution-drift", tmp_path / "shrinks", lambda layer, s: 2.0 ** (-0.05 * s), loss=loss)
    assert "lower bound" not in shrinks.meaning


def test_growth_that_stays_below_the_top_of_fp16_is_a_note(tmp_path: Path) -> None:
    (still,) = of_rule("activation-growth", tmp_path / "on", lambda layer, s: 2.0 ** (2 + 0.06 * s))
    assert still.severity == "warning"
    (over,) = of_rule("activation-growth", tmp_path / "over", lambda layer, s: 2.0 ** (2 + 0.06 * min(s, 120)))
    assert over.severity == "info" and over.actions == ()


def test_the_size_told_is_that_of_the_end(tmp_path: Path) -> None:
    (found,) = of_rule("activation-growth", tmp_path / "run", lambda layer, s: 2.0 ** (2 + 0.06 * s))
    cells = View(Run(tmp_path / "run")).cells("activations")
    assert cells is not None
    largest = cells.true_absmax[cells.names.index(found.where[0])]
    assert largest[-8] <= found.evidence["absmax"] <= largest.max()
    assert found.evidence["absmax"] >= 1024


def test_values_that_settled_below_the_top_are_a_note(tmp_path: Path) -> None:
    (still,) = of_rule("overflow-ahead", tmp_path / "on", lambda layer, s: 2.0 ** (3 + 0.05 * s), "fp16")
    assert still.severity == "warning"
    (over,) = of_rule("overflow-ahead", tmp_path / "over", lambda layer, s: 2.0 ** (3 + 0.1 * min(s, 70)), "fp16")
    assert over.severity == "info" and over.actions == ()


def test_gradients_that_underflow_because_the_loss_is_zero_are_no_fault(tmp_path: Path) -> None:
    sizes = {"gradient_std": lambda layer, s: 2.0**-8 if s < 80 else 2.0**-35}
    rules = ["underflow-*", "scale-low"]
    solved = make_story(**sizes, loss=lambda s: 2.0 if s < 80 else 1e-9)
    assert diagnose(solved.write(tmp_path / "solved"), rules=rules) == []
    assert diagnose(make_story(**sizes).write(tmp_path / "not"), rules=rules) != []
