"""What became of the trainings of the small BERT, read from their runs and answers and from nothing else."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll_lab.experiments.bert.data import Question, questions
from plimsoll_lab.experiments.bert.scores import exact, f1
from plimsoll_lab.experiments.bert.training import ANSWERS, PHASES, Job, Kind
from plimsoll_lab.result import Training
from plimsoll_lab.statistics import columns, lost

_LAST = 0.1  # of the first training's steps, whose mean loss is what it ends at
GOOD = 3.0  # points of F1 behind FP32, below which a training has come to what it should
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Of one training: exact match and F1 of its answers in per cent, and the loss on masked tokens in nats."""

    exact: float
    f1: float
    nats: float


Scores = Mapping[str, Sequence[Score]]


def scores(jobs: Sequence[Job]) -> dict[str, list[Score]]:
    """The scores of all trainings, by kind, in the seeds' order."""
    asked = questions(held_out=True)
    found: dict[str, list[Score]] = {}
    for job in sorted(jobs, key=lambda job: job.seed):
        found.setdefault(job.kind.name, []).append(_score(job, asked))
    return found


def _score(job: Job, asked: Sequence[Question]) -> Score:
    given: list[tuple[int, int]] = json.loads((job.folder / ANSWERS).read_text())
    points = scored(asked, given)
    _, nats = Run(job.folder / PHASES[0]).scalars("nats")
    tail = float(nats[-max(int(len(nats) * _LAST), 1) :].mean())
    return Score(exact=points[0], f1=points[1], nats=tail if math.isfinite(tail) else math.inf)


def scored(asked: Sequence[Question], given: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Exact match and F1 in per cent of answers that are given as their first and last tokens."""
    pairs = [
        (question.tokens[first : last + 1], question.tokens[question.first : question.last + 1])
        for question, (first, last) in zip(asked, given, strict=True)
    ]
    right, near = (100.0 * sum(score(*pair) for pair in pairs) / len(pairs) for score in (exact, f1))
    return right, near


def mean(found: Scores, kind: str, what: str) -> float:
    """The mean of exact, f1 or nats over the seeds."""
    return float(np.mean([getattr(score, what) for score in found[kind]]))


def behind(found: Scores, kind: str, other: str) -> float:
    """By how many points of F1 a kind is behind another, in the mean over seeds; negative where it is ahead."""
    return mean(found, other, "f1") - mean(found, kind, "f1")


def nats_over(found: Scores, kind: str, other: str) -> float:
    """The last loss of the first training over another's, in the mean over seeds."""
    return mean(found, kind, "nats") / mean(found, other, "nats")


def judged(kind: Kind, job: Job, phase: str, found: Scores) -> Training:
    """What became of one phase of one kind, with the run of the first seed: numbers, findings, and the verdict."""
    run = Run(job.folder / phase)
    view = View(run)
    findings = tuple(diagnose(view))
    short = behind(found, kind.name, "fp32")
    numbers = {what: mean(found, kind.name, what) for what in ("exact", "f1", "nats")} | {"behind_fp32": short}
    numbers |= {name: value for name, value in lost(view).items() if name == "lost_after"}
    numbers["alarms"] = float(sum(finding.severity == "alarm" for finding in findings))
    ratio = nats_over(found, kind.name, "fp32")
    good = ratio < 1.02 if phase == PHASES[0] else short < GOOD
    steps, nats = run.scalars("nats")
    return Training(
        name=f"{job.folder.name}-{phase}", title=f"{kind.title}: {_TITLES[phase]}", run=run.path, numbers=numbers,
        outcome="as FP32" if good else "trails", good=good, findings=findings, series_of="loss",
        series=columns(steps, nats),
    )  # fmt: skip


_TITLES = {"masked": "masked", "spans": "answers"}
