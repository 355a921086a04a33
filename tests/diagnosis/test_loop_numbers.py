"""Mistakes of training loops that are known by recorded numbers, and sound loops that come near them."""

import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import phrase_of, verdict
from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support.cases import each

RULES = ["scale-oscillation", "gradients-mishandled", "optimizer-idle", "spike-forerunner"]


def judged(path: Path) -> list[Finding]:
    """The warnings and alarms of a run, each of which has words."""
    findings = [finding for finding in diagnose(path, rules=RULES) if finding.severity != "info"]
    for finding in findings:
        assert " holds" not in verdict(View(Run(path)), [finding])
    return findings


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), act()]
    return nn.Sequential(*layers[:-1])


# -- the loss scale


def run_of(folder: Path, scales: list[float], losses: list[float], skipped: set[int]) -> list[Finding]:
    """What is found in a run of these numbers."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "run"
    with RunWriter(path) as writer:
        for step, (scale, loss) in enumerate(zip(scales, losses, strict=True)):
            writer.write(Scalars(step=step, values={"scale": scale, "loss": loss}))
            if step in skipped:
                writer.write(Event(step=step, kind="skip", message="the step was skipped"))
    return judged(path)


def epochs(steps: int, falls: int, count: int, first: float = 65536.0) -> list[float]:
    """The scales of epochs that each begin at the first scale and halve it so many times."""
    return [first / 2 ** min(step, falls) for _ in range(count) for step in range(steps)]


@each("steps, falls, count, severity", [(4, 3, 40, "alarm"), (10, 6, 5, "alarm"), (100, 5, 4, "warning")])
def test_a_scaler_that_begins_again_is_named(tmp_path: Path, steps: int, falls: int, count: int, severity: str) -> None:
    scales = epochs(steps, falls, count)
    (finding,) = run_of(tmp_path, scales, [1.0] * len(scales), set())
    assert (finding.rule, finding.severity, finding.evidence["cause"]) == ("scale-oscillation", severity, "begun again")
    assert (finding.since_step, finding.evidence["resets"]) == (steps, count - 1)
    assert "jumps back to 2^16" in finding.meaning


@each(
    "scales",
    [
        epochs(100, 6, 3),  # resumed twice without its state: not again and again
        epochs(50, 0, 8),
        [*epochs(12, 8, 1), *[256.0 * 2 ** (step // 20 % 4) for step in range(160)]],  # grows by its factor
        [65536.0 / 16 ** (step // 20 % 2) for step in range(200)],  # set by hand, and kept for a while
        [65536.0 * 4.0 ** -(step % 2) for step in range(6)],
        [65536.0 / 2 ** min(step, 6) if step < 20 else 65536.0 for step in range(200)],  # set higher once, and kept
    ],
)
def test_other_scales_do_not_begin_again(tmp_path: Path, scales: list[float]) -> None:
    findings = run_of(tmp_path, scales, [1.0] * len(scales), set())
    assert [f for f in findings if f.evidence.get("cause") == "begun again"] == []


@each("power, part", [(2.0, 1e-6), (1.0, 1.0), (2.0, 1.0), (0.75, 10.0)])
def test_a_loss_that_depends_on_its_scale_is_named(tmp_path: Path, power: float, part: float) -> None:
    scales = epochs(40, 8, 1)
    losses = [1.0 + 0.1 * (step % 3) + part * scale**power for step, scale in enumerate(scales)]
    (finding,) = run_of(tmp_path, scales, losses, set(range(8)))
    assert (finding.rule, finding.severity, finding.since_step) == ("gradients-mishandled", "alarm", 0)
    assert "depends on the loss scale" in finding.meaning


@each(
    "losses, skipped",
    [
        ([2.0 + 0.5 * (-1) ** step for step in range(40)], set(range(8))),
        ([4.0 * 0.6**step for step in range(40)], set()),  # it learns: no step was skipped
        ([4.0 * 0.95**step for step in range(40)], set(range(8))),  # batches become a little easier
        ([1.0 + 1e-9 * scale**2 for scale in epochs(40, 8, 1)], set(range(8))),  # too small to matter
        ([1e4 / 8**step if step < 3 else 1.0 for step in range(40)], set(range(8))),
    ],
)
def test_losses_that_do_not_follow_the_scale_are_not(tmp_path: Path, losses: list[float], skipped: set[int]) -> None:
    assert run_of(tmp_path, epochs(40, 8, 1), losses, skipped) == []


@each("squared", [True, False])
def test_a_penalty_of_scaled_gradients_is_named_in_a_training(tmp_path: Path, squared: bool) -> None:
    model, path = mlp(8, 32, 4, act=nn.Tanh), Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20 if squared else 2.0**26)
    with pl.watch(model, optimizer, run=path, every=10):
        for _ in range(30):
            x = torch.randn(32, 8, requires_grad=True)
            with pl.emulate("fp16"):
                loss = F.cross_entropy(model(x).float(), x[:, :4].argmax(dim=1))
            (slope,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
            sizes = slope.square().sum(dim=1) if squared else slope.norm(dim=1)
            optimizer.zero_grad()
            scaler.scale(loss + sizes.mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert "depends on the loss scale" in judged(path)[0].meaning


# -- weights


def trained(
    folder: Path,
    after: Callable[[int, nn.Module, list[Tensor]], object],
    dtype: torch.dtype = torch.float32,
    *,
    rate: float = 5e-3,
    act: type[nn.Module] = nn.ReLU,
) -> list[Finding]:
    """What is found in a run after each step of which something may write the weights; it gets the first ones too."""
    model, path = mlp(8, 32, 32, 4, act=act).to(dtype), Path(tempfile.mkdtemp(dir=folder)) / "run"
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    first = [p.detach().clone() for p in model.parameters()]
    with pl.watch(model, optimizer, run=path, every=5):
        for step in range(80):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(dtype)).float(), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            with torch.no_grad():
                after(step, model, first)
    return judged(path)


def put(step: int) -> Callable[[int, nn.Module, list[Tensor]], object]:
    def back(now: int, model: nn.Module, first: list[Tensor]) -> None:
        for p, old in zip(model.parameters(), first, strict=True):
            p.copy_(old) if now == step else None

    return back


def drawn_again(now: int, model: nn.Module, first: list[Tensor]) -> None:
    for layer in model.modules():
        layer.reset_parameters() if now == 52 and isinstance(layer, nn.Linear) else None


def last_layer(now: int, model: nn.Module, first: list[Tensor]) -> None:
    """Only the last of three layers."""
    for p, old in list(zip(model.parameters(), first, strict=True))[-2:]:
        p.copy_(old) if now == 52 else None


def halfway(now: int, model: nn.Module, first: list[Tensor]) -> None:
    for p, old in zip(model.parameters(), first, strict=True):
        p.lerp_(old, 0.5) if now == 52 else None


def nothing(now: int, model: nn.Module, first: list[Tensor]) -> None:
    """Plain training."""


@each("step, dtype, act", [(52, torch.float32, nn.ReLU), (29, torch.float32, nn.Tanh), (63, torch.bfloat16, nn.ReLU)])
def test_weights_that_are_put_back_to_the_first_ones_are_named(
    tmp_path: Path, step: int, dtype: torch.dtype, act: type[nn.Module]
) -> None:
    (finding,) = trained(tmp_path, put(step), dtype, act=act)
    assert (finding.rule, finding.evidence["cause"]) == ("optimizer-idle", "weights put back")
    assert (finding.severity, finding.since_step) == ("warning", 5 * (step // 5 + 1))
    assert "overwritten" in finding.meaning


def test_a_loss_that_rises_as_weights_are_put_back_has_their_remedy(tmp_path: Path) -> None:
    model, path = mlp(8, 32, 32, 4), tmp_path / "run"
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    first = copy.deepcopy(model.state_dict())
    with pl.watch(model, optimizer, run=path, every=5):
        for step in range(240):
            if step == 201:
                model.load_state_dict(first)
                optimizer.param_groups[0]["lr"] = 0.0  # so that the loss stays that of the first weights
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
    (found,) = diagnose(path, rules=["loss-spike"])
    assert found.severity == "alarm" and found.evidence["weights_as_at_step"] == 0
    assert "older weights" in found.advice
    assert "wrote the weights of step 0 over" in phrase_of(found, View(Run(path)), [found]).remedy


@each("after", [nothing, drawn_again, last_layer, halfway])
def test_weights_that_are_drawn_again_or_put_back_in_part_are_not(tmp_path: Path, after: Any) -> None:
    assert trained(tmp_path, after) == []


def test_weights_that_hardly_move_are_not_put_back(tmp_path: Path) -> None:
    assert trained(tmp_path, put(52), rate=1e-6) == []


@each("rate, notes", [(30.0, 1), (5e-3, 0)])
def test_weights_that_are_put_back_after_the_loss_has_risen_are_a_note(tmp_path: Path, rate: float, notes: int) -> None:
    """A search for the rate ends in a divergence; without one, what was learned is lost."""
    model, path = mlp(8, 32, 32, 4), Path(tempfile.mkdtemp(dir=tmp_path)) / "run"
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    first = [p.detach().clone() for p in model.parameters()]
    with pl.watch(model, optimizer, run=path, every=5):
        for step in range(80):
            optimizer.param_groups[0]["lr"] = rate if 46 <= step < 50 else 5e-3
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(dim=1)).backward()
            optimizer.step()
            with torch.no_grad():
                put(49)(step, model, first)
    found = [f for f in diagnose(path, rules=["optimizer-idle"]) if f.evidence["cause"] == "weights put back"]
    assert [f.severity for f in found] == ["info" if notes else "warning"]
    assert ("search for the rate" in found[0].meaning) == bool(notes)


# -- betas


def stepped(
    folder: Path, model: nn.Module, made: Callable[[Any], torch.optim.Optimizer], later: float = 1.0
) -> list[Finding]:
    """What is found in a run of a classification that is learned soon, so that gradients shrink."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "run"
    optimizer = made(model.parameters())
    with pl.watch(model, optimizer, run=path, every=5):
        for step in range(120):
            optimizer.param_groups[0]["lr"] *= later if step == 20 else 1.0
            x = torch.randn(64, 8)
            optimizer.zero_grad()
            F.cross_entropy(4 * model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    return [finding for finding in judged(path) if finding.evidence.get("cause") == "betas"]


def adam(*betas: float, rate: float = 1e-2, kind: Any = torch.optim.Adam) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, lr=rate, betas=betas)


@each(
    "made, widths",
    [
        (adam(0.999, 0.9), (8, 64, 64, 2)),
        (adam(0.999, 0.9, rate=1e-3), (8, 128, 2)),
        (adam(0.99, 0.8, kind=torch.optim.AdamW), (8, 32, 32, 32, 2)),
    ],
)
def test_betas_that_let_updates_grow_are_named(tmp_path: Path, made: Any, widths: tuple[int, ...]) -> None:
    (finding,) = stepped(tmp_path, mlp(*widths), made)
    assert (finding.rule, finding.severity) == ("spike-forerunner", "warning")
    assert "betas are (0.99" in finding.meaning and finding.evidence["times_the_rate"] > 2  # type: ignore[operator]


@each(
    "made",
    [
        adam(0.9, 0.999),
        adam(0.9, 0.95, rate=3e-2),
        adam(0.5, 0.9),
        adam(0.9, 0.9),
        adam(0.95, 0.99, kind=torch.optim.AdamW),
        lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.99),
    ],
)
def test_usual_betas_are_not(tmp_path: Path, made: Any) -> None:
    assert stepped(tmp_path, mlp(8, 64, 64, 2), made) == []


def test_usual_betas_are_not_named_for_a_rate_that_grew(tmp_path: Path) -> None:
    assert stepped(tmp_path, mlp(8, 64, 64, 2), adam(0.9, 0.999, rate=1e-4), later=100.0) == []


# -- clipping that leaves the gradients of one tensor alone


class Words(nn.Module):
    """A table that begins at this size, a norm behind it, and a network."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.table, self.norm, self.net = nn.Embedding(500, 8), nn.LayerNorm(8, eps=1e-14), mlp(8, 16, 4)
        self.table.weight.data.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(self.table(x)))


@each(
    "size, optimizer, bound, is_found",
    [
        (1e-6, torch.optim.SGD, 1.0, True),
        (1e-6, torch.optim.Adam, 1.0, False),
        (1e-6, torch.optim.SGD, 1e9, False),
        (1.0, torch.optim.SGD, 0.1, False),
    ],
)
def test_gradients_that_are_clipped_to_those_of_one_tensor_are_named(
    tmp_path: Path, size: float, optimizer: type[torch.optim.Optimizer], bound: float, is_found: bool
) -> None:
    path = tmp_path / f"{size} {optimizer.__name__} {bound}"
    model = Words(size)
    steps = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    with pl.watch(model, steps, run=path, every=2):
        for _ in range(24):
            x = torch.randint(500, (32,))
            steps.zero_grad()
            F.cross_entropy(model(x), x % 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), bound)
            steps.step()
    found = [f for f in judged(path) if f.rule == "gradients-mishandled"]
    assert [f.where for f in found] == [("table.weight",)] * is_found
    for finding in found:
        assert finding.evidence["cause"] == "clipped to those of one tensor"
        assert 0.999 < float(finding.evidence["clipped_to"]) < 1.001 and float(finding.evidence["rest"]) < 0.003
