"""What became of a training of the deep encoder: read from its run, and from what its task has said."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plimsoll.diagnosis import Finding, View, diagnose, whatif
from plimsoll.runs import Run
from plimsoll_lab.experiments.t5.training import Kind, Setup
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns

_RULE = "overflow-ahead"
_CONFIRMED = 1  # the rule asks for two samples on end, and the first steps are all recorded


def judged(kind: Kind, setup: Setup, path: Path, said: Mapping[str, Any]) -> Training:
    """The training's numbers, findings, and what became of it in a few words."""
    run = Run(path)
    view = View(run)
    findings = tuple(diagnose(view))
    numbers = measured(run, view, setup, findings) | {
        name: float(value) for name, value in said.items() if not isinstance(value, Mapping)
    }
    good = numbers["overflow_at"] == math.inf
    steps, loss = run.scalars("loss")
    return Training(
        name=kind.name, title=kind.title, run=path, numbers=numbers, findings=findings, good=good,
        outcome="trains" if good else f"Inf since step {numbers['overflow_at']:.0f}", series=columns(steps, loss),
        series_of="loss",
    )  # fmt: skip


def measured(run: Run, view: View, setup: Setup, findings: tuple[Finding, ...]) -> dict[str, float]:
    """By name: when the loss was first not finite, what was skipped since, when that was told, and sizes."""
    steps, loss = run.scalars("loss")
    broken = steps[~np.isfinite(loss)]
    overflow_at = float(broken[0]) if len(broken) else math.inf
    told = [finding.since_step for finding in findings if finding.rule == _RULE]
    skips = [event.step for event in view.events if event.kind == "skip" and event.step >= overflow_at]
    return {
        "overflow_at": overflow_at,
        "told_at": float(min(told) + _CONFIRMED) if told else math.inf,
        "skipped_since": len(set(skips)) / (int(steps[-1]) + 1 - overflow_at) if len(broken) else 0.0,
        "loss_end": float(loss[-1]),
        "largest_first": _largest(run, setup, 0),
        "largest_end": max(_largest(run, setup, int(step)) for step in run.steps[-3:]),
    }


def layers_of(setup: Setup) -> tuple[str, ...]:
    """What each branch returns, from the first to the last: the residual stream."""
    return tuple(f"layers.{n}.{branch}:output" for n in range(setup.layers) for branch in ("attention", "feed_forward"))


def overflowing(run: Path, setup: Setup) -> dict[str, int]:
    """In FP16, the places of the residual stream that would overflow, with at how many samples; judged by a run."""
    answer = whatif(run, "fp16", shift=0, collection="activations")
    found: dict[str, int] = {}
    for name in layers_of(setup):
        _, _, over = answer.over_time(name)
        if (over > 0).any():
            found[name] = int((over > 0).sum())
    return found


def _largest(run: Run, setup: Setup, step: int) -> float:
    """The largest magnitude of the residual stream at a step; Inf where there are infinite values."""
    found = 0.0
    for name in layers_of(setup):
        spectrum = run.spectrum("activations", name, step)
        found = math.inf if spectrum.pos_infs or spectrum.neg_infs else max(found, spectrum.absmax)
    return found
