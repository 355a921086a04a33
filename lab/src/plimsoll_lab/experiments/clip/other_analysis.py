"""What became of the trainings without hard batches, and of those with nothing but hard ones."""

import math

import numpy as np

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll_lab.experiments.clip.analysis import LOST, TAIL, of_parameters
from plimsoll_lab.experiments.clip.training import Setup
from plimsoll_lab.experiments.clip.variants import Kind
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns, lost_at, mean, median, share_lost

AT_ONCE = 40  # steps, or half of a training that is shorter than twice that


def judged_never(kind: Kind, setup: Setup, run: Run) -> Training:
    """T3's second half: what is lost of gradients as they shrink, and whether the scale follows."""
    view = View(run)
    findings = tuple(diagnose(view))
    steps, lost = lost_at(view)
    (_, loss), (_, scale), (_, norms) = view.scalar("loss"), view.scalar("scale"), view.scalar("grad_norm")
    total = setup.steps_of(kind)
    early = (steps >= setup.warmup) & (steps < total // 6)
    told = [f.since_step for f in findings if f.rule.startswith("underflow") and f.severity != "info"]
    numbers = {
        "lost_before": mean(lost[early]),
        "lost_after": share_lost(view, total * 3 // 4),
        "loss_end": median(loss[-TAIL:]),
        "scale_before": float(np.log2(scale[0])),
        "scale_end": float(np.log2(scale[-1])),
        "gradient_fell_binades": math.log2(median(norms[setup.warmup : total // 6]) / median(norms[total * 3 // 4 :])),
        "underflow_since": float(min(told)) if told else math.nan,
    }
    good = numbers["lost_after"] <= LOST
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, good=good, findings=findings,
        outcome="gradients whole" if good else f"{percent(numbers['lost_after'])} of activation gradient values lost",
        series=columns(np.arange(len(loss)), loss, median), series_of="loss",
    )  # fmt: skip


def judged_always(kind: Kind, _setup: Setup, run: Run) -> Training:
    """T7: what the scale does where every batch overflows at any, and what is lost."""
    view = View(run)
    steps, lost = lost_at(view)
    (_, loss), (scaled_at, scale) = view.scalar("loss"), view.scalar("scale")
    numbers = {
        "lost_after": share_lost(view, view.last_step // 2),
        "lost_end": mean(lost[steps > view.last_step - TAIL]),
        "loss_end": median(loss[-TAIL:]),
    } | of_parameters(view)  # fmt: skip
    if len(scale):
        exponents, soon = np.log2(scale), min(AT_ONCE, view.last_step // 2)
        numbers["scale_before"], numbers["scale_end"] = float(exponents[0]), float(exponents[-1])
        numbers["fell_at_once"] = float(exponents[0] - exponents[scaled_at < soon].min())
        numbers["highest_later"] = float(exponents[scaled_at >= soon].max())
    good = numbers["lost_after"] <= LOST
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, good=good, findings=tuple(diagnose(view)),
        outcome="trains on" if good else "gradients stay zero",
        series=columns(np.arange(len(loss)), loss, median), series_of="loss",
    )  # fmt: skip
