"""Operations of a script that lose what they are given, and what listening to them leaves as it was."""

import contextlib
import gc
import itertools
import multiprocessing
import operator
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.modules import module as module_file
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import plimsoll as pl
from plimsoll.diagnosis import Finding
from plimsoll.diagnosis.rules import errors
from plimsoll.diagnosis.view import View
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.watch.steps.wiring import operations
from tests.support.cases import each
from tests.support.diagnosis.trainings import watched


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something."""
    monkeypatch.setattr(operations, "has_compiler", lambda: False)


Operation = Callable[[Tensor, Tensor], Tensor]  # takes what a layer puts out, and its input
BF16, FP16 = torch.bfloat16, torch.float16
TIMES = 1_700_000_000 + torch.arange(256).reshape(32, 8)  # seconds
BYTES = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
WEIGHT = nn.Parameter(torch.linspace(1, 2, 256).reshape(32, 8))
REST = torch.zeros(32, 8, dtype=BF16)
KEPT = itertools.cycle([torch.zeros(32, 8, dtype=BF16) for _ in range(32)])
FROZEN = nn.Parameter(torch.full((32, 8), 300.0, dtype=BF16), requires_grad=False)
PLACES = torch.arange(32 * 64).reshape(32, 64)


class Scripted(nn.Module):
    """A layer, and an operation of the script on what it puts out."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.linear, self.operation = nn.Linear(8, 8), operation

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h + usable(self.operation(h, x)).tanh()


def usable(x: Tensor) -> Tensor:
    x = x.float()
    return torch.where(x.isfinite(), x, 0.0).mean()


def found(path: Path, operation: Operation, steps: int = 10) -> list[Finding]:
    torch.manual_seed(0)
    model = Scripted(operation)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(_: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(32, 8)
        (model(x) - x.roll(1, dims=1)).square().mean().backward()
        optimizer.step()

    findings = watched(path, model, optimizer, step, steps)
    assert not [event for event in pl.Run(path).events() if event.kind == "failure"]
    return [f for f in findings if f.rule == "operation-inexact"]


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def pair(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (100 + h / 4).to(BF16), (100 + x / 4).to(BF16)


def kept_sum(added: Tensor, total: Tensor) -> Tensor:
    """What Kahan's sum carries over."""
    new = total + added
    return (new - total) - added


def large() -> Tensor:
    """Numbers in BF16 that lie 2 apart, in memory of earlier steps."""
    return next(KEPT).fill_(300.0)


def compensated(added: Tensor) -> Tensor:
    """Kahan's sum in place."""
    total, rest = large(), REST
    rest.add_(added)
    old = total.clone()
    total.add_(rest)
    return rest.add_(old.sub_(total))


def at_random(x: Tensor) -> Tensor:
    """BF16, up or down by chance."""
    up = torch.randint(1 << 16, x.shape, dtype=torch.int32)
    return (x.view(torch.int32) + up & -1 << 16).view(torch.float32).to(BF16)


LOSSY: dict[str, tuple[str, Operation]] = {
    "two BF16 numbers near 100": ("a difference", lambda h, x: (100 + h / 4).to(BF16) - (100 + x / 4).to(BF16)),
    "one of them in FP32": ("a difference", lambda h, x: (100 + h / 4) - (100 + x / 4).to(BF16)),
    "one that was rounded before": ("a difference", lambda h, x: (100 + h / 4) - rounded(100 + x / 4)),
    "two FP16 numbers": ("a difference", lambda h, x: torch.sub((100 + h / 40).half(), (100 + x / 40).half())),
    "an area in FP16": ("infinite", lambda h, x: (300 + h).half() * (300 + x).half()),
    "a sum in FP16": ("infinite", lambda h, x: (2e4 + h).half().sum(dim=1, keepdim=True).expand(32, 8)),
    "squares of small numbers": ("zeros", lambda h, _: (1e-4 * h).half().square()),
    "products of small numbers": ("zeros", lambda h, x: (1e-4 * h).half() * (1e-4 * x).half()),
    "sines of places in BF16": ("sines", lambda h, _: torch.sin(PLACES.to(BF16))),
    "sines of places that were rounded": ("sines", lambda h, _: (PLACES * 0.7).to(BF16).float().sin()),
    "angles of times": ("sines", lambda h, _: torch.polar(torch.ones(32, 8), TIMES.float()).real),
    "the minute of a time": ("remainders", lambda h, _: TIMES.float() % 60),
    "a sum of codes": ("wrap", lambda h, x: (40 * x).round().clamp(-127, 127).to(torch.int8).sum(1, dtype=torch.int8)),
    "codes that are added": ("wrap", lambda h, x: (40 * x).round().clamp(-127, 127).char() + torch.tensor(100).char()),
    "pixels less their middle": ("wrap", lambda h, x: ((x.abs() * 90).clamp(max=255).byte() - 128).float()),
    "codes that are not clamped": ("beyond the range", lambda h, x: (100 * x).round().to(torch.int8)),
    "sound that is too loud": ("beyond the range", lambda h, x: torch.no_grad()(lambda: (4e4 * x).short() / 2)()),
    "a picture as bytes": ("fractions", lambda h, x: torch.no_grad()(lambda: x.sigmoid().byte() / 2)()),
    "times in FP16": ("infinite", lambda h, x: TIMES.half()),
    "large numbers cast to FP16": ("infinite", lambda h, x: (1e6 + h).to(dtype=FP16)),
    "the dtype of another tensor": ("infinite", lambda h, x: (1e6 + h).to(torch.zeros(3, dtype=FP16))),
    "a cast without a copy": ("infinite", lambda h, x: (1e6 + h).to(FP16, copy=False)),
    "a small temperature": ("infinite", lambda h, x: (1 + h.abs()).half() / 1e-6),
    "one over small numbers": ("infinite", lambda h, x: (1e-7 + 1e-7 * x.abs()).half().reciprocal()),
    "small numbers cast to FP16": ("zeros", lambda h, x: (1e-9 * h).half()),
    "an epsilon that is added": ("epsilon", lambda h, x: (x > 0).half() + 1e-8),
    "an epsilon as a bound": ("epsilon", lambda h, x: x.half().relu().clamp(min=1e-8)),
    "what large sums are given": ("sums", lambda h, x: large().add_(x.to(BF16))),
    "small parts for large sums": ("sums", lambda h, x: torch.no_grad()(lambda: large().add_(h + 9, alpha=0.01))()),
    "an average that moves slowly": ("sums", lambda h, x: large().lerp_(x.to(BF16), 0.001)),
    "an average that can only stay": ("sums", lambda h, x: large().mul_(0.999).add_(x.to(BF16), alpha=0.001)),
    "counts of a class": ("sums", lambda h, x: [operator.iadd(large()[0], torch.ones(8)) for _ in "ab"].pop()),
}
SOUND: dict[str, Operation] = {
    "numbers in FP32": lambda h, x: (100 + h / 4) - (100 + x / 4),
    "BF16 numbers that differ": lambda h, x: h.to(BF16) - x.to(BF16),
    "probabilities less one-hot targets": lambda h, x: h.to(BF16).softmax(1) / 999 - (x > 1).to(BF16),
    "targets on a grid": lambda h, x: (20 + 0.1 * h) - (40 + x).round() / 2,
    "a path less its next point": lambda h, x: torch.linspace(0, 1, 257)[1:] - torch.linspace(0, 1, 257)[:-1],
    "scores less their own": lambda h, x: (
        h.to(BF16).float().logsumexp(1, keepdim=True).expand(32, 8) - h.to(BF16).float()
    ),
    "weights less those of before": lambda h, x: WEIGHT - (1.003 * WEIGHT.detach()).to(BF16),
    "low halves": lambda h, x: x - (x.view(torch.int32) & -65536).view(torch.float32).to(BF16),
    "an error to feed back": lambda h, x: x - at_random(x),
    "the nearest code, straight through": lambda h, x: (
        h.to(BF16) + ((h.to(BF16) * 64).round() / 64 - h.to(BF16)).detach()
    ),
    "multiples of eight": lambda h, x: (8.0 * PLACES).sin(),
    "the larger less the smaller byte": lambda h, x: torch.where(
        BYTES.flip(0) < BYTES, BYTES - BYTES.flip(0), BYTES.flip(0) - BYTES
    ),
    "what a sum has rounded away": lambda h, x: kept_sum(h.to(BF16), x.to(BF16)),
    "a hash": lambda h, x: (BYTES * 31 + BYTES.flip(0)) & 15,
    "a sum of signs": lambda h, x: h.to(BF16) + x.to(BF16),
    "a kernel that ends": lambda h, x: 1 / (1 + torch.where(PLACES == 9, 300.0, 2.0).half() ** 2),
    "a table of powers": lambda h, x: torch.full((64,), 0.8, dtype=FP16) ** torch.arange(80, 144),
    "the same BF16 numbers": lambda h, x: (100 + h).to(BF16) - (100 + h.detach()).to(BF16),
    "a number less its rounding": lambda h, x: (100 + h) - (100 + h).to(BF16),
    "a detached difference": lambda h, x: h + ((100 + h / 4).to(BF16) - (100 + x / 4).to(BF16)).detach(),
    "in a transform": lambda h, x: torch.vmap(lambda a, b: a - b)(*(y.repeat(1, 4) for y in pair(h, x))),
    "within torch's own code": lambda h, x: Normal((100 + x / 4).to(BF16), 1.0).log_prob((100 + h / 4).to(BF16)),
    "through a rounding": lambda h, x: h + (rounded(h) - h).detach(),
    "through codes": lambda h, x: h.to(BF16) + ((h * 32).round() / 32).to(BF16).sub(h.to(BF16)).detach(),
    "whole numbers in BF16": lambda h, x: (200 + 2 * x).round().to(BF16) - (200 + 1.5 * x).round().to(BF16),
    "ones less a mask": lambda h, x: torch.ones(32, 8, dtype=BF16) - (x > 0).to(BF16),
    "halves in FP32": lambda h, x: (0.5 + 1e-3 * h) - torch.full((32, 8), 0.5),
    "without a gradient": lambda h, x: torch.no_grad()(lambda: (100 + h / 4).to(BF16) - (100 + x / 4).to(BF16))(),
    "few numbers": lambda h, x: (100 + h[0, :4] / 4).to(BF16) - (100 + x[0, :4] / 4).to(BF16),
    "a mask of the smallest number": lambda h, x: h.half() + (x > 0).half() * torch.finfo(FP16).min - 7e4,
    "the sum of two masks": lambda h, x: (h - 4e4).half() + (-4e4 * (x > 0)).half(),
    "an infinite mask": lambda h, x: (x > 0).half() * 1e9,
    "what was infinite before": lambda h, x: (x.half() / 0).abs() * 2,
    "zeros beside normal numbers": lambda h, x: torch.cat([(1e-4 * h), 10 + h[:2]]).half().square(),
    "products with zeros": lambda h, x: (h > 9).half() * (1e-3 * h).half(),
    "sines of whole places": lambda h, _: PLACES.float().sin(),
    "sines of places in FP64": lambda h, _: TIMES.double().sin(),
    "the minute of whole seconds": lambda h, _: TIMES % 60,
    "a sum of codes in INT32": lambda h, x: (40 * x).round().clamp(-127, 127).to(torch.int8).sum(1, dtype=torch.int32),
    "the rest of a picture": lambda h, x: 255 - (x.abs() * 90).clamp(max=255).byte(),
    "codes that are clamped": lambda h, x: (100 * x).round().clamp(-128, 127).to(torch.int8),
    "what a bound cuts off": lambda h, x: x.to(BF16) - x.to(BF16).clamp(-1, 1),
    "one over a mask": lambda h, x: torch.where(x > 0, 1 / (x > 0).half(), 0.0),
    "a quotient by name": lambda h, x: torch.div(x.abs().half(), other=(x > 0).half()),
    "marks beyond FP16": lambda h, x: ((x > 0) * 1e9).half(),
    "a power that is bounded": lambda h, x: (1e-3 * x.abs()).half().pow(-2).clamp(max=9),
    "a bound near zero": lambda h, x: x.half().relu().clamp(max=1e-9),
    "a sum that FP16 keeps in the graph": lambda h, x: h + h.half() * 1e-9,
    "a hash in INT8": lambda h, x: (BYTES.char() * 31 + BYTES.flip(0).char()) & 15,
    "FP8 codes": lambda h, x: x.to(torch.float8_e4m3fn).half(),
    "sparse sums": lambda h, x: large().add_((x > 1).to(BF16).to_sparse()),
    "sparse products": lambda h, x: (x > 1).half().to_sparse() @ torch.ones(8, 8).half(),
    "sequences of unlike lengths": lambda h, x: torch.nested.nested_tensor([x[:9], x[9:]]).half().unbind()[0],
    "arguments by name": lambda h, x: torch.remainder(input=TIMES.float(), other=torch.tensor(60.0)),
    "the dtype of another tensor by name": lambda h, x: x.type_as(other=torch.zeros(3, dtype=FP16)),
    "a sum that is zero": lambda h, x: torch.full((32, 8), -(2.0**-11)).half() + 2.0**-11,
    "nodes without an edge": lambda h, x: (x > 0).half() ** -0.5,
    "an epsilon that FP16 holds": lambda h, x: (x > 0).half() + 1e-6,
    "an epsilon that nothing needs": lambda h, x: (1 + x.abs()).half() + 1e-8,
    "an epsilon in BF16": lambda h, x: (x > 0).to(BF16) + 1e-8,
    "a bound above": lambda h, x: x.half().relu().clamp(0, 1),
    "a mask cast to FP16": lambda h, x: (-1e9 * (x > 0)).half(),
    "small numbers beside normal ones, cast": lambda h, x: torch.cat([1e-9 * h, h]).half(),
    "what sums of the same size are given": lambda h, x: x.to(BF16).add_(x.flip(0)),
    "an epsilon for all sums": lambda h, x: large().add_(1e-3),
    "zeros for large sums": lambda h, x: large().add_(torch.zeros(32, 8)),
    "a branch that is small": lambda h, x: (300 * h).to(BF16).add_(1e-3 * x.to(BF16)),
    "weights of a copy": lambda h, x: torch.no_grad()(lambda: FROZEN.add_(1e-3 * x))(),
    "sums that take in the most": lambda h, x: large().add_(2 * x.to(BF16)),
    "an average that moves": lambda h, x: large().lerp_(x.to(BF16), 0.1),
    "sums by name": lambda h, x: large().add_(other=x.to(BF16)),
    "an average with weights of its own": lambda h, x: large().lerp_(x.to(BF16), torch.full((32, 8), 0.1).to(BF16)),
    "an average that decays": lambda h, x: large().mul_(0.9).add_(x.to(BF16), alpha=0.1),
    "an average that has arrived": lambda h, x: large().lerp_((300 + 2 * x).to(BF16), 0.1),
    "what Kahan's sum in place is given": lambda h, x: compensated(x.to(BF16)),
    "a sum of this step": lambda h, x: (300 + x).to(BF16).add_(0.1 * x.to(BF16)),
    "one number for many sums": lambda h, x: large().add_(torch.tensor(1e-3)),
    "a picture with stars": lambda h, x: (x.sigmoid() + (PLACES[:, :8] == 1)).byte(),
    "phases in INT16": lambda h, x: PLACES[:, :8].short() * 400 - 30000,
    "a dark picture": lambda h, x: (0.4 * x.sigmoid()).byte(),
    "hours of a day": lambda h, x: x.sigmoid().long(),
    "a mask as classes": lambda h, x: (x > 0).float().long(),
    "votes as classes": lambda h, x: x.sigmoid().round().long(),
    "a class that is rare": lambda h, x: (x > 9).float().long(),
    "cells of a grid": lambda h, x: (1.2 * x).long(),
    "packed nibbles": lambda h, x: ((x > 0).int() * 240 | 15).to(torch.uint8),
}


@each("name", LOSSY)
def test_an_operation_that_loses_digits_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    cause, operation = LOSSY[name]
    (finding,) = found(tmp_path / name, operation)
    line = operation.__code__.co_firstlineno
    assert cause in str(finding.evidence["cause"])
    assert str(finding.evidence["place"]).endswith(f"test_operations.py:{line}")
    assert f'"{name}"' in finding.meaning  # the text of the line
    assert finding.severity == "warning" and finding.where == ("model",) and finding.since_step == 1
    assert f"test_operations.py:{line}" in verdict(View(pl.Run(tmp_path / name)), [finding])


def test_each_way_to_lose_values_has_its_words_and_a_case() -> None:
    assert set(operations._KINDS) == set(errors._LOSSES)
    assert all(any(cause in loss.cause for cause, _ in LOSSY.values()) for loss in errors._LOSSES.values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, while they are strided
@each("names", [list(SOUND)[first : first + 10] for first in range(0, len(SOUND), 10)])
def test_sound_operations_are_not(names: list[str], tmp_path: Path) -> None:
    def operations_of_all(h: Tensor, x: Tensor) -> Tensor:
        return torch.stack([usable(SOUND[name](h, x)) for name in names])

    assert not [finding.meaning for finding in found(tmp_path / names[0], operations_of_all)]


def test_what_is_lost_in_one_of_two_steps_may_be_chance(tmp_path: Path) -> None:
    calls = 0

    def seldom(h: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        offset = 100 if calls == 2 else 0  # the first step that is looked at
        return (offset + h / 4).to(BF16) - (offset + x / 4).to(BF16)

    assert not found(tmp_path / "two", seldom)
    calls = 0
    assert found(tmp_path / "one", seldom, steps=4)  # there was no second one


class Evaluated(nn.Module):
    """Attention, whose fast path in evaluation mode is another sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)) - x.to(BF16)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def trained(run: Path | None, around: Callable[[int], contextlib.AbstractContextManager[object]]) -> list[Tensor]:
    torch.manual_seed(0)
    model, teacher = Evaluated(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    optimizer = torch.optim.Adam(model.parameters())
    watch = contextlib.nullcontext() if run is None else pl.watch(model, optimizer, run=run, quiet=True)
    results: list[Tensor] = []
    with watch:
        for step in range(10):
            with around(step):
                x = torch.randn(4, 6, 8)
                with torch.no_grad():
                    target = teacher(x)
                loss = (model(x) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            results += [target, loss.detach()]
    return [*results, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "nothing": contextlib.nullcontext,
    "a mode": Passing,
    "a device": lambda: torch.device("cpu"),
}


@each("name", AROUND)
def test_a_training_is_the_same_and_nothing_stays(name: str, tmp_path: Path) -> None:
    def around(_: int) -> contextlib.AbstractContextManager[object]:
        return AROUND[name]()

    hooks = len(module_file._global_forward_pre_hooks)
    bare, observed = trained(None, around), trained(tmp_path / name, around)
    assert all(torch.equal(a, b) for a, b in zip(bare, observed, strict=True))
    assert not _get_current_function_mode_stack() and len(module_file._global_forward_pre_hooks) == hooks


def test_modes_of_the_script_that_end_in_any_order(tmp_path: Path) -> None:
    """One is entered while ours listens, and left only later: ours waits for it, and the training listens again."""
    model = Scripted(LOSSY["an area in FP16"][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mode = Passing()
    with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for step in range(40):
            if step == 1:
                mode.__enter__()
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()
            if step == 3:
                assert len(_get_current_function_mode_stack()) == 2
                mode.__exit__(None, None, None)
    assert not _get_current_function_mode_stack()
    assert any(f.rule == "operation-inexact" for f in pl.diagnose(tmp_path / "run"))


def test_a_mode_around_the_step_alone(tmp_path: Path) -> None:
    """It leaves the stack while ours would listen, and expects to be on top."""
    model = Scripted(LOSSY["an area in FP16"][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for _ in range(4):
            model(torch.randn(32, 8)).square().mean().backward()
            with Passing():
                optimizer.step()
            assert not _get_current_function_mode_stack()


class Counting(TorchDispatchMode):
    """Counts the operations that the check's own calculations need and no script here does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += "frexp" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operations_of_the_script_alone(tmp_path: Path) -> None:
    with Counting() as counting:
        assert found(tmp_path / "run", LOSSY["two BF16 numbers near 100"][1])
    assert not counting.seen


def test_nothing_within_a_transform_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a transform have no data of their own, and are of no use after it."""
    lines: list[int] = []
    monkeypatch.setattr(operations.Operations, "_look_at", lambda self, site, call: lines.append(site.line))
    found(tmp_path / "run", SOUND["in a transform"])
    assert lines and SOUND["in a transform"].__code__.co_firstlineno not in lines


def test_a_loop_leaves_looks_for_what_comes_after_it(tmp_path: Path) -> None:
    def operation(h: Tensor, x: Tensor) -> Tensor:
        total = x.to(BF16)
        for _ in range(600):
            total = total - 0.5 * h.to(BF16)
        return (300 + h).half() * (300 + x).half()

    (finding,) = found(tmp_path / "run", operation)
    assert "infinite" in str(finding.evidence["cause"])


def test_what_was_seen_keeps_no_model_alive(tmp_path: Path) -> None:
    model = Scripted(LOSSY["an area in FP16"][1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pl.watch(model, optimizer, run=tmp_path / "run", quiet=True)
    for _ in range(4):
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None and pl.Run(tmp_path / "run").closed


def test_an_error_while_it_listens_leaves_no_mode(tmp_path: Path) -> None:
    model = Scripted(lambda h, x: h)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
            for step in range(4):
                model(torch.randn(32, 8 + (step == 1))).square().mean().backward()
                optimizer.step()

    with pytest.raises(RuntimeError, match="shapes"):
        train()
    assert not _get_current_function_mode_stack()


def test_a_defect_of_the_check_costs_the_check_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(operations, "_frame_of_script", broken)
    with (
        pytest.warns(RuntimeWarning, match="Operations._returned failed"),
        pytest.raises(AssertionError, match="failed"),
    ):
        found(tmp_path / "run", LOSSY["an area in FP16"][1])
    assert len(pl.Run(tmp_path / "run").steps) == 10


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, under any mode
def test_a_function_whose_first_compilation_comes_while_it_listens(tmp_path: Path) -> None:
    def losses(run: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        function = torch.compile(lambda h, x: ((h - x) ** 2).mean(), fullgraph=True, backend="aot_eager")
        values: list[float] = []
        with contextlib.nullcontext() if run is None else pl.watch(model, optimizer, run=run, quiet=True):
            for step in range(4):
                x = torch.randn(32, 8)
                loss = model(x).square().mean() if step == 0 else function(model(x), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                values.append(float(loss.detach()))
        return values

    bare = losses(None)
    torch.compiler.reset()
    assert losses(tmp_path / "run") == bare


SCRIPT = """
import sys, torch, plimsoll as pl
from torch import nn
if len(sys.argv) > 2:
    torch.compile(torch.neg, backend="eager")
model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
with pl.watch(model, optimizer, run=sys.argv[1], quiet=True):
    for _ in range(10):
        optimizer.zero_grad()
        ((300 + model(torch.randn(32, 8))).half() ** 2).tanh().float().mean().backward()
        optimizer.step()
print([finding.evidence.get("place") for finding in pl.diagnose(sys.argv[1])])
"""


def test_a_script_is_listened_to_unless_it_compiles(tmp_path: Path) -> None:
    """Torch would compile a second time, without ours."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for arguments, said in ((["one"], True), (["two", "compiled"], False)):
        script = [sys.executable, "train.py", *arguments]
        done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ("'train.py:11'" in done.stdout) is said


def load(_: int) -> int:
    return len(_get_current_function_mode_stack())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_that_are_forked_while_it_listens_do_not(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", quiet=True):
        for step in range(3):
            if step == 1:
                assert len(_get_current_function_mode_stack()) == 1
                with multiprocessing.get_context("fork").Pool(1) as pool:
                    assert pool.map(load, [0]) == [0]
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()
