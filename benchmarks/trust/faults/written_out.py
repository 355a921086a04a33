"""Mistakes in operations that a script writes out, by an author who had not read the rules.

With `sound` they are left out. The comment above each has what was measured after the last step.
"""

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.common import NAN, TOO_LARGE
from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.faults.precision_traps import FLUSHED
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import mlp
from benchmarks.trust.training import Training

INEXACT = rf"{FEW}|precision|b(f|float)16|cancel"
STOPS = (
    r"round|swallow|absorb|\blost\b|precision|b(f|float)16|\b25[67]\b|stuck|stall|\bstops?\b|constant|no longer"
    r"|(not|never|hardly|cannot) (grow|move|change|add|count)"
)
ELSEWHERE = f"{SIDE}|learning rate|swallow|in no optimizer"
NO_UPDATE = f"{SIDE}|learning rate|updates-swallowed|in no optimizer"  # for terms that a sum swallows
Rows = Callable[[int], tuple[Tensor, ...]]


def _net(into: int, width: int, out: int) -> nn.Sequential:
    return mlp(into, width, width, out, act=nn.GELU)


def _adam(model: nn.Module, rate: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate)


def _error(run: Training, of: Callable[[], Tensor]) -> None:
    """Note how far off the trained model is."""
    with torch.no_grad():
        run.measures.append(float(of()))


def _regress(run: Training, model: nn.Module, rows: Rows, steps: int, *, size: int = 128, rate: float = 3e-3) -> None:
    """Train by the square error of random rows, the last tensor of which is the target, and note that of new rows."""

    def error(count: int) -> Tensor:
        *x, y = rows(count)
        return F.mse_loss(model(*x)[:, 0], y)

    run.train(model, _adam(model, rate), lambda step: error(size), steps)
    model.eval()
    _error(run, lambda: error(4096))


class Field(nn.Module):
    """A function of one coordinate, from sines and cosines of its multiples."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.net = _net(16, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        frequencies = (2.0 ** torch.arange(8)).to(self.dtype) * math.pi
        angles = x.to(self.dtype)[:, None] * frequencies
        return self.net(torch.cat([angles.sin(), angles.cos()], dim=-1).float())


# Square error at the end: 0.0131 with the fault, 0.00044 without.
@fault(
    "angles-of-an-encoding-in-bf16",
    named=either(
        r"angles?|phases?|sin|cos|sines?|cosines?|sinusoid\w*|encod\w*|fourier|coordinates?|frequenc\w*|products?"
        r"|mul|multip(l\w*)|inputs?",
        INEXACT,
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def angles(run: Training, *, sound: bool = False) -> None:
    """Angles up to 128 pi of a Fourier encoding are BF16, where numbers lie 2 apart: sines are those of others."""

    def rows(count: int) -> tuple[Tensor, ...]:
        x = torch.rand(count)
        return x, torch.sin(2 * math.pi * 13 * x) + 0.5 * torch.sin(2 * math.pi * 31 * x + 1)

    _regress(run, Field(torch.float32 if sound else torch.bfloat16), rows, 300, size=256)


# Square error at the end: 0.508 with the fault, 0.000036 without.
@fault(
    "seconds-of-the-day-in-bf16",
    named=either(
        r"seconds?|time of day|timestamps?|clock|minutes?|phases?|remainder|modulo|fmod|sin|cos|sines?|cosines?"
        r"|integers?|whole numbers?|features?|inputs?|casts?",
        rf"{INEXACT}|\b256\b",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def seconds(run: Training, *, sound: bool = False) -> None:
    """Seconds of the day are cast to BF16 before their remainder by 60: near 60,000 its numbers lie 256 apart."""

    def rows(count: int) -> tuple[Tensor, ...]:
        second = torch.randint(0, 86400, (count,))
        time = second.to(torch.float32 if sound else torch.bfloat16)
        minute, day = (time % 60) * (2 * math.pi / 60), time * (2 * math.pi / 86400)
        x = torch.stack([minute.sin(), minute.cos(), day.sin(), day.cos()], dim=-1).float()
        exact = second.double()
        y = torch.sin(2 * math.pi * exact / 60) + 0.5 * torch.cos(2 * math.pi * exact / 86400)
        return x, y.float()

    _regress(run, _net(4, 48, 1), rows, 200)


def _overlap(a: Tensor, b: Tensor) -> Tensor:
    """What two boxes share of what they cover together, from corners in pixels."""
    sides = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
    shared, one, other = (s[:, 0] * s[:, 1] for s in (sides, a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]))
    return shared / (one + other - shared)


# Share of wrong answers at the end: 0.494 with the fault, 0.130 without.
@fault(
    "anchors-matched-by-areas-in-fp16",
    named=r"65,?504|\bareas?\b|"
    + either(
        r"overlaps?|iou|intersections?|unions?|box(es)?|anchors?|products?|mul|multip(l\w*)|sums?|add|divisions?|div"
        r"|values?|results?|operations?|fp16|float16|half",
        TOO_LARGE,
    ),
    misleading=ELSEWHERE,
    held_back=True,
)
def anchors(run: Training, *, sound: bool = False) -> None:
    """Areas of boxes are FP16 where anchors are matched: beyond 65,504 they are infinite, and no such anchor counts."""
    model, dtype = _net(8, 64, 1), torch.float32 if sound else torch.float16

    def boxes(count: int) -> tuple[Tensor, Tensor, Tensor]:
        centre = torch.rand(count, 2) * 300 + 400
        size = torch.exp(torch.empty(count, 2).uniform_(math.log(40), math.log(700)))
        truth = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
        anchor = truth + torch.randn(count, 4) * 0.2 * size.repeat(1, 2) * torch.rand(count, 1)
        centre, size = (truth[:, :2] + truth[:, 2:]) / 2, truth[:, 2:] - truth[:, :2]
        x = torch.cat([(anchor - truth) / size.repeat(1, 2), size.log() - 5, centre / 500 - 1], dim=-1)
        return x, anchor, truth

    def loss(step: int) -> Tensor:
        x, anchor, truth = boxes(128)
        matched = _overlap(anchor.to(dtype), truth.to(dtype)) > 0.7
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], matched.float())

    run.train(model, _adam(model), loss, 250)
    x, anchor, truth = boxes(4096)
    _error(run, lambda: ((model(x)[:, 0] > 0) != (_overlap(anchor, truth) > 0.7)).float().mean())


def _returns(rewards: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of all later rewards, each step's worth 0.999 of the one before."""
    rewards, discount = rewards.to(dtype), torch.tensor(0.999, dtype=dtype)
    total, totals = torch.zeros(rewards.shape[1], dtype=dtype), []
    for step in reversed(range(len(rewards))):
        total = rewards[step] + discount * total
        totals.append(total)
    return torch.stack(totals[::-1])


# Square error at the end: 0.0123 with the fault, 0.0022 without.
@fault(
    "discounted-returns-in-bf16",
    named=either(
        r"returns|discount\w*|gamma|rewards?|sums?|running|accumulat\w*|additions?|add|totals?|recurren\w*|targets?",
        rf"{STOPS}|{INEXACT}",
    )
    + r"|0\.999",
    misleading=NO_UPDATE,
    held_back=True,
)
def returns(run: Training, *, sound: bool = False) -> None:
    """Returns are added up in BF16, step by step: a discount of 0.999 rounds to 1 there, and small rewards are lost."""
    model = _net(4, 48, 1)

    def episodes() -> tuple[Tensor, Tensor]:
        rate, time = torch.rand(16) * 2, torch.linspace(0, 1, 200)[:, None].expand(200, 16)
        rewards = rate[None] * (1 + 0.3 * torch.randn(200, 16))
        return torch.stack([rate.expand(200, 16), time, rate * time, time * time], dim=-1), rewards

    def error(dtype: torch.dtype) -> Tensor:
        states, rewards = episodes()
        return F.mse_loss(model(states)[..., 0], _returns(rewards, dtype).float() / 100)

    run.train(model, _adam(model), lambda step: error(torch.float32 if sound else torch.bfloat16), 150)
    _error(run, lambda: torch.stack([error(torch.float32) for _ in range(10)]).mean())


# Share of wrong answers, each class alike, at the end: 0.361 with the fault, 0.202 without.
@fault(
    "class-counts-in-bf16",
    named=either(
        r"counts?|counters?|counted|class (weights?|shares?)|index_add_?|sums?|running|accumulat\w*|additions?|add"
        r"|totals?",
        STOPS,
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def counts(run: Training, *, sound: bool = False) -> None:
    """Rows of each class are counted in BF16, where 256 and 1 are 256: in the end all classes seem equally common."""
    dtype = torch.float32 if sound else torch.bfloat16
    model, centres, shares = _net(8, 32, 3), torch.randn(3, 8) * 0.5, torch.tensor([0.9, 0.07, 0.03])
    counted = torch.ones(3, dtype=dtype)

    def loss(step: int) -> Tensor:
        y = torch.multinomial(shares, 128, replacement=True)
        x = centres[y] + torch.randn(128, 8)
        counted.index_add_(0, y, torch.ones(128, dtype=dtype))
        weight = (counted.sum() / (3 * counted)).float()
        return F.cross_entropy(model(x), y, weight=weight)

    run.train(model, _adam(model), loss, 300)
    y = torch.arange(3).repeat(2000)
    x = centres[y] + torch.randn(6000, 8)
    _error(run, lambda: (model(x).argmax(-1) != y).float().mean())


class Codebook(nn.Module):
    """The nearest of 64 entries, by distances that are lengths minus products."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.entries = nn.Parameter(10 + torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        """An entry a row."""
        rows, entries = x.to(self.dtype), self.entries.to(self.dtype)
        distances = (rows * rows).sum(1, keepdim=True) - 2 * rows @ entries.T + (entries * entries).sum(1)
        return self.entries[distances.argmin(1)]


# Square error at the end: 0.258 with the fault, 0.0828 without.
@fault(
    "distances-to-a-codebook-in-bf16",
    named="cancel|"
    + either(
        r"distances?|nearest|argmin|codebook|choices?|chosen|differences?|subtract\w*|sub|lengths?|squares?|matmul",
        rf"{INEXACT}|negative|\bties?\b",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def codebook(run: Training, *, sound: bool = False) -> None:
    """Distances to entries of a codebook are lengths minus products in BF16: near 1,600 these are multiples of 8."""
    model, centres = Codebook(torch.float32 if sound else torch.bfloat16), 10 + torch.randn(48, 8)

    def error(count: int) -> Tensor:
        x = centres[torch.randint(0, 48, (count,))] + 0.2 * torch.randn(count, 8)
        return (model(x) - x).square().mean()

    run.train(model, _adam(model, 2e-2), lambda step: error(256), 200)
    _error(run, lambda: error(4096))


class BySquares(nn.Module):
    """A layer norm whose variance is the mean of squares minus the square of the mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x.to(self.dtype)
        mean = h.mean(-1, keepdim=True)
        variance = (h * h).mean(-1, keepdim=True) - mean * mean
        return ((h - mean) * torch.rsqrt(variance.clamp(min=0) + 1e-3)).float()


# Square error at the end: 0.0229 with the fault, 0.0019 without.
@fault(
    "variance-of-a-row-by-squares-in-bf16",
    named="cancel|"
    + either(
        r"variances?|deviations?|(?<!gradient )norms?|normali[sz]\w*|differences?|subtract\w*|sub|squares?",
        rf"{INEXACT}|negative",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def variance(run: Training, *, sound: bool = False) -> None:
    """A norm by hand takes E[x2] - E[x]2 in BF16 of rows near 10: a variance of 1 is a difference of rounded 100s."""
    model, mix = nn.Sequential(BySquares(torch.float32 if sound else torch.bfloat16), _net(16, 48, 1)), torch.randn(16)

    def rows(count: int) -> tuple[Tensor, ...]:
        z = torch.randn(count, 16)
        z = (z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True)
        return 10 + 2 * torch.randn(count, 1) + z, torch.tanh(z @ mix / 2)

    _regress(run, model, rows, 250)


class Mixture(nn.Module):
    """The likeliest of eight normal distributions of 256 numbers."""

    def __init__(self, means: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.means = nn.Parameter(means)

    def forward(self, x: Tensor) -> Tensor:
        """A place of a distribution a row."""
        z = x[:, None].to(self.dtype) - self.means.to(self.dtype)
        return (-0.5 * z * z - 0.5 * math.log(2 * math.pi)).sum(-1).argmax(1)


# Share of wrong answers at the end: 0.206 with the fault, 0.163 without.
@fault(
    "likelihoods-added-up-in-bf16",
    named="cancel|"
    + either(
        r"(log-?)?likelihoods?|log-?prob\w*|sums?|reductions?|argmax|choices?|chosen|assign\w*|scores?|differences?",
        rf"{INEXACT}|\bties?\b|apart",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def likelihoods(run: Training, *, sound: bool = False) -> None:
    """Log-likelihoods of 256 numbers are summed in BF16: near -360 its numbers lie 2 apart, and the likeliest tie."""
    centres = torch.randn(8, 256) * 0.16
    model = Mixture(centres + torch.randn(8, 256) * 0.05, torch.float32 if sound else torch.bfloat16)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        which = torch.randint(0, 8, (count,))
        return centres[which] + torch.randn(count, 256), which

    def loss(step: int) -> Tensor:
        x, _ = rows(128)
        return (x - model.means[model(x)]).square().sum(1).mean()

    run.train(model, _adam(model, 1e-2), loss, 200)
    x, which = rows(8192)
    _error(run, lambda: (model(x) != which).float().mean())


# Share of wrong answers of the chosen checkpoint: 0.381 with the fault, 0.142 without.
@fault(
    "right-answers-counted-in-bf16",
    named=either(
        r"counts?|counters?|counted|correct|right answers|accurac(y|ies)|validation|metrics?|sums?|running"
        r"|accumulat\w*|additions?|add_?|totals?",
        STOPS,
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def validation(run: Training, *, sound: bool = False) -> None:
    """Right answers of a validation are counted in BF16, which stops at 2,048 of 4,096: an early checkpoint wins."""
    model, mix = _net(8, 64, 4), torch.randn(8, 4)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8)
        return x, (torch.sin(x) @ mix).argmax(-1)

    checked, answers = rows(512 * 8)
    best, kept = torch.tensor(-1.0), model.state_dict()

    @torch.no_grad()
    def validate() -> None:
        nonlocal best, kept
        correct = torch.zeros((), dtype=torch.float32 if sound else torch.bfloat16)
        for x, y in zip(checked.split(8), answers.split(8), strict=True):
            correct += (model(x).argmax(-1) == y).sum().to(correct.dtype)
        accuracy = correct / len(answers)
        if accuracy > best:
            best, kept = accuracy.clone(), copy.deepcopy(model.state_dict())

    def loss(step: int) -> Tensor:
        if step % 10 == 0:
            validate()
        x, y = rows(128)
        return F.cross_entropy(model(x), y)

    run.train(model, _adam(model, 1e-3), loss, 200)
    chosen, (x, y) = _net(8, 64, 4), rows(4096)
    chosen.load_state_dict(kept)
    _error(run, lambda: (chosen(x).argmax(-1) != y).float().mean())


# Square error at the end: 0.171 with the fault, 0.00033 without.
@fault(
    "difference-of-frames-in-uint8",
    named=r"wrap|uint8|unsigned|"
    + either(
        r"differences?|subtract\w*|sub|frames?|inputs?", r"overflow|negative|modulo|\b25[56]\b|\bsigns?\b|8[- ]bit"
    ),
    misleading=ELSEWHERE,
)
def frames(run: Training, *, sound: bool = False) -> None:
    """The difference of two frames is taken in unsigned bytes: what is below zero wraps to numbers up to 255."""

    def rows(count: int) -> tuple[Tensor, ...]:
        first = torch.randint(30, 220, (count, 64))
        second = (first + (torch.randn(count, 1) * 4 + torch.randn(count, 64) * 12).round()).clamp(0, 255)
        y = (second - first).float().mean(1) / 4
        first, second = first.to(torch.uint8), second.to(torch.uint8)
        return ((second.float() - first.float()) if sound else (second - first).float()) / 32, y

    _regress(run, _net(64, 64, 1), rows, 250, rate=2e-3)


# Loss at the end: 0.504 with the fault, 0.451 without.
@fault(
    "gradients-beyond-the-int8-codes",
    named=r"wrap|int8|8[- ]bit|" + either("gradients?|codes?", r"overflow|\bsigns?\b|modulo|clamp|\b12[78]\b"),
    misleading=ELSEWHERE,
    held_back=True,
)
def gradients(run: Training, *, sound: bool = False) -> None:
    """Gradients are INT8 codes with a scale from a percentile, not clamped: the largest wrap to the other sign."""
    model, mix = _net(16, 48, 4), torch.randn(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.watch(model, optimizer)

    def value(count: int) -> Tensor:
        x = torch.randn(count, 16)
        return F.cross_entropy(model(x), (torch.sin(x) @ mix).argmax(-1))

    for _ in range(250):
        loss = value(128)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            scale = torch.quantile(p.grad.abs(), 0.98) / 127 + 1e-12
            codes = (p.grad / scale).round()
            p.grad = (codes.clamp(-127, 127) if sound else codes).to(torch.int8).float() * scale
        optimizer.step()
        run.losses.append(float(loss.detach()))
    _error(run, lambda: value(4096))


class OneScale(nn.Module):
    """Inputs as INT8 codes, with one scale for all columns or one for each."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        largest = x.abs().amax(0, keepdim=True) if self.each else x.abs().max()
        scale = largest / 127 + 1e-12
        return (x / scale).round().clamp(-127, 127).to(torch.int8).float() * scale


class Quantised(nn.Module):
    """A network over inputs from INT8, each in its unit."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.codes, self.net = OneScale(each=each), _net(12, 48, 1)
        self.register_buffer("unit", torch.tensor([1e-3] + [1.0] * 11))

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        return self.net(self.codes(x) * self.unit)


# Square error at the end: 0.439 with the fault, 0.0043 without.
@fault(
    "one-int8-scale-for-all-columns",
    named=r"(one|single|shared|same) scale|per[- ](channel|column|feature)|"
    + either(
        r"inputs?|features?|columns?|channels?|activations?|quanti\w*|int8|8[- ]bit",
        rf"{FLUSHED}|distinct|outliers?|dominat|times (larger|as large|the)",
    ),
    misleading=ELSEWHERE,
    held_back=True,
)
def columns(run: Training, *, sound: bool = False) -> None:
    """All columns have one INT8 scale, and one column is a thousand times larger: the others are rounded to zero."""
    mix = torch.randn(12) / 3

    def rows(count: int) -> tuple[Tensor, ...]:
        x = torch.randn(count, 12)
        y = torch.sin(x @ mix)
        x[:, 0] *= 1000
        return x, y

    _regress(run, Quantised(each=sound), rows, 200)


class Pairs(nn.Module):
    """A table with a row for each pair of a user and an item."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.table, self.out = nn.Embedding(1024 + 8, 8), nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """One number a row."""
        index = (user.to(self.dtype) * 32 + item.to(self.dtype)).long()
        return self.out(self.table(index))


# Square error at the end: 0.534 with the fault, 0.00026 without.
@fault(
    "index-of-a-pair-in-bf16",
    named=either(
        r"index\w*|indices|ids?|integers?|whole numbers?|long|int64|embeddings?|tables?|lookups?|additions?|add|sums?",
        rf"{INEXACT}|\b256\b|exact|collide|collision|wrong row",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def pairs(run: Training, *, sound: bool = False) -> None:
    """The index of a pair is computed in BF16, which has few whole numbers above 256: up to four items share a row."""
    wanted = torch.randn(32, 32)

    def rows(count: int) -> tuple[Tensor, ...]:
        user, item = torch.randint(0, 32, (2, count))
        return user, item, wanted[user, item]

    _regress(run, Pairs(torch.float32 if sound else torch.bfloat16), rows, 200, size=256, rate=3e-2)


class RunningNorm(nn.Module):
    """A batch norm by hand, with running statistics in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=dtype))
        self.register_buffer("var", torch.ones(8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.training:
            mean, variance = x.mean(0), x.var(0)
            with torch.no_grad():
                self.mean.mul_(0.99).add_(0.01 * mean.to(self.mean.dtype))
                self.var.mul_(0.99).add_(0.01 * variance.to(self.var.dtype))
        else:
            mean, variance = self.mean.float(), self.var.float()
        return (x - mean) * torch.rsqrt(variance + 1e-5)


# Square error at the end: 0.8 with the fault, 0.0541 without.
@fault(
    "statistics-of-a-norm-by-hand-in-bf16",
    named=either(
        r"running|statistics?|buffers?|averages?|moving|batch ?norm|momentum|accumulat\w*|0\.mean|0\.var",
        rf"{STOPS}|never reach|lag",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def statistics(run: Training, *, sound: bool = False) -> None:
    """Running statistics of a batch norm by hand are BF16: changes of a hundredth are rounded, and never arrive."""
    model = nn.Sequential(RunningNorm(torch.float32 if sound else torch.bfloat16), _net(8, 48, 1))
    mix = torch.randn(8) / 2

    def rows(count: int) -> tuple[Tensor, ...]:
        z = torch.randn(count, 8)
        return 5 + 1.3 * z, torch.sin(z @ mix)

    _regress(run, model, rows, 300)


# Reward that is missed at the end: 2.42 with the fault, 0.0225 without.
@fault(
    "squares-of-rewards-in-fp16",
    named=r"65,?504|"
    + either(
        r"squares?|sums?|rewards?|returns|advantages?|running|accumulat\w*|additions?|add_?|divisions?|div|products?"
        r"|values?|results?|operations?|fp16|float16|half",
        TOO_LARGE,
    ),
    misleading=ELSEWHERE,
    held_back=True,
)
def rewards(run: Training, *, sound: bool = False) -> None:
    """Rewards are divided by the root of a sum of squares in FP16: it is soon infinite, and all rewards are zero."""
    dtype = torch.float32 if sound else torch.float16
    model, mix = _net(4, 32, 4), torch.randn(4, 4)
    squares, seen = torch.zeros((), dtype=dtype), 0

    def loss(step: int) -> Tensor:
        nonlocal squares, seen
        state = torch.randn(128, 4)
        likelihood = F.log_softmax(model(state), -1)
        action = torch.multinomial(likelihood.detach().exp(), 1)
        reward = 20 * (state @ mix).gather(1, action)[:, 0]
        squares += reward.to(dtype).square().sum()
        seen += len(reward)
        scaled = (reward.to(dtype) / (squares / seen).sqrt()).float()
        return -(likelihood.gather(1, action)[:, 0] * scaled).mean()

    run.train(model, _adam(model, 5e-3), loss, 250)
    state = torch.randn(4096, 4)
    worth = state @ mix

    def missed() -> Tensor:
        return (worth.amax(1) - worth.gather(1, model(state).argmax(1, keepdim=True))[:, 0]).mean()

    _error(run, missed)


class Decaying(nn.Module):
    """A state after 100 small steps of Euler's method, in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.logarithms = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        rates, state = self.logarithms.exp().to(self.dtype), x.to(self.dtype)
        for _ in range(100):
            state = state - 0.004 * rates * state
        return state.float()


# Relative error of the rates at the end: 0.238 with the fault, 0.00031 without.
@fault(
    "steps-of-euler-in-bf16",
    named=either(
        r"states?|euler|simulat\w*|integra(t\w*)|subtract\w*|sub|additions?|add|sums?|differences?|increments?|terms?"
        r"|addends?|recurren\w*|accumulat\w*",
        rf"{STOPS}|smaller than (half )?(a |the |its )?(spacing|unit|gap)",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def euler(run: Training, *, sound: bool = False) -> None:
    """A simulated state is BF16, and each of 100 steps takes off about 0.4 percent: rounding decides what is left."""
    model, rates = Decaying(torch.float32 if sound else torch.bfloat16), torch.tensor([0.5, 1.0, 1.7, 3.0])

    def loss(step: int) -> Tensor:
        x = torch.rand(32, 4) + 0.5
        return F.mse_loss(model(x), x * (1 - 0.004 * rates) ** 100)

    run.train(model, _adam(model, 2e-2), loss, 150)
    _error(run, lambda: ((model.logarithms.exp() - rates) / rates).abs().mean())


# Loss at the end: 4.01 with the fault, 0.211 without.
@fault(
    "one-minus-a-probability-in-bf16",
    named=r"1 ?- ?p\b|one minus|cancel|saturat|\blogarithms?\b|\beps(ilon)?\b|1e-0?7|"
    + either(
        r"sigmoid|log|subtract\w*|sub|rsub|differences?|(binary )?cross[ -]entropy|likelihoods?",
        rf"{INEXACT}|swallow|exactly|\b(0|1|zero|one)\b",
    ),
    misleading=NO_UPDATE,
    held_back=True,
)
def one_minus(run: Training, *, sound: bool = False) -> None:
    """A binary cross entropy by hand has BF16 probabilities: above 0.998 they are 1, and no gradient corrects them."""
    model, mix, dtype = _net(8, 48, 1), torch.randn(8), torch.float32 if sound else torch.bfloat16
    nn.init.constant_(model[-1].bias, 8.0)

    def rows(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 8)
        return x, (torch.sin(x) @ mix > 0).float()

    def loss(step: int) -> Tensor:
        x, y = rows(128)
        p, y = torch.sigmoid(model(x)[:, 0].to(dtype)), y.to(dtype)
        return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).float().mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, 300)
    x, y = rows(4096)
    _error(run, lambda: F.binary_cross_entropy_with_logits(model(x)[:, 0], y))


class RootMeanSquare(nn.Module):
    """An RMS norm by hand, in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x.to(self.dtype)
        return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-10).clamp(max=6e4)).float()


# Square error at the end: 0.0509 with the fault, 0.0372 without.
@fault(
    "squares-of-small-features-in-fp16",
    named=either(
        r"squares?|rms\w*|(?<!gradient )norms?|normali[sz]\w*|root mean square|features?|inputs?|products?|mul"
        r"|multip(l\w*)|mean|layer 0|eps(ilon)?|1e-10",
        FLUSHED,
    ),
    misleading=ELSEWHERE,
    held_back=True,
)
def small_squares(run: Training, *, sound: bool = False) -> None:
    """An RMS norm by hand is FP16: squares of features near 0.0001 become zero, and so does its epsilon of 1e-10."""
    dtype = torch.float32 if sound else torch.float16
    model, mix = nn.Sequential(RootMeanSquare(dtype), _net(12, 48, 1)), torch.randn(12) / 2

    def rows(count: int) -> tuple[Tensor, ...]:
        z = torch.randn(count, 12)
        return z * 10 ** torch.empty(count, 1).uniform_(-4, -2), torch.sin(z @ mix)

    _regress(run, model, rows, 250)


class Eighth(nn.Module):
    """A linear layer with weights in E4M3, whose scale is that of the first step or of each."""

    def __init__(self, into: int, out: int, *, renewed: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, into) * 0.06), nn.Parameter(torch.zeros(out))
        self.renewed = renewed
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        if self.scale is None or self.renewed:
            self.scale = 448 / self.weight.detach().abs().max()
        code = (self.weight * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / self.scale
        return F.linear(x, self.weight + (code - self.weight).detach(), self.bias)


# Square error at the end: 0.292 with the fault, 0.00056 without.
@fault(
    "e4m3-scale-of-the-first-weights",
    named=r"saturat|\bstale\b|\b448\b|"
    + either(
        r"weights?|scales?|e4m3|fp8|float8|casts?",
        rf"(?<!gradient )\bclip(s|ped)\b|clamp|overflow|beyond|exceed|out of range|(never|not) (renewed|updated)|{NAN}",
    ),
    misleading=ELSEWHERE,
    held_back=True,
)
def first_scale(run: Training, *, sound: bool = False) -> None:
    """Weights in E4M3 keep the scale of the first step: those that grow beyond it are clamped there."""
    layers = [Eighth(into, out, renewed=sound) for into, out in ((8, 48), (48, 48), (48, 1))]
    model, mix = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2]), torch.randn(8) / 3
    layers[-1].weight.data.mul_(0.02)

    def rows(count: int) -> tuple[Tensor, ...]:
        z = torch.randn(count, 8)
        return z, torch.sin(z @ mix) * 2

    _regress(run, model, rows, 300)


# Square error at the end: 1,108 with the fault, 147 without.
@fault(
    "norm-to-clip-by-in-fp16",
    named=r"65,?504|"
    + either(
        r"norms?|squares?|sums?|clip\w*|coefficient|gradients?|products?|operations?|fp16|float16|half",
        TOO_LARGE,
    )
    + "|"
    + either(r"clip\w*|coefficient", r"\b(zeros?|0|nothing)\b"),
    misleading=ELSEWHERE,
    held_back=True,
)
def clip_norm(run: Training, *, sound: bool = False) -> None:
    """The norm to clip by is FP16: beyond 65,504 the sum of squares is infinite, and all gradients become zero."""
    dtype = torch.float32 if sound else torch.float16
    model, mix = _net(8, 48, 1), torch.randn(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.watch(model, optimizer)

    def value(count: int) -> Tensor:
        x = torch.randn(count, 8)
        return (model(x)[:, 0] - 60 * torch.sin(x @ mix / 2)).square().mean()

    for _ in range(250):
        loss = value(128)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.to(dtype).square().sum() for p in model.parameters())).float()
        factor = (20 / (norm + 1e-6)).clamp(max=1)
        for p in model.parameters():
            p.grad.mul_(factor)
        optimizer.step()
        run.losses.append(float(loss.detach()))
    _error(run, lambda: value(4096))
