"""What became of a training of the experiment on underflow, read from its run and from nothing else.

A *layer* is a module that holds parameters; its gradients are those that come to its outputs. It *underflows* at a step
if more than 5 % of those that would be nonzero are zero, as the rule `underflow-high` has it: zeros in the training
that are nonzero when a shadow step repeats it in FP32. So zeros of ReLU, or of boxes without a loss, do not count, and
BF16 is judged as FP16 is. The *rate* is the share of layers that underflow.

The early rule (T6) is held against the rate, with the limits of the rule `underflow-rising`: stay, where it is below
1 %; change, where it is above 5 %; else watch. What it is, is its mean, or where its trend leads if that is sure. That
it rises too, as T6 has it, is a number of its own: in the beginning of a training the rate may be high and fall, until
the features part.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from plimsoll.diagnosis import View, diagnose
from plimsoll.diagnosis.estimates.format_losses import share
from plimsoll.diagnosis.rules.underflow import UnderflowHigh, UnderflowRising
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.tables.trend import looks, trend
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll_lab.experiments.underflow.training import Job, Setup
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns

LOST = UnderflowHigh().values
STAY, CHANGE, SURE = UnderflowRising().watch, UnderflowRising().change, UnderflowRising().confidence
PARTS = 9  # of a training: the first is early, the last its end

Verdict = Literal["stay", "watch", "change"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rate:
    """Steps; at each the share of layers that underflow, and the part of all layers' gradients that is lost."""

    steps: Ints
    layers: Floats
    lost: Floats

    def within(self, begin: int, end: int) -> "Rate":
        """From one step up to another."""
        there = (self.steps >= begin) & (self.steps < end)
        return Rate(steps=self.steps[there], layers=self.layers[there], lost=self.lost[there])

    def rise(self) -> float:
        """By how much the trend of the layers' share rises; 0 where it is not sure that it moves, NaN of too few."""
        found = trend(self.steps, self.layers)
        if found is None:
            return math.nan
        return found.end - found.start if found.confidence >= SURE else 0.0

    def rise_seen(self) -> float:
        """The first step by which it is sure that the rate rises by more than 1 % of the layers; NaN if it never is."""
        for samples in looks(len(self.steps)):
            if self.within(0, int(self.steps[samples - 1]) + 1).rise() > STAY:
                return float(self.steps[samples - 1])
        return math.nan

    def level(self) -> float:
        """The mean share of layers."""
        return float(self.layers.mean()) if len(self.layers) else math.nan


def rate(view: View) -> Rate:
    """The rate of a run, at its shadow steps."""
    cells = view.cells("activation_gradients")
    if cells is None:
        return Rate(steps=np.empty(0, dtype=np.int64), layers=np.empty(0), lost=np.empty(0))
    holders = {name.rpartition(".")[0] for name in view.run.tensors.get("gradients", ())}
    places = [i for i, name in enumerate(cells.names) if name.removesuffix(":output") in holders]
    underflowed = cells.total_of("underflowed")[places]
    nonzero = cells.total(cells.nonzero)[places]
    known = ~np.isnan(underflowed)
    there = known.any(axis=0)
    many = np.count_nonzero(known & (share(underflowed, nonzero) > LOST), axis=0)
    layers = many[there] / np.count_nonzero(known, axis=0)[there]
    lost = share(np.nansum(underflowed, axis=0), np.nansum(np.where(known, nonzero, 0.0), axis=0))
    return Rate(steps=cells.steps[there], layers=layers, lost=lost[there])


def early_verdict(seen: Rate) -> Verdict:
    """What the early rule says of the rate so far."""
    found = trend(seen.steps, seen.layers)
    if found is None:
        return "watch"
    level = found.end if found.confidence >= SURE else seen.level()
    if level > CHANGE:
        return "change"
    return "stay" if level < STAY else "watch"


def judged(job: Job, setup: Setup) -> Training:
    """The training's numbers, findings, and whether the early verdict came true."""
    view = View(Run(job.run))
    found = rate(view)
    numbers = measured(view, setup, found)
    verdict = early_verdict(found.within(setup.warmup, setup.early))
    return Training(
        name=job.kind.name, title=job.kind.title, run=view.run.path, numbers=numbers,
        outcome=f"{verdict}; {percent(numbers['rate_end'], 1)} of layers at the end", good=numbers["rate_end"] < STAY,
        series=columns(found.steps, found.layers), series_of="share of layers that underflow",
        findings=tuple(diagnose(view)),
    )  # fmt: skip


def measured(view: View, setup: Setup, found: Rate) -> dict[str, float]:
    """By name: the rate in the early part, at the end and over all; what was lost; the loss; the scale; the verdict."""
    early, last = setup.early, setup.steps - setup.steps // PARTS
    verdict = early_verdict(found.within(setup.warmup, early))
    end = found.within(last, setup.steps)
    steps, loss = view.scalar("loss")
    return {
        "rate_early": found.within(setup.warmup, early).level(),
        "rate": found.level(),
        "rate_end": end.level(),
        "rise": found.rise(),
        "rise_early": found.within(setup.warmup, early).rise(),
        "rise_seen": found.within(setup.warmup, setup.steps).rise_seen(),
        "lost_end": float(end.lost.mean()) if len(end.lost) else math.nan,
        "parameters_lost": _lost_of_parameters(view),
        "loss_end": float(loss[steps >= last].mean()),
        **{f"told_{each}": float(verdict == each) for each in VERDICTS},
        "came_true": float(came_true(verdict, end.level())),
        "rules_early": float(_told_by_rules(View(view.run, until=early))),
        "rules": float(_told_by_rules(view)),
        **_scale(view),
    }


def came_true(verdict: Verdict, at_end: float) -> bool:
    """Whether the rate at the end is what the early verdict meant: sound where it said stay, and not where change."""
    return {"stay": at_end < STAY, "watch": STAY <= at_end <= CHANGE, "change": at_end > CHANGE}[verdict]


def _lost_of_parameters(view: View) -> float:
    """Of the parameters' own gradients, the part that underflowed in all samples."""
    cells = view.cells("gradients")
    if cells is None:
        return math.nan
    underflowed, nonzero = np.nansum(cells.total_of("underflowed")), np.nansum(cells.total(cells.nonzero))
    return float(underflowed / max(underflowed + nonzero, 1.0))


def _told_by_rules(view: View) -> int:
    """How many findings the rules on underflow have made."""
    return len(diagnose(view, rules=["underflow-*"]))


def _scale(view: View) -> dict[str, float]:
    """The loss scale as an exponent, at the beginning and the end, and the batches lost to it; none in BF16."""
    _, scale = view.scalar("scale")
    if not len(scale):
        return {}
    skipped = sum(event.kind == "skip" for event in view.events)
    return {"scale_begin": math.log2(scale[0]), "scale_end": math.log2(scale[-1]), "skipped": float(skipped)}
