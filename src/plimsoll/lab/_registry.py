"""All experiments, by name."""

import difflib
from collections.abc import Mapping

from plimsoll.errors import ArgumentError
from plimsoll.lab._audit import AUDIT
from plimsoll.lab._clip import CLIP
from plimsoll.lab._experiment import Experiment
from plimsoll.lab._unit_factors import UNIT_FACTORS
from plimsoll.lab._unit_quality import UNIT

EXPERIMENTS: Mapping[str, Experiment] = {each.name: each for each in (CLIP, AUDIT, UNIT, UNIT_FACTORS)}


def experiment_named(name: str) -> Experiment:
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
