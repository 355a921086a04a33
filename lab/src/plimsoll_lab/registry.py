"""All experiments by name, and the state of each row of the evidence base."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from plimsoll.errors import ArgumentError
from plimsoll_lab.evidence import ROWS, Outcome, Row, rows_of
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

# -- experiments, in the order of the rows that they are of ------------------------------------------------------------

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


# -- states of rows, from their experiments and their tests ------------------------------------------------------------

State = Literal["holds", "holds in part", "not carried out", "tested"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a row.

    - `state`: "holds" where all claims of the row do, in all of its experiments, "holds in part" where some do not,
      "not carried out" where an experiment of it has no outcome, "tested" where tests alone stand for it.
    - `experiments`: their names, with what of each one's outcome is of this row in `outcomes`, where there is one.
    - `unmeasured`: what of the row was not measured, since it needs a GPU.
    """

    row: Row
    state: State
    experiments: tuple[str, ...]
    outcomes: Mapping[str, Outcome]
    unmeasured: str

    def to_dict(self) -> dict[str, object]:
        """As JSON-able data."""
        found = {name: outcome.state for name, outcome in self.outcomes.items()}
        return {
            "id": self.row.id, "says": self.row.says, "state": self.state,
            "experiments": {name: found.get(name, "not carried out") for name in self.experiments},
            "failed": [line for outcome in self.outcomes.values() for line in outcome.failed],
            "tests": list(self.row.tests), "not measured": self.unmeasured,
        }  # fmt: skip


def standings(outcomes: Mapping[str, Outcome]) -> list[Standing]:
    """Every row's, with these outcomes by experiment."""
    return [_standing(row, outcomes) for row in ROWS.values()]


def _standing(row: Row, outcomes: Mapping[str, Outcome]) -> Standing:
    names = tuple(name for name, each in EXPERIMENTS.items() if row.id in rows_of(each.source))
    own = {name: outcomes[name].of_row(row.id) for name in names if name in outcomes}
    on_gpu = any(outcome.device == "cuda" for outcome in own.values())
    return Standing(
        row=row, state=_state(row, names, own), experiments=names, outcomes=own, unmeasured="" if on_gpu else row.gpu
    )


def _state(row: Row, names: tuple[str, ...], own: Mapping[str, Outcome]) -> State:
    if not names:
        return "tested" if row.tests else "not carried out"
    if len(own) < len(names) or any(outcome.error for outcome in own.values()):
        return "not carried out"
    return "holds" if all(outcome.holds for outcome in own.values()) else "holds in part"
