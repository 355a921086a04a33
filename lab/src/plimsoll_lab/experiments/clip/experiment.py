"""Experiment `clip` (T3, T4, T7): what ends a CLIP's training in FP16, and which remedy serves: fifteen trainings.

The four of `demo`, and on the same weights and batches:

- *Of the stock scaler*: a higher initial scale, a shorter growth interval, both. Published as not helping.
- *Of the scales*: the published rule for layers; a scale for each parameter, and for each of its elements.
- *No batch is hard*, for longer: gradients shrink as the model learns, and the stock scale doubles each 2,000 steps.
- *Every batch is hard*: then the gradient that comes back to the patches' embedding spans more than FP16 in every
  step, as T7 says of CLIP. With ten hard batches it does so in these alone, and a higher scale outlasts them.
"""

from dataclasses import replace

from plimsoll.runs import Run
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.clip.analysis import judged
from plimsoll_lab.experiments.clip.claims import claims
from plimsoll_lab.experiments.clip.conclusions import said
from plimsoll_lab.experiments.clip.demo import settings
from plimsoll_lab.experiments.clip.gradient_spans import spans
from plimsoll_lab.experiments.clip.other_analysis import judged_always, judged_never
from plimsoll_lab.experiments.clip.tasks import train_all
from plimsoll_lab.experiments.clip.training import Setup, setup_for
from plimsoll_lab.experiments.clip.variants import ALL_KINDS, Kind
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import workers_for
from plimsoll_lab.study import Experiment

_JUDGES = {"burst": judged, "never": judged_never, "always": judged_always}


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Likewise, with sizes of one's own."""
    kinds = list(ALL_KINDS.values())
    train_all(kinds, setup, bench, workers)
    trainings = tuple(_judged(kind, setup, bench) for kind in kinds)
    numbers = {training.name: training.numbers for training in trainings}
    return Measured(trainings=trainings, claims=claims(setup, numbers), said=said(numbers))


def _judged(kind: Kind, setup: Setup, bench: Bench) -> Training:
    run = Run(bench.runs / kind.name)
    found = _JUDGES[kind.hard](kind, setup, run)
    if kind.precision != "amp-bf16":
        return found
    return replace(found, numbers={**found.numbers, **spans(run, setup, always=kind.hard == "always")})


CLIP = Experiment(
    name="clip",
    claim="Ten bad batches silently stall a small CLIP in FP16. Where gradients span all of FP16 within a layer, "
    "neither a higher scale nor a shorter interval helps, and a scale for each layer or parameter does.",
    source="T3, T4, T7",
    settings=settings,
    measure=measure,
)
