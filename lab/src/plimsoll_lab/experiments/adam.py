"""Experiment `adam` (T8): Adam's state and epsilon in FP16, and the remedies.

Six trainings of one adapter start from the same weights on the same batches. For a pause its gradients are zero, then
they are small and grow. In exact arithmetic an update of Adam has at most 7.27 learning rates, whatever the gradients
are (`largest_ratio`), so a far larger one is an effect of rounding.

A gradient g adds 0.001 g² to the second moments, and FP16 rounds all at or below 2^-25 to zero. So gradients below
0.0055 leave no second moment, whether they are the first after a pause or the hundredth. The pause itself removes no
second moment in FP16: 0.999 of one below 500 units of 2^-24 rounds back to it.

The adapter is a branch of a network that is trained already. For the first steps the output of the branch is multiplied
by zero, then by a factor that doubles every few steps up to 1. The inputs differ in size, as columns of a table that is
not normalized: Adam has a rate for each weight for such inputs.
"""

import contextlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.diagnosis import Finding, View, diagnose, whatif
from plimsoll.errors import NotRecordedError
from plimsoll.precision import guard_adam, prepare
from plimsoll.precision.workarounds import largest_ratio
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of
from plimsoll_lab.statistics import columns, median
from plimsoll_lab.study import Job, Kind, Sizes, Study

BRANCH = "first.weight"  # weight of the branch, whose moments and rates are recorded
BOUND = largest_ratio(0.9, 0.999)  # most learning rates of an update of Adam in exact arithmetic: 7.27
EXPLODES = 10 * BOUND
_DOUBLINGS = 16  # doublings of the factor, from 2^-16 to 1
_TAIL = 30  # number of steps in the median of a loss
_RULE = "second-moment-lost"
_CONFIRMED = 1  # the rule needs two samples in a row, so it reports one step after it began
_LOST = 0.05  # threshold of the rule
_SAME_RATE = 0.5  # binades between the rates of the middle nine tenths of weights, at which all have one rate
_OWN_RATES = 3.0  # the same where rates differ: a factor of 8 from weight to weight
Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Sizes):
    """Sizes. The branch is closed for `pause` steps, and opens over `opening` steps."""

    steps: int = 220
    pause: int = 40
    opening: int = 80
    inputs: int = 16
    width: int = 32
    batch: int = 64
    learning_rate: float = 3e-3
    every: int = 10

    @property
    def opened(self) -> int:
        """First step at which the branch is open. All steps before it are recorded."""
        return self.pause + self.opening

    def factor(self, step: int) -> float:
        """Return the factor of the branch's output."""
        if step < self.pause:
            return 0.0
        return 2.0 ** min(0.0, _DOUBLINGS * ((step - self.pause) / self.opening - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way(Kind):
    """A level with an epsilon and a guard. A `brief` one trains for half of the pause."""

    precision: str
    epsilon: float = 1e-8
    guarded: bool = False
    brief: bool = False


KINDS = (
    Way(name="fp32", title="FP32, epsilon 1e-8", precision="fp32"),
    Way(name="fp16-1e-8", title="FP16 state, epsilon 1e-8", precision="fp16-pure", brief=True),
    Way(name="fp16-1e-7", title="FP16 state, epsilon 1e-7", precision="fp16-pure", epsilon=1e-7),
    Way(name="fp16-1e-4", title="FP16 state, epsilon 1e-4", precision="fp16-pure", epsilon=1e-4),
    Way(name="fp16-guarded", title="FP16 state, guarded", precision="fp16-pure", epsilon=1e-7, guarded=True),
    Way(name="fp16-master", title="FP32 state and masters", precision="fp16-master"),
)


class Net(nn.Module):
    """A frozen linear trunk, plus a branch of two layers times a factor."""

    def __init__(self, trunk: Tensor, width: int) -> None:
        super().__init__()
        self.trunk = nn.Buffer(trunk)
        self.first = nn.Linear(len(trunk), width)
        self.second = nn.Linear(width, 1)
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the prediction (batch,)."""
        x = x.to(self.first.weight.dtype)
        return x @ self.trunk + self.factor * self.second(functional.relu(self.first(x))).squeeze(-1)


class Data:
    """Batches of inputs, and targets by a fixed network of the normalized inputs."""

    def __init__(self, setup: Setup, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._setup, self._seed = setup, seed
        self.sizes = torch.exp2(-torch.linspace(0.0, 6.0, setup.inputs))
        self._in = torch.randn(setup.inputs, setup.width, generator=generator) / math.sqrt(setup.inputs)
        self._out = torch.randn(setup.width, generator=generator) * math.sqrt(2 / setup.width)

    def fit(self) -> Tensor:
        """Return the linear trunk that fits best."""
        x, y = (torch.cat(part).double() for part in zip(*(self.batch(-n) for n in range(1, 17)), strict=True))
        return cast("Tensor", torch.linalg.lstsq(x, y[:, None]).solution).squeeze(-1).float()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs (batch, inputs) and targets (batch,) of a step."""
        generator = torch.Generator().manual_seed((self._seed + 1) * 1_000_003 + step)
        x = torch.randn(self._setup.batch, self._setup.inputs, generator=generator)
        return x * self.sizes, functional.relu(x @ self._in) @ self._out


@contextlib.contextmanager
def _epsilon(optimizer: torch.optim.Optimizer, kind: Way) -> Generator[None]:
    """Set the epsilon and the guard of a kind."""
    # The epsilon is set only here, since `prepare` refuses one that is zero in FP16.
    for group in optimizer.param_groups:
        group["eps"] = kind.epsilon
    guard = guard_adam(optimizer) if kind.guarded else None
    try:
        yield
    finally:
        if guard is not None:
            guard.remove()


def _weight(model: Net) -> Tensor:
    return model.first.weight.detach()


def _rates(optimizer: torch.optim.Optimizer, model: Net) -> Mapping[str, float]:
    """Return the spread of Adam's rates for weights of the branch, in binades.

    It is that of the middle nine tenths.
    """
    state = cast("Mapping[str, Any]", optimizer.state.get(model.first.weight, {}))
    if "exp_avg_sq" not in state:
        return {}
    second, group = cast("Tensor", state["exp_avg_sq"]), optimizer.param_groups[0]
    epsilon = float(torch.tensor(group["eps"], dtype=second.dtype))
    corrected = second.double() / (1 - group["betas"][1] ** float(state["step"]))
    rates = 1 / (corrected[state["exp_avg"] != 0].sqrt() + epsilon)
    if not len(rates) or not rates.isfinite().all() or not rates.all():  # a rate of 0: a second moment is Inf
        return {}
    low, high = (float(rates.quantile(share)) for share in (0.05, 0.95))
    return {"rate_spread": math.log2(high / low)}


def judged(job: Job[Way], setup: Setup) -> Training:
    """Return the training's numbers, findings and outcome."""
    run = Run(job.run)
    view = View(run)
    findings = tuple(diagnose(view))
    numbers = measured(run, view, setup, findings)
    outcome, good = _outcome(numbers)
    steps, loss = run.scalars("loss")
    return Training(
        name=job.kind.name,
        title=job.kind.title,
        run=job.run,
        numbers=numbers,
        outcome=outcome,
        good=good,
        findings=findings,
        series=columns(steps, loss, median),
        series_of="loss",
    )


def measured(run: Run, view: View, setup: Setup, findings: Sequence[Finding]) -> dict[str, float]:
    """Return losses, updates in learning rates, zero moments, rates and steps by name."""
    steps, updates = run.scalars("largest_update")
    exploded = steps[~(updates < EXPLODES)]  # NaN too
    alarms = [finding.since_step for finding in findings if finding.rule == _RULE]
    finite = updates[np.isfinite(updates)]
    loss = run.scalars("loss")[1]
    return {
        "loss_pause": median(loss[: setup.pause]),
        "loss_end": median(loss[-_TAIL:]),
        "largest_update": float(finite.max()) if len(finite) == len(updates) else math.inf,
        "exploded_at": float(exploded[0]) if len(exploded) else math.inf,
        "found_at": float(min(alarms) + _CONFIRMED) if alarms else math.inf,
        "found": float(len(alarms)),
        "epsilon_found": float(any(f.evidence["epsilon_is_zero"] == "yes" for f in findings if f.rule == _RULE)),
        "nonfinite_found": float(any(f.rule == "nonfinite" and f.severity == "alarm" for f in findings)),
        "weights_lost": _weights_lost(run),
        "moments_zero": _moments_zero(run, setup),
        "moments_lost_in_fp16": _lost_in_fp16(view, setup),
        "rate_spread": _rate_spread(run, setup),
        "rate_spread_end": _last(run, "rate_spread"),
    }


def _weights_lost(run: Run) -> float:
    """Return the nonfinite part of the branch's weights after the first step."""
    spectrum = run.spectrum("weights", BRANCH, 1)
    return spectrum.nonfinite / spectrum.count


def _moments_zero(run: Run, setup: Setup) -> float:
    """Return the mean part of second moments that are zero while the branch opens.

    Only weights whose first moment is not zero count.
    """
    shares: list[float] = []
    for step in _early(setup):
        try:
            first, second = (run.spectrum("optimizer", f"{BRANCH}:{m}", step) for m in ("exp_avg", "exp_avg_sq"))
        except NotRecordedError:  # the run ended before, or its optimizer's state is in masters
            return math.nan
        if first.count > first.zeros:
            shares.append(max(second.zeros - first.zeros, 0) / (first.count - first.zeros))
    return float(np.mean(shares)) if shares else math.nan


def _lost_in_fp16(view: View, setup: Setup) -> float:
    """Return the mean part of recorded second moments that FP16 would make zero."""
    answer = whatif(view, "fp16", shift=0, collection="optimizer")
    name = f"{BRANCH}:exp_avg_sq"
    if name not in answer.names:
        return math.nan
    steps, lost, _ = answer.over_time(name)
    inside = np.isin(steps, np.array(_early(setup)))
    return float(lost[inside].mean()) if inside.any() else math.nan


def _rate_spread(run: Run, setup: Setup) -> float:
    """Return the median spread of rates over the first steps after the pause."""
    # No training has exploded by then.
    try:
        steps, spread = run.scalars("rate_spread")
    except NotRecordedError:
        return math.nan
    return median(spread[np.isin(steps, np.array(_early(setup)))])


def _early(setup: Setup) -> range:
    """Return the first quarter of the opening, after the branch's first gradients."""
    return range(setup.pause + 1, setup.pause + 1 + setup.opening // 4)


def _last(run: Run, name: str) -> float:
    try:
        return float(run.scalars(name)[1][-1])
    except NotRecordedError:
        return math.nan


def _outcome(numbers: dict[str, float]) -> tuple[str, bool]:
    if numbers["weights_lost"]:
        return "weights are NaN after one step", False
    if numbers["exploded_at"] < math.inf:
        return f"explodes at step {numbers['exploded_at']:.0f}", False
    return "trains", True


def claims(
    fp32: Numbers, zero: Numbers, small: Numbers, large: Numbers, guarded: Numbers, master: Numbers
) -> tuple[Claim, ...]:
    """Return the claims with the six trainings' numbers, in the order of `KINDS`."""
    return claims_of(
        f"""
        epsilon-is-zero | zero.weights_lost | at least 1 of the weights
            | epsilon 1e-8 in FP16: a weight without gradient is NaN after one step
        epsilon-found | zero.nonfinite_found | at least 1 alarms | epsilon 1e-8 in FP16: the alarm nonfinite is raised
        moments-vanish | large.moments_zero | at least {_LOST} of second moments
            | FP16 state: second moments are zero where first ones are not, after the pause
        moments-foretold | fp32.moments_lost_in_fp16 | at least {_LOST} of second moments
            | an FP32 run shows before that FP16 would lose them
        fp32-bounded | fp32.largest_update | at most {BOUND} learning rates | FP32: no update is above Adam's own bound
        update-explodes | small.largest_update | at least {EXPLODES} learning rates
            | epsilon 1e-7: after the pause an update is ten times that bound or more
        explosion-ends-it | small.loss_end / fp32.loss_end | at least 2 of FP32's loss
            | epsilon 1e-7: the loss ends far above FP32's
        found-before | small.exploded_at - small.found_at | at least 1 steps before
            | the alarm second-moment-lost is raised before the explosion
        fp32-adapts | fp32.rate_spread | at least {_OWN_RATES} binades apart
            | FP32: after the pause the rates differ from weight to weight
        epsilon-hides | small.rate_spread | at most {_SAME_RATE} binades apart
            | epsilon 1e-7: all weights have the same rate
        large-epsilon-hides | large.rate_spread | at most {_SAME_RATE} binades apart | epsilon 1e-4: the same
        large-epsilon-holds | large.largest_update | at most {EXPLODES} learning rates
            | epsilon 1e-4: and no update explodes
        guard-bounds | guarded.largest_update | at most {1.1 * BOUND} learning rates
            | guard_adam: FP16 state, and no update is above the bound, up to rounding
        guard-trains | guarded.loss_end / guarded.loss_pause | at most 1 of the pause's loss
            | guard_adam: training goes on: the loss ends below that of the pause
        master-bounds | master.largest_update | at most {1.1 * BOUND} learning rates
            | FP32 state and masters: no update is above the bound, up to rounding
        master-trains | master.loss_end / fp32.loss_end | at most 1.05 of FP32's loss
            | FP32 state and masters: it ends where FP32 does
        master-nothing-found | master.found | at most 0 findings
            | FP32 state and masters: no second moment is found lost
        """,
        fp32=fp32,
        zero=zero,
        small=small,
        large=large,
        guarded=guarded,
        master=master,
    )


def _summary(numbers: Sequence[Numbers]) -> tuple[str, ...]:
    fp32, _, small, large, guarded, _ = numbers
    observed = (
        f"After the pause {percent(large['moments_zero'], 0)} of FP16's second moments are zero while first ones are "
        f"not. With epsilon 1e-7 an update has {small['largest_update']:,.0f} learning rates, where FP32's largest "
        f"is {fp32['largest_update']:.1f}: found at step {small['found_at']:.0f}, exploded at step "
        f"{small['exploded_at']:.0f}."
    )
    advice = (
        f"With FP32 state, or guard_adam (largest update {guarded['largest_update']:.1f}), training goes on. A larger "
        "epsilon is no remedy: 1e-7 does not bound the update, and below 1e-4 all weights have one rate."
    )
    return observed, advice


class Adam(Study[Setup, Way]):
    """The six trainings of the adapter, and the claims from their runs."""

    name = "adam"
    claim = "Adam's state in FP16 loses second moments and epsilon: after a pause of zero gradients an update explodes."
    source = "T8"
    sizes = Setup()
    full_sizes = Setup(steps=3000, width=256, batch=256, inputs=64)
    fewest_steps = 160
    steps_reason = ": the branch is closed for {pause} of them and opens over {opening}"
    kinds = KINDS

    def measure_with(self, bench: Bench, setup: Setup, workers: int | None = None) -> Measured:
        """Train all kinds, and compare their runs."""
        jobs = self.jobs(bench)
        self.train_all(jobs, setup, bench, workers=workers)
        trainings = tuple(judged(job, setup) for job in jobs)
        numbers = [training.numbers for training in trainings]
        return Measured(trainings=trainings, claims=claims(*numbers), said=_summary(numbers))

    def train(self, job: Job[Way], setup: Setup, device: str) -> None:
        """Train from the same weights and batches as every other kind of that seed."""
        data = Data(setup, job.seed)
        torch.manual_seed(job.seed)
        model = Net(data.fit(), setup.width).to(device)
        # Each operation is rounded: the fused step would add epsilon in FP32 and round only once.
        optimizer = torch.optim.Adam(model.parameters(), lr=setup.learning_rate, eps=1e-7, foreach=False, fused=False)
        collect = ("weights", "gradients", "optimizer", "updates")
        with (
            watch(model, optimizer, run=job.run, every=setup.every, warmup=setup.opened, collect=collect) as record,
            prepare(model, optimizer, job.kind.precision, watch=record) as loop,
            _epsilon(optimizer, job.kind),
        ):
            for step in range(setup.pause // 2 if job.kind.brief else setup.steps):
                weight = _weight(model).double()
                model.factor = setup.factor(step)
                x, y = (values.to(device) for values in data.batch(step))
                with loop.forward():
                    loss = functional.mse_loss(model(x).float(), y)
                record.log(**_rates(optimizer, model))
                loop.step(loss)
                record.log(largest_update=float((_weight(model).double() - weight).abs().max()) / setup.learning_rate)
