"""What became of a training of the small CLIP, read from its run and from nothing else."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.run_summary import LOSS_STEPS
from plimsoll.report.verdicts.verdict import leading_first, verdict
from plimsoll.runs import Run
from plimsoll_lab.experiments.clip.training import Setup
from plimsoll_lab.experiments.clip.variants import Kind
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns, lost_at, mean, median, share_lost

Series = tuple[NDArray[np.int64], NDArray[np.float64]]

TAIL = LOSS_STEPS  # that a loss is the median of, as in a run's summary
LOST = 0.05  # T6: above 5 % is not sound
_OF_UNDERFLOW = ("scale-collapse", "scale-low", "underflow-high", "underflow-rising", "no-single-scale")


def judged(kind: Kind, setup: Setup, run: Run) -> Training:
    """The training's numbers, findings, and what became of it in a few words."""
    view = View(run)
    findings = leading_first(diagnose(view), view.last_step)
    numbers = measured(view, setup, findings)
    outcome, good = _outcome(numbers)
    steps, loss = view.scalar("loss")
    start = setup.hard_at // 2
    later = steps >= start
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, outcome=outcome, good=good,
        series=columns(steps[later], loss[later], median), series_of=f"loss since step {start}", findings=findings,
        verdict=verdict(view, findings),
    )  # fmt: skip


def measured(view: View, setup: Setup, findings: Sequence[Finding]) -> dict[str, float]:
    """By name: losses, the scale, what was lost of gradients and batches, and since when rules have told of it."""
    repeated = int(np.nansum(view.scalar("retries")[1]))
    end = setup.hard_end + repeated  # a repetition is a step of the run
    steps, loss = view.scalar("loss")
    before = median(loss[(steps < setup.hard_at) & (steps >= setup.hard_at - TAIL)])
    lost_steps, lost = lost_at(view)
    found: dict[str, float] = {
        "loss_before": before,
        "loss_end": median(loss[-TAIL:]),
        "lost_before": mean(lost[(lost_steps > min(setup.warmup, setup.hard_at // 2)) & (lost_steps < setup.hard_at)]),
        "lost_after": share_lost(view, end),
        "lost_end": mean(lost[lost_steps > view.last_step - TAIL]),
        "lost_for_steps": _time_lost(lost_steps, lost, end),
        "skipped": float(sum(event.kind == "skip" for event in view.events)),
        "repeated": float(repeated),
    }
    found["batches_lost"] = found["skipped"] - found["repeated"]
    found |= of_parameters(view)
    found["progress"] = 1.0 - found["loss_end"] / before
    found |= _scale(view, setup, end) | _gradient(view, setup, end)
    found["alarms"] = float(sum(finding.severity == "alarm" for finding in findings))
    found["underflow_findings"] = float(
        sum(finding.rule in _OF_UNDERFLOW and finding.severity != "info" for finding in findings)
    )
    for rule in ("scale-collapse", "underflow-high"):
        since = [f.since_step for f in findings if f.rule == rule and f.severity == "alarm"]
        found[f"{rule}_since"] = float(min(since)) if since else math.nan
    return found


def of_parameters(view: View) -> dict[str, float]:
    """Of a scale per parameter: how often one sat out, and what its scales take; nothing of other scalers."""
    (_, sat_out), (_, taken) = view.scalar("sat_out"), view.scalar("scale_bytes")
    if not len(sat_out):
        return {}
    cells = view.cells("gradients")
    weights = 0 if cells is None else int(cells.column("count")[cells.at == 0].sum())
    return {
        "sat_out": float(sat_out[-1]),
        "scale_bytes": float(taken[-1]),
        "scale_bytes_per_weight": float(taken[-1]) / max(weights, 1),
    }


def _time_lost(steps: NDArray[np.int64], lost: NDArray[np.float64], end: int) -> float:
    """How many steps after the hard batches more than a sound part of the gradients was lost; Inf: to the end."""
    bad = np.flatnonzero((steps >= end) & (lost > LOST))
    if not len(bad):
        return 0.0
    return math.inf if bad[-1] == len(steps) - 1 else float(steps[bad[-1]] - end + 1)


def _scale(view: View, setup: Setup, end: int) -> dict[str, float]:
    """The loss scale as exponents: before the hard batches, its lowest since, and at the end; none in BF16."""
    steps, scale = view.scalar("scale")
    if not len(scale):
        return {}
    exponents = np.log2(scale)
    begin = float(exponents[steps < setup.hard_at][-1])
    since = exponents[steps >= setup.hard_at]
    back = steps[(steps >= end) & (exponents >= begin - 1.0)]
    return {
        "scale_before": begin,
        "scale_lowest": float(since.min()),
        "scale_fell": float(since[0] - since.min()),  # from the first hard batch's: it may have grown just before
        "scale_end": float(exponents[-1]),
        "scale_back_after": float(back[0] - end) if len(back) else math.inf,
    }


def _gradient(view: View, setup: Setup, end: int) -> dict[str, float]:
    """How many times its usual norm the gradient has at most in the hard batches, and how often it was not finite."""
    steps, norms = view.scalar("grad_norm")
    hard = norms[(steps >= setup.hard_at) & (steps < end)]
    usual = median(norms[(steps < setup.hard_at) & (steps >= setup.hard_at - TAIL)])
    finite = hard[np.isfinite(hard)]
    return {
        "gradient_rise": float(finite.max() / usual) if len(finite) else math.nan,
        "nonfinite_steps": float(np.sum(~np.isfinite(hard))),
    }


def _outcome(numbers: Mapping[str, float]) -> tuple[str, bool]:
    lost_for = numbers["lost_for_steps"]
    if lost_for == math.inf:
        return "gradients stay zero", False
    if not numbers["progress"] > 0:
        return "does not come back", False
    return (f"back in {lost_for:.0f} steps" if lost_for else "trains on"), True
