"""What became of a training of the adapter, read from its run and from nothing else."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose, whatif
from plimsoll.errors import NotRecordedError
from plimsoll.precision.workarounds.adam_guard import largest_ratio
from plimsoll.runs import Run
from plimsoll_lab.experiments.adam.training import BRANCH, Kind, Setup
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns, median

BOUND = largest_ratio(0.9, 0.999)  # learning rates that an update of Adam's has at most, in exact arithmetic: 7.27
EXPLODES = 10 * BOUND
_TAIL = 30  # steps that a loss is the median of
_RULE = "second-moment-lost"
_CONFIRMED = 1  # the rule asks for two samples on end: it is told one step after it began


def judged(kind: Kind, setup: Setup, path: Path) -> Training:
    """The training's numbers, findings, and what became of it in a few words."""
    run = Run(path)
    view = View(run)
    findings = tuple(diagnose(view))
    numbers = measured(run, view, setup, findings)
    outcome, good = _outcome(numbers)
    steps, loss = run.scalars("loss")
    return Training(
        name=kind.name, title=kind.title, run=path, numbers=numbers, outcome=outcome, good=good, findings=findings,
        series=columns(steps, loss, median), series_of="loss",
    )  # fmt: skip


def measured(run: Run, view: View, setup: Setup, findings: Sequence[Finding]) -> dict[str, float]:
    """By name: the loss, updates in learning rates, second moments that are zero, rates, and when it was told."""
    steps, updates = run.scalars("largest_update")
    exploded = steps[~(updates < EXPLODES)]  # NaN too
    told = [finding.since_step for finding in findings if finding.rule == _RULE]
    finite = updates[np.isfinite(updates)]
    loss = run.scalars("loss")[1]
    return {
        "loss_spell": median(loss[: setup.spell]),
        "loss_end": median(loss[-_TAIL:]),
        "largest_update": float(finite.max()) if len(finite) == len(updates) else math.inf,
        "exploded_at": float(exploded[0]) if len(exploded) else math.inf,
        "told_at": float(min(told) + _CONFIRMED) if told else math.inf,
        "told": float(len(told)),
        "epsilon_told": float(any(f.evidence["epsilon_is_zero"] == "yes" for f in findings if f.rule == _RULE)),
        "nonfinite_told": float(any(f.rule == "nonfinite" and f.severity == "alarm" for f in findings)),
        "weights_lost": _weights_lost(run),
        "moments_zero": _moments_zero(run, setup),
        "moments_lost_in_fp16": _lost_in_fp16(view, setup),
        "rate_spread": _rate_spread(run, setup),
        "rate_spread_end": _last(run, "rate_spread"),
    }


def _weights_lost(run: Run) -> float:
    """The part of the branch's weights that is not finite at the second step: what the first one has made of them."""
    spectrum = run.spectrum("weights", BRANCH, 1)
    return spectrum.nonfinite / spectrum.count


def _moments_zero(run: Run, setup: Setup) -> float:
    """Of the second moments whose first moments are not zero, the part that is, while the branch opens: the mean."""
    shares: list[float] = []
    for step in _early(setup):
        try:
            first, second = (run.spectrum("optimizer", f"{BRANCH}:{m}", step) for m in ("exp_avg", "exp_avg_sq"))
        except NotRecordedError:  # the run has ended before, or its optimizer's state is kept elsewhere
            return math.nan
        if first.count > first.zeros:
            shares.append(max(second.zeros - first.zeros, 0) / (first.count - first.zeros))
    return float(np.mean(shares)) if shares else math.nan


def _lost_in_fp16(view: View, setup: Setup) -> float:
    """Of nonzero second moments as recorded, what FP16 would make zero while the branch opens: the mean."""
    answer = whatif(view, "fp16", shift=0, collection="optimizer")
    name = f"{BRANCH}:exp_avg_sq"
    if name not in answer.names:
        return math.nan
    steps, lost, _ = answer.over_time(name)
    inside = np.isin(steps, np.array(_early(setup)))
    return float(lost[inside].mean()) if inside.any() else math.nan


def _rate_spread(run: Run, setup: Setup) -> float:
    """The median over the first steps after the spell, in which no training has exploded yet."""
    try:
        steps, spread = run.scalars("rate_spread")
    except NotRecordedError:
        return math.nan
    return median(spread[np.isin(steps, np.array(_early(setup)))])


def _early(setup: Setup) -> range:
    """The first quarter of the opening; the branch's first gradients have then become moments."""
    return range(setup.spell + 1, setup.spell + 1 + setup.opening // 4)


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
