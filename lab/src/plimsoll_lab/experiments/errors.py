"""Experiment `errors` (E1 to E3): training under rounding's bias and noise.

Each mechanism is planted: a small model is put under the conditions that its paper names, and beside it a control that
lacks one of them. `plimsoll.microscope` and recorded shadow steps measure the errors, and rules judge the runs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from plimsoll.diagnosis import diagnose
from plimsoll.emulate import emulate
from plimsoll.microscope import microscope
from plimsoll.runs import Run
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Measured, Training, claims
from plimsoll_lab.statistics import columns
from plimsoll_lab.study import Experiment, Kind, check_steps

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
    """Causal attention in flash attention's order: P V, then divided by row sums.

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
        """Return BF16's values with the gradient unchanged: only the forward rounds."""
        return x + (x.to(torch.bfloat16).to(x.dtype) - x).detach() if self.head.rounds else x


def tokens(ties: bool, generator: torch.Generator) -> Tensor:
    """Return sequences with each class once, or twice if scores are to tie.

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
    """A residual block with a norm, whose weights are cast at a product with one."""

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
    """Look at a student of residual blocks by the microscope, then train it.

    It learns a teacher's outputs.
    """
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


# -- E3: the stall ----------------------------------------------------------------------------------------------------

_EXAMPLES, _PLACES = 512, 48
_STALL_RATE, _STALL_STEPS, _SWITCH = 0.2, 80, 50
RATIOS = (0.1, 0.3, 0.5, 3**-0.5, 0.7, 0.9, 1.1)  # of noise to gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent(Kind):
    """A training of the regression. `switches`: BF16 backward in the last steps."""

    format: str | None = "nvfp4"
    switches: bool = False


DESCENTS = (
    Descent(name="fp4", title="regression, backward in NVFP4"),
    Descent(name="switched", title="the same, its last 30 steps in BF16", switches=True),
    Descent(name="fp32", title="regression in FP32", format=None),
)


class Regression:
    """Linear regression: half the squared distance to its solution, and a rest.

    Inputs are orthogonal, so that every direction has a curvature of 1. Labels have noise, so that the gradients of
    examples do not vanish at the solution, where their mean does. What FP4 rounds are gradients of examples.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.inputs = nn.init.orthogonal_(torch.empty(_EXAMPLES, _PLACES)) * _EXAMPLES**0.5
        self.solution = torch.randn(_PLACES, _PLACES) / _PLACES**0.5
        noise = torch.randn(_EXAMPLES, _PLACES)
        noise = noise - self.inputs @ (self.inputs.T @ noise) / _EXAMPLES
        self.labels = self.inputs @ self.solution.T + noise
        self.model = nn.Linear(_PLACES, _PLACES, bias=False)
        self.direction = functional.normalize(torch.randn(_PLACES * _PLACES), dim=0).view(_PLACES, _PLACES)

    def at(self, distance: float) -> None:
        """Put weights at a distance from the solution, which is the gradient's norm."""
        with torch.no_grad():
            self.model.weight.copy_(self.solution + distance * self.direction)

    def loss(self, fmt: str | None) -> Tensor:
        """Return the loss, with a backward in a format."""
        with emulate(backward=fmt, rounding="stochastic") if fmt else emulate("fp32"):
            outputs: Tensor = self.model(self.inputs)
            return (outputs - self.labels).square().sum() / (2 * _EXAMPLES)

    def excess(self, weight: Tensor) -> float:
        """Return the loss above that of the solution."""
        return float((weight.detach() - self.solution).double().square().sum()) / 2


def efficiency(regression: Regression, distance: float) -> tuple[float, float]:
    """Return the ratio of noise to gradient, and the decrease that a step keeps.

    The ratio is the microscope's. The decrease is the mean one of the loss over steps of the best length, of the
    decrease without noise.
    """
    regression.at(distance)
    weight = regression.model.weight
    report = microscope(regression.model, lambda: regression.loss("nvfp4"), draws=8, collect=["gradients"])
    gradients = [torch.autograd.grad(regression.loss("nvfp4"), weight)[0] for _ in range(DRAWS)]
    exact = (weight.detach() - regression.solution).square().sum()
    length = exact / torch.stack([g.square().sum() for g in gradients]).mean()
    after = sum(regression.excess(weight - length * g) for g in gradients) / DRAWS
    return report.row("weight", "gradients").relative_error, 1 - after / regression.excess(weight)


def stall(kind: Descent, bench: Bench) -> tuple[Training, Numbers]:
    """Train the regression from afar, at a fixed rate."""
    regression = Regression(bench.seed)
    regression.at(30.0)

    def loss(step: int) -> Tensor:
        return regression.loss("bf16" if kind.switches and step >= _SWITCH else kind.format)

    optimizer = optim.SGD(regression.model.parameters(), lr=_STALL_RATE)
    series = _trained(
        regression.model, optimizer, bench, kind.name, _STALL_STEPS, loss,
        lambda _: regression.excess(regression.model.weight),
    )  # fmt: skip
    steps, errors = Run(bench.runs / kind.name).series("gradients", "weight", "relative_error")
    crossed = next((int(step) for step, error in zip(steps, errors, strict=True) if error > 3**-0.5), _STALL_STEPS)
    numbers = {
        "crossed": float(crossed), "middle": float(np.mean(series[_SWITCH - 10 : _SWITCH])),
        "end": float(np.mean(series[-10:])), "early": series[10],
    }  # fmt: skip
    good = numbers["end"] < 1e-3
    outcome = f"{numbers['end']:.2g} above the least loss"
    training = _training(
        kind,
        bench,
        numbers,
        [12 + math.log10(max(value, 1e-12)) for value in series],
        outcome=outcome,
        good=good,
        series_of="excess loss, digits",
    )
    warnings = [found.rule for found in training.findings if found.severity == "warning"]
    numbers["warned"] = float(warnings.count("error-above-signal"))
    return training, numbers


def efficiencies(seed: int) -> Numbers:
    """Return efficiencies' distance from 1 / (1 + ratio^2), and one at 1 / sqrt(3)."""
    regression = Regression(seed)
    noise = efficiency(regression, 1.0)[0]
    found = {aimed: efficiency(regression, noise / aimed) for aimed in RATIOS}
    apart = max(abs(kept - 1 / (1 + ratio**2)) for ratio, kept in found.values())
    return {"apart": apart, "at_root": found[3**-0.5][1]}


STALL_CLAIMS = """
    [E3]
    efficiency | steps.apart | at most 0.03 of the decrease
        | a step of the best length keeps 1 / (1 + r^2) of its decrease, r the microscope's noise over the gradient
    efficiency-root | steps.at_root | at least 0.72 and at most 0.78 of the decrease
        | so three quarters where the gradient is sqrt(3) times its noise
    before | fp4.early / fp32.early | at most 1.3 of FP32's | before that a training in NVFP4 is as far as in FP32
    crossed | fp4.crossed | at least 12 and at most 40 steps | the ratio falls below sqrt(3)
    after | fp4.end / fp4.middle | at least 0.7 of the excess 30 steps before | after that the loss stands still
    fp32 | fp32.end / fp32.middle | at most 0.001 of the excess 30 steps before | in FP32 it falls on
    bf16 | switched.end / switched.middle | at most 0.01 of the excess 30 steps before
        | and so it does as soon as the backward is in BF16
    warned | fp4.warned | at least 1 findings | error-above-signal warns
    unwarned | fp32.warned | at most 0 findings | and not in FP32
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
    for kind in DESCENTS:
        training, numbers[kind.name] = stall(kind, bench)
        trainings.append(training)
    numbers["steps"] = efficiencies(bench.seed)
    found = [
        claim
        for table in (ATTENTION_CLAIMS, NORM_CLAIMS, STALL_CLAIMS)
        for claim in claims(table, last=_LAST, **numbers)
    ]
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
    """Train with shadows at every second step; return a number of each step."""
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
    check_steps("errors", steps, FEWEST_STEPS, STEPS, ", so that an error adds up")
    return steps


def _settings(bench: Bench) -> Mapping[str, object]:
    return {"steps": _steps(bench), "draws": DRAWS, "device": "cpu"}  # everywhere: all formats are emulated


ERRORS = Experiment(
    name="errors",
    claim="Bias of rounding adds up in BF16 attention and MX norms; its noise stalls FP4 below sqrt(3).",
    source="E1, E2, E3",
    settings=_settings,
    measure=measure,
)
