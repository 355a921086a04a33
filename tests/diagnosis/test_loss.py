"""The loss: which courses are an alarm, which a warning, and which nothing but a note."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Run, RunWriter, Scalars
from plimsoll.text import number
from tests.support.cases import each
from tests.support.diagnosis.stories import LAYERS, make_story

Loss = np.ndarray
RANDOM = np.random.default_rng(14)
RULE = ["loss-spike"]


def noise(steps: int, size: float = 0.1) -> Loss:
    return np.exp(size * RANDOM.normal(size=steps))


def learned(steps: int, first: float = 2.3, last: float = 0.3, within: float = 80, size: float = 0.1) -> Loss:
    """A loss that falls as in a sound training."""
    return (last + (first - last) * np.exp(-np.arange(steps) / within)) * noise(steps, size)


def then(*pieces: object) -> Loss:
    return np.concatenate([np.asarray(piece, dtype=np.float64) for piece in pieces])


def spiked(loss: Loss, at: range, height: Callable[[int], float]) -> Loss:
    for place, step in enumerate(at):
        loss[step] = height(place)
    return loss


def finite_or_zero(steps: int) -> Loss:
    """Huge losses, 28 % of which are exactly zero."""
    return np.where(RANDOM.random(steps) < 0.28, 0.0, 10.0 ** RANDOM.uniform(2, 17, steps))


BROKEN = {
    "diverged, often exactly zero": ("alarm", "diverged", then(learned(300, 1.0, 0.1), finite_or_zero(400))),
    "diverged within twenty steps": ("alarm", "diverged", then(np.geomspace(8.4, 27848, 15), 27848 * noise(200, 0.3))),
    "diverged at the second step": ("alarm", "diverged", then([8.4], 27848 * noise(30, 0.3))),
    "only the divergence is recorded": ("alarm", "diverged", np.geomspace(8.4, 27848, 20)),
    "stuck at chance": ("alarm", "never learned", then([2.31, 5e3, 9e3, 300, 40, 4], 2.303 * noise(150, 0.005))),
    "back at chance": ("alarm", "diverged", then(learned(300), 2.3 * noise(60, 0.05))),
    "far above the start": ("alarm", "diverged", then(learned(300), 60 * noise(60, 0.3))),
    "explodes at the end": ("alarm", "diverged", then(learned(300), np.geomspace(0.3, 1e8, 15))),
    "rises, then NaN": ("alarm", "diverged", then(learned(100), [40, 9e6, 1e29], np.full(50, np.nan))),
    "diverges slowly": ("alarm", "diverged", then(learned(300), 0.3 * np.geomspace(1, 1e3, 400) * noise(400))),
    "diverges slowly from the start": ("alarm", "diverged", np.geomspace(2.3, 1e5, 400) * noise(400)),
    "below zero, then far above": (
        "alarm", "diverged", then(6 * np.exp(-np.arange(300) / 50) - 3 + 0.1 * RANDOM.normal(size=300), 50 * noise(80)),
    ),
    "orders of magnitude lost": ("alarm", "diverged", then(1e4 * np.exp(-np.arange(300) / 30) + 1, np.full(50, 1e6))),
    "spikes grow": ("warning", "growing spikes", spiked(learned(900), range(150, 900, 70), lambda n: 0.5 * 2.0**n)),
    "up for sixty steps": ("warning", "came back late", then(learned(300), np.full(60, 9.0), learned(200, 0.3))),
}  # fmt: skip

SOUND_LOSSES = {
    "falls ten orders of magnitude": 10 ** (12 * np.exp(-np.arange(2000) / 300) - 10 + RANDOM.normal(size=2000) / 2),
    "single batches": spiked(learned(1000), range(200, 1000, 150), lambda n: 8.0),
    "an agent's, which grows": 140 * np.geomspace(1, 80, 400) * noise(400, 0.5),
    "of either sign": RANDOM.normal(size=600) * np.linspace(1, 8, 600),
    "before and after the first reward": then(1e-4 * noise(100, 1.0), 0.5 * noise(500, 1.0)),
    "log-normal": noise(1500, 2.0),
    "heavy tails": np.abs(RANDOM.standard_t(1.5, size=1500)),
    "mostly zero": np.where(RANDOM.random(800) < 0.6, 0, RANDOM.exponential(size=800)),
    "copies of a target network": 0.05 + np.exp(-(np.arange(1000) % 100) / 20) * noise(1000, 0.2),
    "a discriminator's": then(1.38 * np.exp(-np.arange(60) / 20) + 0.05, 1.3 - 1.2 * np.exp(-np.arange(500) / 60)),
    "restarts of the rate": np.tile(learned(200, 1.5, 0.1, 30), 4),
    "a late transition": then(2.3 + 0.02 * RANDOM.normal(size=300), learned(300, 2.3, 1e-3, 20)),
    "a first excursion": then([2.3, 40, 60, 10, 4, 3], learned(300, 2.8)),
    "one value": np.ones(100),
    "zeros": np.zeros(100),
    "rises below zero": np.linspace(0, 60, 500) - 100 + RANDOM.normal(size=500),
    "two losses": np.array([1.0, 2.0]),
}  # fmt: skip


def recorded(path: Path, loss: Loss) -> Path:
    with RunWriter(path, flush_seconds=600) as writer:
        for step, value in enumerate(loss.tolist()):
            writer.write(Scalars(step=step, values={"loss": value}))
    return path


def findings(path: Path, loss: Loss, until: int | None = None) -> list[Finding]:
    return diagnose(recorded(path, loss), rules=RULE, until=until)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_course_is_named(name: str, tmp_path: Path) -> None:
    severity, course, loss = BROKEN[name]
    (found,) = findings(tmp_path / "run", loss)
    assert (found.severity, found.evidence["course"]) == (severity, course), found


def test_a_loss_that_ends_above_its_start_has_not_come_back(tmp_path: Path) -> None:
    noisy = 2.0 * noise(200, 0.1)
    (found,) = findings(tmp_path / "run", then(0.76 * noise(10, 0.05), [4.6, 4.5], noisy))
    assert found.severity == "info" and "still above where it began" in found.meaning
    (found,) = findings(tmp_path / "back", then(0.76 * noise(10, 0.05), [4.6, 4.5], 0.4 * noisy))
    assert "came back by itself" in found.meaning


@pytest.mark.parametrize("name", SOUND_LOSSES)
def test_a_sound_course_is_a_note_at_most(name: str, tmp_path: Path) -> None:
    found = findings(tmp_path / "run", SOUND_LOSSES[name])
    assert [str(f) for f in found if f.severity != "info"] == []


UNBOUNDED = {
    "an error that is maximised": -0.4 - (np.arange(300) / 30) ** 4 * noise(300),
    "exponential": 2.3 - np.geomspace(1, 1e6, 300) * noise(300),
    "from far above zero": 400 - 1e-3 * np.arange(900.0) ** 3,
}
BOUNDED = {
    "a likelihood that levels off": 300 - 4e4 * (1 - np.exp(-np.arange(400) / 80)) + 100 * RANDOM.normal(size=400),
    "a reward that is being found": -1e3 / (1 + np.exp(-(np.arange(160) - 150) / 20)) * noise(160),
    "a reward that is found late": -1e3 / (1 + np.exp(-(np.arange(400) - 150) / 20)) * noise(400),
    "a rise of the reward at a constant pace": -2.0 * np.arange(400) + 0.5 * RANDOM.normal(size=400),
    "a likelihood without noise": -np.log(1 + np.arange(400.0)),
    "ever faster, and not far": -((np.arange(400) / 100) ** 3) * noise(400),
    "far below zero from the start": -1e6 * noise(400),
    "learned": learned(400),
    "short": -np.geomspace(1, 1e6, 30),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_loss_that_falls_ever_faster_is_named(name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", UNBOUNDED[name])
    (found,) = diagnose(path, rules=["loss-unbounded"])
    assert found.severity == "warning" and "sign of the loss" in found.advice
    assert "falls without bound" in verdict(View(Run(path)), [found])


@pytest.mark.parametrize("name", BOUNDED)
def test_a_loss_that_may_be_below_zero_is_not(name: str, tmp_path: Path) -> None:
    assert diagnose(recorded(tmp_path / "run", BOUNDED[name]), rules=["loss-unbounded"]) == []


def test_a_divergence_names_the_backwards_that_a_step_adds_up(tmp_path: Path) -> None:
    model, data = torch.nn.Linear(4, 1), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for _ in range(60):
            optimizer.zero_grad()
            for _ in range(8):
                model(torch.randn(16, 4, generator=data)).square().mean().backward()
            optimizer.step()
    found = next(f for f in diagnose(tmp_path / "run") if f.rule == "loss-spike")
    assert found.severity == "alarm" and found.evidence["accumulated"] == 8
    assert "divide their loss by 8" in found.advice


@pytest.mark.parametrize("of", ["one feature", "the targets"])
def test_an_input_that_grew_as_the_loss_rose_is_named(of: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, target = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for step in range(140):
            x = torch.randn(16, 4)
            y = x @ target
            if step >= 100:
                (x[:, 1:2] if of == "one feature" else y).mul_(1e3)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x @ target if of == "one feature" else y)
            loss.backward()
            optimizer.step()
    (found,) = diagnose(tmp_path / "run", rules=RULE)
    assert found.severity == "alarm" and found.since_step == 100
    sentence = verdict(View(Run(tmp_path / "run")), [found])
    if of == "one feature":
        assert str(found.evidence["input"]).endswith(":input") and 100 < float(found.evidence["input_times"]) < 1e4
        assert found.advice.startswith("Look at the batches from there on: ") and "the model's input is" in sentence
    else:
        assert "input" not in found.evidence and "input" not in found.advice + sentence


@each("blank", [0.9, 0.2])
def test_an_input_that_became_blank_as_the_loss_rose_is_named(blank: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = tmp_path / str(blank)
    with pl.watch(model, optimizer, run=run, every=10):
        for step in range(200):
            y = torch.randint(4, (64,))
            x = torch.randn(64, 8) + 4 * torch.eye(4, 8)[y]
            if step >= 120:
                x, y = x * (torch.rand(64, 1) > blank), y if blank > 0.5 else torch.randint(4, (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    (found,) = [f for f in diagnose(run, rules=RULE) if f.severity != "info"]
    assert found.since_step == 120
    said = found.advice + verdict(View(Run(run)), [found])
    if blank > 0.5:
        assert str(found.evidence["input"]).endswith(":input") and 0.8 < float(found.evidence["input_zeros"]) < 1
        assert "a loader returns blanks" in said and "of the model's input are zeros" in said
        assert "learning rate" not in said
    else:
        assert "input" not in found.evidence and "zeros" not in said


def test_the_highest_loss_is_in_the_verdict_and_not_the_first_spike(tmp_path: Path) -> None:
    loss = spiked(then(learned(300, 1.0, 0.1), 3.4e16 * noise(200, 0.5)), range(196, 197), lambda n: 1.38)
    path = recorded(tmp_path / "run", loss)
    (found,) = diagnose(path, rules=RULE)
    assert found.since_step == 300 and found.evidence["highest"] == loss.max()
    assert found.evidence["at_step"] == int(loss.argmax())
    assert f"to {number(loss.max())} and did not come back" in verdict(View(Run(path)), [found])


def test_an_alarm_is_a_note_once_the_loss_has_come_back(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", then(learned(300), 2.3 * noise(40, 0.05), learned(200, 0.3)))
    (live,), (after,) = diagnose(path, rules=RULE, until=335), diagnose(path, rules=RULE)
    assert (live.severity, after.severity) == ("alarm", "info")
    assert live.since_step == after.since_step == 300


@pytest.mark.parametrize(("batches", "severity"), [(3, "warning"), (2, "info")])
def test_a_blow_up_is_no_note_because_the_loss_stays_only_a_little_high_after_it(
    batches: int, severity: str, tmp_path: Path
) -> None:
    loss = then(learned(300), np.full(batches, 9e4), 1.0 * noise(60, 0.1), learned(100, 0.3))
    (found,) = diagnose(recorded(tmp_path / "run", loss), rules=RULE)
    assert (found.severity, found.evidence["course"]) == (severity, "came back late")


def test_a_loss_that_ends_in_nan_is_not_said_to_be_low_at_the_end(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", then(learned(300), [9e6, 1e29], np.full(50, np.nan)))
    (found,) = diagnose(path, rules=RULE)
    assert found.evidence["course"] == "diverged" and "now" not in found.evidence
    assert "at the end" not in verdict(View(Run(path)), [found])


@pytest.mark.parametrize("broken", ["loss", "loss:actor"])
def test_each_loss_of_a_run_is_judged(broken: str, tmp_path: Path) -> None:
    """Those of its other optimizers as well; a finding says of which loss it is."""
    losses = {"loss": learned(400), "loss:actor": learned(400)} | {broken: then(learned(200), 60 * noise(200, 0.3))}
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        for step in range(400):
            writer.write(Scalars(step=step, values={name: float(each[step]) for name, each in losses.items()}))
    (found,) = diagnose(tmp_path / "run", rules=RULE)
    assert (found.severity, found.since_step) == ("alarm", 200)
    assert ("loss:actor rose" in verdict(View(Run(tmp_path / "run")), [found])) == (broken == "loss:actor")


def test_nan_in_the_loss_of_another_optimizer_is_an_alarm(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        for step in range(30):
            values = {"loss": 1.0, "loss:actor": float("nan") if step > 20 else 1.0}
            writer.write(Scalars(step=step, values=values))
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert (found.severity, found.since_step, found.evidence["steps_with_loss"]) == ("alarm", 21, 9)


def test_updates_that_jump_are_a_warning_where_the_loss_follows(tmp_path: Path) -> None:
    jump = {"update_ratio": lambda name, s: 2.0 ** (-6.5 if (name, s) == (LAYERS[9], 125) else -10)}
    forerunner = ["spike-forerunner"]
    (alone,) = diagnose(make_story(**jump).write(tmp_path / "alone"), rules=forerunner)
    assert alone.severity == "info" and alone.actions == ()
    followed = make_story(**jump, loss=lambda s: 40.0 if 127 <= s < 135 else 2.0 + 0.01 * (s % 7))
    (found,) = diagnose(followed.write(tmp_path / "followed"), rules=forerunner)
    assert found.severity == "warning" and found.evidence["loss_rose_at"] == 127
    before = make_story(**jump, loss=lambda s: 40.0 if 80 <= s < 88 else 2.0 + 0.01 * (s % 7))
    (unlike,) = diagnose(before.write(tmp_path / "before"), rules=forerunner)
    assert unlike.severity == "info"


@each(
    ("loss", "severity"),
    [
        (lambda s: 2.0 + 0.01 * (s % 7), "warning"),
        (lambda s: 2.0 - 0.004 * s, "warning"),  # goes on falling, by less than half
        (lambda s: 2.0 if s <= 125 else 0.5, "info"),  # as after a second optimizer has taken over
        (lambda s: -1.0 if s <= 125 else -1.2, "warning"),
        (lambda s: -1.0 if s <= 125 else -2.0, "info"),
    ],
)
def test_updates_that_move_far_are_a_note_where_the_loss_is_much_better_since(
    tmp_path: Path, loss: Callable[[int], float], severity: str
) -> None:
    far = {"update_ratio": lambda name, s: 2.0 ** (-4 if (name, s) == (LAYERS[9], 125) else -10)}
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    (found,) = diagnose(make_story(**far, loss=loss).write(path), rules=["spike-forerunner"])
    assert found.severity == severity


@each("size", [1, 64])
def test_an_update_of_one_number_near_zero_is_no_jump(tmp_path: Path, size: int) -> None:
    """A factor passes through zero at step 60; 64 values that are so small at once are a jump."""
    factor = nn.ParameterDict({"w": nn.Parameter(torch.full((size,), 0.602))})
    optimizer, path = torch.optim.SGD(factor.parameters(), lr=0.01), Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    with pl.watch(factor, optimizer, run=path, every=1):
        for _ in range(100):
            optimizer.zero_grad()
            factor["w"].sum().backward()
            optimizer.step()
    assert bool(diagnose(path, rules=["spike-forerunner"])) == (size > 1)


def test_tries_of_one_batch_are_one_loss(tmp_path: Path) -> None:
    """A loop that lowers its scale until a bad batch passes: one spike of the loss, though each try is a step."""
    loss, tries = learned(200), 30
    with RunWriter(tmp_path) as writer:
        for step in range(200 + tries):
            values = {
                "loss": 500.0 if 150 <= step <= 150 + tries else float(loss[step if step < 150 else step - tries])
            }
            if not 150 <= step < 150 + tries:
                values["retries"] = float(tries if step == 150 + tries else 0)
            writer.write(Scalars(step=step, values=values))
    view = View(Run(tmp_path))
    steps, losses = view.losses["loss"]
    assert len(steps) == 200 and int((losses == 500.0).sum()) == 1 and int(steps[losses.argmax()]) == 150 + tries
    (finding,) = diagnose(view, rules=RULE)
    assert (finding.severity, finding.since_step, finding.until_step) == ("info", 180, 180)
