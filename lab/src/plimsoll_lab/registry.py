"""All experiments, by name, in the order of the rows that they are of."""

import difflib
from collections.abc import Mapping
from typing import Any

from plimsoll.errors import ArgumentError
from plimsoll_lab.experiments.adam import Adam
from plimsoll_lab.experiments.amp import AMP
from plimsoll_lab.experiments.audit import AUDIT
from plimsoll_lab.experiments.bert import BERT
from plimsoll_lab.experiments.clip import CLIP, DEMO
from plimsoll_lab.experiments.errors import ERRORS
from plimsoll_lab.experiments.formats import FORMATS
from plimsoll_lab.experiments.gradients import GRADIENTS
from plimsoll_lab.experiments.layerwise import LAYERWISE
from plimsoll_lab.experiments.levels import LEVELS
from plimsoll_lab.experiments.t5 import T5
from plimsoll_lab.experiments.techniques import TECHNIQUES
from plimsoll_lab.experiments.tf32 import TF32
from plimsoll_lab.experiments.underflow import UNDERFLOW
from plimsoll_lab.experiments.unit import UNIT
from plimsoll_lab.experiments.unit_factors import UNIT_FACTORS
from plimsoll_lab.experiments.unit_sweep import UNIT_SWEEP
from plimsoll_lab.study import Experiment, Study

_IN_ORDER: tuple[Experiment | Study[Any, Any], ...] = (
    DEMO, CLIP, UNDERFLOW, Adam(), T5, TF32, LAYERWISE, UNIT, UNIT_FACTORS, AUDIT, UNIT_SWEEP, BERT, AMP, TECHNIQUES,
    GRADIENTS, LEVELS, FORMATS, ERRORS,
)  # fmt: skip
EXPERIMENTS: Mapping[str, Experiment | Study[Any, Any]] = {experiment.name: experiment for experiment in _IN_ORDER}


def experiment_named(name: str) -> Experiment | Study[Any, Any]:
    """The experiment of that name; raises `ArgumentError` with those that there are."""
    found = EXPERIMENTS.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
    hint = f" Nearest: {near[0]}." if near else ""
    raise ArgumentError(
        f"lab: expected the name of an experiment ({', '.join(EXPERIMENTS)}); got {name!r}.{hint} "
        "plimsoll lab lists them."
    )
