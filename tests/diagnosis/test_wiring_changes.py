"""Trainings whose wiring changes on the way: frozen, replaced and cast weights, and states that are lost."""

import copy
import functools
import math
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import phrase_of
from plimsoll.runs import Run
from tests.support.cases import each
from tests.support.diagnosis.faults import wired
from tests.support.diagnosis.stories import make_story
from tests.support.diagnosis.trainings import adamw, seeded_mlp

# -- frozen weights that an optimizer steps on


def frozen_at(path: Path, *, to_none: bool, decay: float = 0.1, from_step: int = 6) -> list[Finding]:
    """What is said of a training whose first layers are frozen in the middle."""
    model = seeded_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay, betas=(0.0, 0.999))
    with pl.watch(model, optimizer, run=path, every=2, quiet=True):
        for step in range(24):
            if step == from_step:
                for p in (*model[0].parameters(), *model[2].parameters()):  # type: ignore[index]
                    p.requires_grad_(False)
            optimizer.zero_grad(set_to_none=to_none)
            nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
            optimizer.step()
    return [f for f in diagnose(path) if f.severity != "info"]


def test_frozen_weights_that_are_stepped_on_are_named_alone(tmp_path: Path) -> None:
    (found,) = frozen_at(tmp_path / "zeros", to_none=False)
    assert (found.rule, found.since_step) == ("gradients-mishandled", 6)
    assert "0.weight, 0.bias and 2 more are frozen" in found.meaning and "set_to_none=True" in found.advice
    for name, more in (("none", {"to_none": True}), ("nothing moves", {"to_none": False, "decay": 0.0})):
        assert frozen_at(tmp_path / name, **more) == [], name
    assert frozen_at(tmp_path / "from the start", to_none=False, from_step=0) == []


# -- casts that autocast keeps


def under_autocast(
    path: Path, *, whole: bool | None, cache: bool = True, train_it: bool = True, accumulate: int = 1
) -> set[str]:
    """The weights of which old casts are named, in a training with autocast around each forward, and around it all."""
    model, autocast = seeded_mlp(), functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=cache)
    optimizer = adamw(model)
    around = nullcontext() if whole is None else autocast(enabled=whole)
    with pl.watch(model, optimizer, run=path), around:
        for _ in range(6):
            for _ in range(accumulate):
                x = torch.randn(16, 8)
                with autocast():
                    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))
                loss.backward()
            if train_it:
                optimizer.step()
            optimizer.zero_grad()
    return {name for finding in diagnose(path, rules=["casts-stale"]) for name in finding.where}


def test_casts_that_outlast_a_step_are_named(tmp_path: Path) -> None:
    weights = {name for name, _ in seeded_mlp().named_parameters()}
    assert under_autocast(tmp_path / "whole", whole=True) == weights
    assert under_autocast(tmp_path / "micro", whole=True, accumulate=2) == weights
    assert under_autocast(tmp_path / "disabled", whole=False) == weights  # it counts as outermost all the same


@each(
    "case",
    [
        {"whole": None},
        {"whole": None, "accumulate": 3},
        {"whole": True, "cache": False},
        {"whole": True, "train_it": False},  # no weight is written
    ],
)
def test_casts_of_the_present_weights_are_not(case: dict[str, bool], tmp_path: Path) -> None:
    assert under_autocast(Path(tempfile.mkdtemp(dir=tmp_path)), **case) == set()


def test_forwards_on_threads_of_their_own_are_not(tmp_path: Path) -> None:
    model, autocast = seeded_mlp(), functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    optimizer = adamw(model)

    def loss() -> Tensor:
        x = torch.randn(16, 8)
        with autocast():
            return nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1))

    with pl.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(6):
            with ThreadPoolExecutor(1) as threads:  # whose operations are counted from 0
                threads.submit(loss).result().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(tmp_path / "run", rules=["casts-stale"]) == []


# -- a state that is lost


def with_states(
    path: Path, lost_every: int, *, steps: int = 40, made_again: bool = False, **arguments: Any
) -> list[Finding]:
    """The findings on a training whose optimizer's state is cleared, or whose optimizer is made again."""
    model = seeded_mlp()
    optimizer = adamw(model, **arguments)
    with pl.watch(model, optimizer, run=path, every=4):
        for step in range(steps):
            if step and step % lost_every == 0:
                if made_again:
                    optimizer = adamw(model, **arguments)
                else:
                    optimizer.state.clear()
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(path, rules=["state-cleared"])


class Branches(nn.Module):
    """Four equal branches, two of which add little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches, self.scales = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), [0.01, 0.01, 1.0, 1.0]

    def forward(self, x: Tensor) -> Tensor:
        for scale, branch in zip(self.scales, self.branches, strict=True):
            x = x + scale * branch(x)
        return x[:, :4]


States = dict[int, Any]
Load = Callable[[Branches, Any, list[States]], States | None]


def with_loaded(path: Path, load: Load, *, watched_from: int = 0, at: int = 22, **arguments: Any) -> list[Finding]:
    """The findings on a training into which other states are loaded, or which is watched from there on."""
    model, kept = Branches(), list[States]()
    optimizer = adamw(model, **arguments)
    with ExitStack() as watched:
        for step in range(at + 20):
            if step == watched_from and step != at:
                watched.enter_context(pl.watch(model, optimizer, run=path, every=4, quiet=True))
            state = load(model, optimizer, kept) if step == at else None
            if state is not None:
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            if step == watched_from == at:
                watched.enter_context(pl.watch(model, optimizer, run=path, every=4, quiet=True))
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, 4:].argmax(dim=1)).backward()
            optimizer.step()
            kept.append(copy.deepcopy(optimizer.state_dict()["state"]))
    return diagnose(path, rules=["state-cleared"])


def reversed_order(model: Branches, optimizer: Any, kept: list[States]) -> States:
    return {place: kept[-1][(place + 4) % 8] for place in range(8)}


def cleared(model: Branches, optimizer: Any, kept: list[States]) -> None:
    optimizer.state.clear()


def really_exchanged(model: Branches, optimizer: Any, kept: list[States]) -> None:
    model.scales.reverse()


def a_little(model: Branches, optimizer: Any, kept: list[States]) -> States:
    return {place: kept[-1][place ^ 2] for place in range(8)}


@each(
    "case",
    [
        {"lost_every": 5, "made_again": False},
        {"lost_every": 5, "made_again": True},
        {"load": reversed_order},
        {"load": reversed_order, "watched_from": 22},
    ],
)
def test_a_state_that_is_lost_every_few_steps_or_of_others_is_named(case: dict[str, Any], tmp_path: Path) -> None:
    path, train = Path(tempfile.mkdtemp(dir=tmp_path)), with_loaded if "load" in case else with_states
    (finding,) = train(path, **case)
    assert finding.severity == "warning"
    if "load" in case:
        assert finding.since_step == (24 if case.get("watched_from", 0) == 0 else 0)
        assert {"branches.0.weight", "branches.1.bias"} <= set(finding.where)
        assert "have had the optimizer's states of others" in phrase_of(finding, View(Run(path)), [finding]).what
    else:
        assert finding.since_step == 15
        assert finding.evidence == {"optimizer": "AdamW", "steps": 5}


@each(
    "case",
    [
        {"lost_every": 15},  # twice
        {"lost_every": 99},
        {"lost_every": 12, "betas": (0.8, 0.9), "steps": 64},  # longer than its means go back
        {"load": lambda _, __, kept: kept[-1]},
        {"load": lambda _, __, kept: kept[2]},  # brought back
        {"load": lambda _, __, kept: kept[-1], "watched_from": 22},
        {"load": a_little},  # of others that are as large
        {"load": cleared},
        {"load": cleared, "watched_from": 22},
        {"load": really_exchanged},
        {"load": really_exchanged, "betas": (0.8, 0.9)},
    ],
)
def test_a_state_that_lasts_is_not(case: dict[str, Any], tmp_path: Path) -> None:
    train = with_loaded if "load" in case else with_states
    assert [str(f) for f in train(Path(tempfile.mkdtemp(dir=tmp_path)), **case)] == []


@each("drawn", [False, True])
@each("cleared", [False, True])
def test_a_cross_validation_begins_again_without_a_warning(cleared: bool, drawn: bool, tmp_path: Path) -> None:
    model, path = seeded_mlp(), Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    with pl.watch(model, optimizer, run=path, every=4):
        for _ in range(4):
            model.load_state_dict(first)
            if drawn:
                model.apply(lambda layer: layer.reset_parameters() if hasattr(layer, "reset_parameters") else None)
            if cleared:
                optimizer.state.clear()
            else:
                optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
            for _ in range(32):
                x = torch.randn(64, 8)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
                optimizer.step()
    found = diagnose(path, rules=["state-cleared", "optimizer-idle", "loss-spike"])
    assert {f.severity for f in found} <= {"info"}
    if cleared and not drawn:
        assert any(f.meaning.endswith("another training of the same model.") for f in found)


def test_an_optimizer_around_another_has_no_state_to_lose(tmp_path: Path) -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {"lr": 1.0})
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    model, path = seeded_mlp(), tmp_path / "run"
    optimizer = Around(adamw(model))
    with pl.watch(model, optimizer, run=path, every=4):
        for _ in range(24):
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(path, rules=["state-cleared", "optimizer-idle"]) == []


def test_an_optimizer_without_a_state_is_not(tmp_path: Path) -> None:
    class Signs(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad.sign(), alpha=-1e-3)

    model = seeded_mlp()
    optimizer = Signs(model.parameters(), {"betas": (0.9, 0.999)})
    with pl.watch(model, optimizer, run=tmp_path / "run"):
        for _ in range(20):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(tmp_path / "run", rules=["state-cleared"]) == []


# -- layers that are replaced, or unfrozen, during the training


def with_a_change(path: Path, change: Callable[[nn.Sequential, torch.optim.Optimizer], object]) -> list[Finding]:
    """What is said of parameters without an optimizer, in a training that changes the model at step 20."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with pl.watch(model, optimizer, run=path, every=5):
        for step in range(50):
            if step == 20:
                change(model, optimizer)
            x = torch.randn(16, 8)
            nn.functional.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            model.zero_grad()
    return diagnose(path, rules=["untrained-parameters"])


def replaced(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[4] = nn.Linear(16, 4)


def replaced_and_added(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    replaced(model, optimizer)
    optimizer.add_param_group({"params": list(model[4].parameters())})


def unfrozen(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)


@pytest.mark.filterwarnings("ignore:.*are in no optimizer.*")
def test_a_layer_that_is_new_and_in_no_optimizer_is_named(tmp_path: Path) -> None:
    (finding,) = with_a_change(tmp_path / "replaced", replaced)
    assert (finding.severity, set(finding.where)) == ("warning", {"4.weight", "4.bias"})
    assert 20 < finding.since_step < 45 and finding.evidence["cause"] == "in no optimizer"
    (finding,) = with_a_change(tmp_path / "unfrozen", unfrozen)
    assert set(finding.where) == {"0.weight", "0.bias"}


def test_a_layer_that_is_new_and_given_to_the_optimizer_is_not(tmp_path: Path) -> None:
    assert with_a_change(tmp_path / "run", replaced_and_added) == []


# -- a loss over the wrong axis, or at chance


def classified(
    path: Path,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module | None = None,
    *,
    steps: int = 4,
    classes: int = 4,
    scaler: Any = None,
    lr: float = 1e-3,
    rows: Callable[[], Tensor] = lambda: torch.randn(16, 8),
) -> list[Finding]:
    """What the rules of losses say of a training on random labels."""
    model = seeded_mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with pl.watch(model, optimizer, run=path, every=2, quiet=True):
        for _ in range(steps):
            loss = loss_of(model(rows()), torch.randint(classes, (16,)))
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
    assert "failure" not in {event.kind for event in Run(path).events()}  # of the watch itself
    return diagnose(path, rules=["loss-wrong-axis", "loss-at-chance"])


F = nn.functional
AXES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "over the rows": (lambda z, y: F.nll_loss(F.log_softmax(z, dim=0), y), "16 rows"),
    "from the end": (lambda z, y: F.nll_loss(F.log_softmax(z, dim=-2).double(), y), "16 rows"),
    "places made rows": (
        lambda z, y: F.nll_loss(F.log_softmax(z.view(4, 4, 4), dim=1).reshape(-1, 4), y),
        "4 rows",
    ),
    "with more terms": (lambda z, y: z.square().mean() + F.nll_loss(F.log_softmax(z, dim=0), y), "16 rows"),
    "over the classes": (lambda z, y: F.nll_loss(F.log_softmax(z, dim=-1), y), ""),
    "places with classes last": (lambda z, y: F.nll_loss(F.log_softmax(z.view(4, 4, 4), -1).view(-1, 4), y), ""),
    "pictures": (lambda z, y: F.cross_entropy(z.view(4, 4, 4), y.view(4, 4)), ""),
    "pictures by hand": (
        lambda z, y: F.nll_loss(F.log_softmax(z.view(4, 4, 2, 2), dim=1), y.view(4, 2, 2)),
        "",
    ),
    "over a picture's rows": (
        lambda z, y: F.nll_loss(F.log_softmax(z.view(4, 4, 2, 2), dim=-1), y.view(4, 2, 2)),
        "2 rows",
    ),
    "both ways, of pairs": (
        lambda z, y: F.cross_entropy(z @ z.T, torch.arange(16)) + F.cross_entropy((z @ z.T).T, torch.arange(16)),
        "",
    ),
    "N x 1 and N": (lambda z, y: (z[:, :1].contiguous().clone() - y).square().mean(), "16 outputs"),
    "N and N x 1": (lambda z, y: (y[:, None] - z.mean(dim=1)).abs().mean() / 2, "16 outputs"),
    "a loss function": (lambda z, y: F.smooth_l1_loss(z.mean(dim=1, keepdim=True), y.float()), "16 outputs"),
    "weights of rows": (
        lambda z, y: (z.mean(dim=1, keepdim=True).square() * y).sum() + z.abs().mean(),
        "16 outputs",
    ),
    "one shape": (lambda z, y: (z.mean(dim=1) - y).square().mean(), ""),
    "of columns": (lambda z, y: (z - torch.ones(4)).square().mean(), ""),
    "pairs that are wanted": (lambda z, y: (z[:, :1] - z[:, 1:2].T).relu().mean(), ""),
    "a number": (lambda z, y: (1 - z.mean(dim=1, keepdim=True)).square().mean(), ""),
}


@each("name", list(AXES))
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_over_the_wrong_axis_is_named(name: str, tmp_path: Path) -> None:
    (loss_of, said), run = AXES[name], tmp_path / name
    found = [f for f in classified(run, loss_of) if f.rule == "loss-wrong-axis"]
    phrases = [phrase_of(f, View(Run(run)), found).what for f in found]
    assert len(found) == bool(said) and all(said in phrase for phrase in phrases), phrases


class Far(nn.Module):
    """Scores that begin large."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.inner, self.size = seeded_mlp(), size

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.size


@each("scaled", [False, True])
def test_a_loss_that_begins_far_above_guessing_is_named(scaled: bool, tmp_path: Path) -> None:
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    tmp_path = Path(tempfile.mkdtemp(dir=tmp_path))
    (found,) = classified(tmp_path / "far", F.cross_entropy, Far(300.0), scaler=scale)
    assert found.evidence["cause"] == "begins far off" and found.evidence["loss"] > 4 * math.log(4)
    assert classified(tmp_path / "near", F.cross_entropy, Far(3.0), scaler=scale) == []
    (part,) = classified(tmp_path / "micro-batch", lambda z, y: F.cross_entropy(z, y) / 8, Far(300.0), scaler=scale)
    assert part.evidence["loss"] == pytest.approx(found.evidence["loss"], rel=1e-3)
    # Of a loss with weights, smoothed labels or further terms nobody knows what guessing costs.
    for n, loss_of in enumerate((
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
        lambda z, y: F.cross_entropy(z, y, weight=torch.ones(4)),
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
        lambda z, y: F.cross_entropy(z, y) + 0 * z.sum(),
        lambda z, y: F.cross_entropy(z, y) * z.mean(),
    )):  # fmt: skip
        assert classified(tmp_path / str(n), loss_of, Far(300.0)) == []


@each(
    ("rows", "is_named"),
    [
        (lambda: torch.randint(256, (16, 8)).float(), True),
        (lambda: torch.randint(256, (16, 8)).half().float(), True),
        (lambda: torch.randint(256, (16, 8)) / 255, False),
        (lambda: torch.randint(-128, 128, (16, 8)).float(), False),
        (lambda: torch.randint(510, (16, 8)) / 2, False),
        (lambda: torch.randint(1000, (16, 8)).float(), False),
        (lambda: torch.randint(128, (16, 8)).float(), False),
        (lambda: torch.full((16, 8), math.nan), False),
    ],
)
def test_bytes_that_are_not_scaled_are_named_as_the_cause(
    rows: Callable[[], Tensor], is_named: bool, tmp_path: Path
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path))
    found = classified(path, F.cross_entropy, Far(300.0), rows=rows)
    assert any(f.evidence.get("input") == "model:input" for f in found) is is_named
    if is_named:
        assert "divide pixels by 255" in found[0].advice
        assert "whole numbers up to 255" in phrase_of(found[0], View(Run(path)), found).what


def test_a_loss_that_stays_at_chance_is_named_and_one_that_leaves_it_is_a_note(tmp_path: Path) -> None:
    (found,) = classified(tmp_path / "random", F.cross_entropy, Far(0.1), steps=200)
    assert (found.severity, found.since_step, found.until_step) == ("warning", 0, 199)
    behind = Far(0.1)
    behind.inner[:4].requires_grad_(False)  # type: ignore[union-attr]
    (found,) = classified(tmp_path / "behind frozen layers", F.cross_entropy, behind, steps=200, lr=0.3)
    assert found.where == ("inner.0.weight", "inner.2.weight") and "strict=True" in found.advice
    words = phrase_of(found, View(Run(tmp_path / "behind frozen layers")), [found]).what
    assert words.endswith("over frozen layers that are as they were drawn")
    assert classified(tmp_path / "short", F.cross_entropy, Far(0.1), steps=190) == []
    leaves = make_story(
        samples=60, events=(wired("classes", 0, classes=4),), loss=lambda s: math.log(4) / max(1, s / 220)
    )
    (left,) = diagnose(leaves.write(tmp_path / "leaves"), rules=["loss-at-chance"])
    assert left.severity == "info" and 200 <= left.until_step < 240


@each(
    ("loss", "severity"),
    [
        (lambda s: 1.2 if s < 100 else 1.2 + (s - 100) * 0.1, "warning"),  # a slow rise
        (lambda s: 1.2 if s < 100 or s > 200 else 9.0, "info"),  # and back
        (lambda s: 1.2 if s < 100 or s > 125 else 9.0, ""),  # one window
        (lambda s: 1.2 if s < 100 else 2.0, ""),  # above guessing, and not far
        (lambda s: max(1.2, 20.0 - 0.1 * s), ""),  # it has never been below
    ],
)
def test_a_loss_that_rises_far_above_guessing_is_named(
    loss: Callable[[int], float], severity: str, tmp_path: Path
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path))
    story = make_story(samples=60, events=(wired("classes", 0, classes=4),), loss=loss)
    found = diagnose(story.write(path), rules=["loss-at-chance"])
    assert [f.severity for f in found] == ([severity] if severity else [])
    for finding in found:
        assert 100 <= finding.since_step <= 150 and (severity != "info" or finding.until_step == 199)
        assert ("has risen to" in phrase_of(finding, View(Run(path)), found).what) and finding.evidence["loss"] > 2.7


@each(
    ("loss", "update", "cause"),
    [
        (lambda s: 1.38 - s / 3000, 1e-5, "weights hardly move"),  # it has left that of guessing, by a tenth or less
        (lambda s: 6.0 + 0.1 * (s % 3), 1e-5, "weights hardly move"),  # far above it
        (lambda s: 1.38 - s / 3000, 1e-3, ""),  # weights have moved
        (lambda s: 1.38 - s / 1000, 1e-5, ""),  # by more
        (lambda s: 6.0 - s / 200, 1e-5, ""),  # it falls
        (lambda s: 1.1, 1e-5, ""),  # a trained model
        (lambda s: 6.0, 1e-3, ""),  # something else is wrong
    ],
)
def test_weights_that_hardly_move_are_named_at_any_loss_of_no_use(
    loss: Callable[[int], float], update: float, cause: str, tmp_path: Path
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path))
    story = make_story(
        samples=60, events=(wired("classes", 0, classes=4),), loss=loss, update_ratio=lambda name, s: update
    )
    warned = [f for f in diagnose(story.write(path), rules=["loss-at-chance"]) if f.severity == "warning"]
    assert [f.evidence["cause"] for f in warned] == ([cause] if cause else [])
    for finding in warned:
        assert (finding.since_step, finding.until_step) == (0, 299) and "Raise the learning rate" in finding.advice
        assert "has hardly moved" in phrase_of(finding, View(Run(path)), warned).what


def test_weights_whose_updates_rounding_takes_are_not_asked_for_a_larger_rate(tmp_path: Path) -> None:
    def judged(name: str, unmoved: float) -> list[Finding]:
        story = make_story(
            samples=60, events=(wired("classes", 0, classes=4),), loss=lambda s: 6.0, weight_fmt="bf16",
            update_ratio=lambda layer, s: 1e-5, unmoved=lambda layer, s: unmoved,
        )  # fmt: skip
        return diagnose(story.write(tmp_path / name), rules=["loss-at-chance", "updates-swallowed"])

    assert [f.rule for f in judged("rounded away", 0.97)] == ["updates-swallowed"]
    assert [f.rule for f in judged("small", 0.01)] == ["loss-at-chance"]


# -- schedules, and batch norms that keep the last batch


def scheduled(path: Path, schedule: Callable[[Any], Any], steps: int = 26, every: int = 1) -> list[Finding]:
    """What is said of the learning rate of a training."""
    model = seeded_mlp()
    optimizer = adamw(model, lr=0.1)
    scheduler = schedule(optimizer)
    with pl.watch(model, optimizer, run=path, every=5, quiet=True):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            if step % every == every - 1:
                scheduler.step()
    return diagnose(path, rules=["schedule-past-end"])


cosine, restarts = torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
SCHEDULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a cosine": (lambda o: cosine(o, 12), True),
    "a custom one": (
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / 12)), True,
    ),
    "after a warm-up": (
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o, 0.01, 1.0, 5), cosine(o, 10)], [5]
        ),
        True,
    ),
    "as long as the training": (lambda o: cosine(o, 26), False),
    "a step too many": (lambda o: cosine(o, 25), False),
    "with restarts": (lambda o: restarts(o, 12), False),
    "with restarts at a lower peak": (
        lambda o: torch.optim.lr_scheduler.LambdaLR(
            o, lambda n: 0.7 ** (n // 12) * (0.5 + 0.5 * math.cos(math.pi * (n % 12) / 11))
        ),
        False,
    ),
    "a warm-up and a plain decay": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=27), False),
    "a triangle that stays above": (
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=6, cycle_momentum=False), False,
    ),
}  # fmt: skip


@each("name", list(SCHEDULES))
def test_a_rate_that_has_come_to_its_end_and_rises_again_is_named(name: str, tmp_path: Path) -> None:
    schedule, named = SCHEDULES[name]
    found = scheduled(tmp_path / name, schedule)
    assert len(found) == named
    if found:
        (finding,) = found
        assert 11 <= finding.since_step <= 16 and "length of the whole training" in finding.advice


def test_a_rate_that_changes_once_an_epoch_is_judged_alike(tmp_path: Path) -> None:
    (finding,) = scheduled(tmp_path / "run", lambda o: cosine(o, 4), steps=40, every=5)
    assert finding.since_step == 20
    assert scheduled(tmp_path / "restarts", lambda o: restarts(o, 4), steps=40, every=5) == []


@each(
    ("norm", "named"),
    [
        ({"momentum": 0.99}, True),
        ({"momentum": 0.1}, False),
        ({"momentum": None}, False),  # the mean of all batches
        ({"momentum": 0.99, "track_running_stats": False}, False),
    ],
)
def test_a_batch_norm_that_keeps_the_last_batch_is_named(norm: dict[str, Any], named: bool, tmp_path: Path) -> None:
    for training in (True, False):
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, **norm), nn.Linear(16, 4))
        optimizer = adamw(model)
        if not training:
            model[1].eval()
        path = Path(tempfile.mkdtemp(dir=tmp_path))
        with pl.watch(model, optimizer, run=path, every=1, quiet=True):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
        found = diagnose(path, rules=["norm-of-few-values"])
        assert [f.where for f in found] == ([("1:output",)] if named and training else [])


# -- losses that are given something else


def regression(last: Callable[[Tensor], Tensor], shift: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: F.mse_loss(last(z.mean(dim=1)), torch.linspace(0.1, 0.9, len(y)) + shift)


GIVEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "kl_div of probabilities": (lambda z, y: F.kl_div(z.softmax(1), torch.full_like(z, 0.25)), "kl_div takes log"),
    "with targets as logarithms": (
        lambda z, y: F.kl_div(z.softmax(1), torch.full_like(z, -1.4), log_target=True, reduction="batchmean") / 2,
        "kl_div takes log",
    ),
    "a divergence with a temperature": (
        lambda z, y: z.abs().mean() + 4 * F.kl_div((z / 2).softmax(1), torch.full_like(z, 0.25), reduction="sum"),
        "kl_div takes log",
    ),
    "weights of probabilities": (lambda z, y: (0.25 - torch.full_like(z, 0.25) * z.softmax(1)).square().mean(), ""),
    "weighted differences": (lambda z, y: (torch.ones_like(z) * (z.softmax(1) - torch.ones_like(z))).mean(), ""),
    "a share that is right": (lambda z, y: 1 - (F.one_hot(y, 4) * z.softmax(1)).sum(dim=1).mean(), ""),
    "kl_div of logarithms": (lambda z, y: F.kl_div(z.log_softmax(1), torch.full_like(z, 0.25)), ""),
    "nll_loss of scores": (F.nll_loss, "nll_loss takes log"),
    "an empty batch": (lambda z, y: F.nll_loss(z[:0], y[:0], reduction="sum") + z.sum(), ""),
    "nll_loss of probabilities": (lambda z, y: F.nll_loss(z.softmax(1), y) + z.norm(), "nll_loss takes log"),
    "nll_loss of logarithms": (lambda z, y: F.nll_loss(z.log_softmax(1), y), ""),
    "cross entropy of one sure class": (lambda z, y: F.cross_entropy(z * 1e4, y), ""),
    "below a ReLU": (regression(torch.relu, -1.0), "reach of a ReLU"),
    "a ReLU and counts": (regression(torch.relu, 0.0), ""),
    "beyond a sigmoid": (regression(torch.sigmoid, 0.5), "reach of a sigmoid"),
    "a sigmoid and shares": (regression(torch.sigmoid, 0.0), ""),
    "beyond a tanh": (lambda z, y: F.smooth_l1_loss(z.mean(1).tanh(), 2.0 * y), "reach of a tanh"),
    "a few outliers": (
        lambda z, y: F.mse_loss(z.tanh().flatten(), torch.cat([torch.zeros(62), torch.full((2,), 9.0)])),
        "",
    ),
    "a linear layer": (regression(lambda x: x, 5.0), ""),
    "a ReLU before the last layer": (lambda z, y: F.mse_loss(z.relu() @ torch.ones(4), -1.0 - y), ""),
}


@each("name", list(GIVEN))
@pytest.mark.filterwarnings("ignore:reduction")
def test_a_loss_that_is_given_something_else_is_named(name: str, tmp_path: Path) -> None:
    (loss_of, said), run = GIVEN[name], tmp_path / name
    classified(run, loss_of)
    found = diagnose(run, rules=["probabilities-as-logits", "targets-out-of-reach"])
    phrases = [phrase_of(f, View(Run(run)), found).what for f in found]
    assert len(found) == bool(said) and all(said in phrase for phrase in phrases), phrases


# -- layers that torch does not see


class Kept(nn.Module):
    """Layers in a container that the case chooses."""

    def __init__(self, kept: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = kept([nn.Linear(8, 8), nn.Linear(8, 4)])
        self.history = [0.0] * 1000

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = self.layers
        for layer in kept.values() if isinstance(kept, dict) else kept:
            x = layer(x.relu() if layer.in_features == 8 else x)
        return self.first(x) if x.shape[1] == 8 else x + self.first(torch.ones(8)).sum()


KEPT: dict[str, tuple[Callable[[list[nn.Module]], Any], str]] = {
    "a list": (list, "layers[0].weight"),
    "a dict": (lambda made: {"a": made[0], "b": made[1]}, "layers[a].weight"),
    "a ModuleList": (nn.ModuleList, ""),
    "frozen ones": (lambda made: [layer.requires_grad_(False) for layer in made], ""),
}


@each("name", list(KEPT))
@pytest.mark.filterwarnings("ignore:.*in no optimizer")
def test_layers_in_a_plain_container_are_named(name: str, tmp_path: Path) -> None:
    kept, hidden = KEPT[name]
    for own in (False, True):  # an optimizer of the layers' own trains them
        torch.manual_seed(0)
        model, path = Kept(kept), Path(tempfile.mkdtemp(dir=tmp_path))
        optimizers = [adamw(model)]
        if own and hidden:
            layers: Any = model.layers
            each_layer = layers.values() if isinstance(layers, dict) else layers
            optimizers.append(torch.optim.SGD([p for layer in each_layer for p in layer.parameters()], lr=1e-3))
        with pl.watch(model, optimizers[0], run=path, every=2, quiet=True):
            for _ in range(16):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        found = diagnose(path, rules=["untrained-parameters"])
        named = [name for finding in found if finding.severity == "warning" for name in finding.where]
        assert (hidden in named and len(named) == 4) if hidden and not own else named == [], (own, named)
        assert not named or "ModuleList" in found[0].advice
