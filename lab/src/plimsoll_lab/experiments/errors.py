"""Experiment `errors` (E1, E2): what rounding does to training by its bias and its noise, as mechanisms.

Each mechanism is planted: a small model is put under the conditions that its paper names, and beside it a control that
lacks one of them. `plimsoll.microscope` and recorded shadow steps measure the errors, and rules judge the runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from plimsoll.diagnosis import diagnose
from plimsoll.emulate import emulate
from plimsoll.errors import ArgumentError
from plimsoll.microscope import microscope
from plimsoll.runs import Run
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import claims
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.statistics import columns
from plimsoll_lab.study import Experiment, Kind

STEPS, FULL_STEPS, FEWEST_STEPS = 100, 400, 20
DRAWS = 16

Numbers = dict[str, float]


# -- E1: attention ----------------------------------------------------------------------------------------------------

_CLASSES, _WIDTH, _BATCH = 8, 32, 16
_RATE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Head(Kind):
    """A way to compute an attention head.

    Attributes:
        ties: Whether each token has a second one with the same key and another value, so that scores tie.
        shifts: Whether the maximum is moved off tied scores before the exponential, as the paper does.
        rounds: Whether the weights, the values and their product are in BF16. They are in FP32 otherwise.
        sign: Sign of the outputs' gradient. The outputs are negative.
    """

    ties: bool = True
    shifts: bool = False
    rounds: bool = True
    sign: float = -1.0


HEADS = (
    Head(name="tied", title="attention in BF16, tied scores"),
    Head(name="shifted", title="the same, maximum shifted", shifts=True),
    Head(name="single", title="attention in BF16, one largest score", ties=False),
    Head(name="wide", title="attention in FP32, tied scores", rounds=False),
    Head(name="opposed", title="attention in BF16, tied, gradient of the other sign", sign=1.0),
)


class Attention(nn.Module):
    """Causal attention in the order of flash attention: P V first, and its division by the sums of rows last.

    The gradient of the sums of rows then has the rounded P V in it, as the row sums of dO * O in flash attention's
    backward have. Query and key read a token's class, and the value is -2.3 and what else the token has.
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head
        self.query, self.key = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))
        self.value = nn.Linear(_WIDTH, _WIDTH)
        self.product = nn.Identity()
        with torch.no_grad():
            for parameter in (self.query.weight, self.key.weight, self.value.weight):
                parameter.zero_()
            self.query.weight[:_CLASSES, :_CLASSES] = torch.eye(_CLASSES)
            self.key.weight[:_CLASSES, _CLASSES : 2 * _CLASSES] = torch.eye(_CLASSES)
            self.value.weight[:, 2 * _CLASSES :] = 0.0375 * torch.randn(_WIDTH, _WIDTH - 2 * _CLASSES)
            self.value.bias.fill_(-2.3)
        for frozen in (self.key, self.value):
            frozen.requires_grad_(False)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores, those of later tokens next to minus infinity."""
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (self.query(x) @ self.key(x).transpose(-1, -2)).masked_fill(later, -1e30)

    def forward(self, x: Tensor) -> Tensor:
        """Return what attention puts out."""
        scores = self.scores(x)
        weights = (scores - self._subtracted(scores.detach())).exp()
        product: Tensor = self.product(self._rounded(self._rounded(weights) @ self._rounded(self.value(x))))
        return product / weights.sum(-1, keepdim=True)

    def _subtracted(self, scores: Tensor) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        if not self.head.shifts:
            return largest
        tied = (scores >= largest - 1e-3).sum(-1, keepdim=True) > 1
        return torch.where(tied, (2 * largest).clamp(min=0), largest)

    def _rounded(self, x: Tensor) -> Tensor:
        """Return BF16's values. The gradient passes as it is: this is about the forward's rounding alone."""
        return x + (x.to(torch.bfloat16).to(x.dtype) - x).detach() if self.head.rounds else x


def tokens(ties: bool, generator: torch.Generator) -> Tensor:
    """Return sequences in which each class is there once, or twice if scores are to tie.

    A token scores 13 to 16 with each of its class and 0 with all others. So the others add 1e-6 of a value to P V: too
    little for its last place, and enough to break a tie, always in the same direction.
    """
    times = 2 if ties else 1
    classes = [torch.rand(_BATCH, _CLASSES, generator=generator).argsort(1) for _ in range(times)]
    known = functional.one_hot(torch.cat(classes, 1), _CLASSES).float()
    loudness = 13 + 3 * torch.rand(_BATCH, times * _CLASSES, 1, generator=generator)
    rest = torch.randn(_BATCH, times * _CLASSES, _WIDTH - 2 * _CLASSES, generator=generator)
    return torch.cat([known * loudness, known, rest], -1)


def attention(head: Head, bench: Bench, steps: int) -> tuple[Training, Numbers]:
    """Look at a head through the microscope, then train its query."""
    torch.manual_seed(bench.seed)
    generator = torch.Generator().manual_seed(bench.seed)
    model = Attention(head)
    batches = [tokens(head.ties, generator) for _ in range(DRAWS)]

    def loss(x: Tensor) -> Tensor:
        return head.sign * model(x).mean()

    report = microscope(model, [lambda x=x: loss(x) for x in batches], draws=DRAWS)
    query = report.row("query.weight", "gradients")
    numbers = {
        "along": report.row("product:output", "activations").along_reference,
        "bias": query.bias.estimate / max(query.noise, 1e-30),
        "bias_low": query.bias.low / max(query.noise, 1e-30),
    }

    @torch.no_grad()
    def largest() -> float:
        return float(model.scores(batches[0]).amax(-1).mean())

    before = largest()
    optimizer = optim.SGD([model.query.weight], lr=_RATE)
    series = _trained(
        model, optimizer, bench, head.name, steps, lambda _: loss(tokens(head.ties, generator)), lambda _: largest()
    )
    numbers["rise"] = (series[-1] - before) * 100 / steps
    outcome = f"largest scores {before:.2f} to {series[-1]:.2f}"
    good = abs(numbers["rise"]) < 0.1
    return _training(head, bench, numbers, series, outcome=outcome, good=good, series_of="largest score"), numbers


ATTENTION_CLAIMS = """
    [E1]
    tied-product | tied.along | at least 0.0009 and at most 0.0018 of P V
        | scores tie, values of one sign: P V in BF16 is too large, by a quarter of its last place at most
    single-product | abs(single.along) | at most 0.0001 of P V | one largest score: it errs both ways
    shifted-product | abs(shifted.along) | at most 0.0001 of P V | scores tie, maximum shifted: it errs both ways
    tied-gradient | tied.bias_low | at least 1 times the noise
        | scores tie: the error of the query's gradient is more bias than noise, by the interval of the microscope
    shifted-gradient | shifted.bias | at most 0.5 times the noise | scores tie, maximum shifted: it is mostly noise
    tied-scores | tied.rise | at least 0.5 in 100 steps | scores tie: the bias adds up in the weights, scores rise
    wide-scores | abs(wide.rise) / tied.rise | at most 0.01 of that rise | in FP32 they stay
    shifted-scores | abs(shifted.rise) / tied.rise | at most 0.1 of that rise | with the maximum shifted they stay
    single-scores | abs(single.rise) / tied.rise | at most 0.1 of that rise | with one largest score they stay
    opposed-scores | opposed.rise | at most -0.5 in 100 steps | outputs' gradient of the other sign: scores fall
"""


# -- E2: norms --------------------------------------------------------------------------------------------------------

_FEATURES, _ROWS = 64, 64
_NORM_RATE = 0.05
_LAST = 0.875  # the largest number of an E4M3 block whose largest value is between 0.5 and 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms(Kind):
    """A training in MXFP8, or in BF16.

    Attributes:
        center: Mean of the norms' weights. Their standard deviation is 0.02.
        cast: The operations that `emulate` casts. "mul" casts the norms' weights.
    """

    center: float = 0.93
    format: str = "mxfp8_e4m3"
    cast: tuple[str, ...] = ("linear", "mul")


NORMS = (
    Norms(name="clustered", title="MXFP8, norm weights near 0.93"),
    Norms(name="apart", title="MXFP8, norm weights near 1.06", center=1.06),
    Norms(name="kept", title="MXFP8, norm weights near 0.93, not cast", cast=("linear",)),
    Norms(name="bf16", title="BF16, norm weights near 0.93", format="bf16"),
)


class Block(nn.Module):
    """A residual block with a norm. A multiplication by one stands where the norm's weights are cast."""

    def __init__(self, center: float) -> None:
        super().__init__()
        self.norm = _Norm(_FEATURES, bias=False)
        self.up, self.down = nn.Linear(_FEATURES, 2 * _FEATURES), nn.Linear(2 * _FEATURES, _FEATURES)
        nn.init.normal_(self.norm.weight, center, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the input and the branch."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class _Norm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        return functional.layer_norm(input, self.normalized_shape, self.weight * 1.0)


def norms(kind: Norms, bench: Bench, steps: int) -> tuple[Training, Numbers]:
    """Look at a student of residual blocks through the microscope, then train it on a teacher's outputs."""
    torch.manual_seed(bench.seed)
    teacher, student = (nn.Sequential(*(Block(center) for _ in range(4))) for center in (1.0, kind.center))

    def loss(number: int) -> Tensor:
        x = torch.randn(_ROWS, _FEATURES, generator=torch.Generator().manual_seed(1000 * bench.seed + number))
        with torch.no_grad():
            y = teacher(x)
        with emulate(forward=kind.format, operations=kind.cast):
            return functional.mse_loss(student(x), y)

    first = student.get_parameter("0.norm.weight").detach()
    report = microscope(student, [lambda number=number: loss(number) for number in range(4)], draws=4)
    numbers = {
        "mean": float(first.mean()),
        "output": report.row("0.norm:output", "activations").along_reference,
        "gradient": report.row("3.up.weight", "gradients").along_reference,
    }
    losses: list[float] = []

    def watched_loss(step: int) -> Tensor:
        found = loss(100 + step)
        losses.append(found.item())
        return found

    optimizer = optim.SGD(student.parameters(), lr=_NORM_RATE)
    _trained(student, optimizer, bench, kind.name, steps, watched_loss, lambda _: losses[-1])
    outcome = f"gradients {numbers['gradient']:+.1%} along themselves"
    training = _training(
        kind, bench, numbers, losses, outcome=outcome, good=abs(numbers["gradient"]) < 0.01, series_of="loss"
    )
    for rule in ("clustered-block", "biased-rounding"):
        numbers[rule.partition("-")[0]] = float(any(found.rule == rule for found in training.findings))
    return training, numbers


NORM_CLAIMS = """
    [E2]
    clustered-output | clustered.output - (last / clustered.mean - 1) | at least -0.005 and at most 0.005 of the output
        | weights near 0.93, in MXFP8: each becomes 0.875, and the norm's output is smaller by that
    clustered-gradient | clustered.gradient | at most -0.05 along the gradient
        | and the last block's gradient is too small by more than 5 %
    apart-output | abs(apart.output) | at most 0.025 of the output
        | weights near 1.06: they are rounded both ways
    kept-output | abs(kept.output) | at most 0.001 of the output | weights near 0.93, not cast: no bias
    apart-gradient | abs(apart.gradient) / abs(clustered.gradient) | at most 0.5 of that bias
        | weights near 1.06: the gradient is biased less
    kept-gradient | abs(kept.gradient) / abs(clustered.gradient) | at most 0.5 of that bias
        | weights near 0.93, not cast: the gradient is biased less
    bf16-gradient | abs(bf16.gradient) | at most 0.001 along the gradient | weights near 0.93, in BF16: no bias
    clustered-reported | clustered.clustered + clustered.biased | at least 2 rules
        | weights near 0.93, in MXFP8: clustered-block and biased-rounding report them
    others-unreported | apart.clustered + apart.biased + kept.biased + bf16.biased | at most 0 rules
        | clustered-block does not report weights near 1.06, nor biased-rounding any other training
"""


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> Measured:
    """Carry out all mechanisms."""
    steps = _steps(bench)
    trainings: list[Training] = []
    numbers: dict[str, Numbers] = {}
    for head in HEADS:
        training, numbers[head.name] = attention(head, bench, steps)
        trainings.append(training)
    for kind in NORMS:
        training, numbers[kind.name] = norms(kind, bench, steps)
        trainings.append(training)
    found = [claim for table in (ATTENTION_CLAIMS, NORM_CLAIMS) for claim in claims(table, last=_LAST, **numbers)]
    return Measured(trainings=tuple(trainings), claims=tuple(found))


def _trained(
    model: nn.Module,
    optimizer: optim.Optimizer,
    bench: Bench,
    name: str,
    steps: int,
    loss: Callable[[int], Tensor],
    seen: Callable[[int], float],
) -> list[float]:
    """Train with a shadow at every second step, and return a number of each step, taken after it."""
    bench.progress.begin(name, steps)
    series: list[float] = []
    with watch(model, optimizer, run=bench.runs / name, every=2, shadow_every=2, block=32, quiet=True):
        for step in range(steps):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            series.append(seen(step))
            bench.progress.advance()
    return series


def _training(kind: Kind, bench: Bench, numbers: Numbers, series: list[float], **more: Any) -> Training:
    path = bench.runs / kind.name
    found = tuple(diagnose(Run(path)))
    drawn = columns(np.arange(len(series)), np.array(series))
    return Training(name=kind.name, title=kind.title, run=path, numbers=numbers, findings=found, series=drawn, **more)


def _steps(bench: Bench) -> int:
    steps = bench.steps or (FULL_STEPS if bench.full else STEPS)
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab errors: expected {FEWEST_STEPS} steps or more, so that an error adds up; got {steps}. Use {STEPS}."
        )
    return steps


def _settings(bench: Bench) -> Mapping[str, object]:
    return {"steps": _steps(bench), "draws": DRAWS, "device": bench.device}


ERRORS = Experiment(
    name="errors",
    claim="Rounding that errs one way adds up in the weights of BF16 attention, and biases gradients of MX norms.",
    source="E1, E2",
    settings=_settings,
    measure=measure,
)
