"""State of each row of the evidence base, from its experiments and its tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plimsoll_lab import registry
from plimsoll_lab.evidence.outcomes import Outcome, rows_of
from plimsoll_lab.evidence.rows import ROWS, Row

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
    names = tuple(name for name, each in registry.EXPERIMENTS.items() if row.id in rows_of(each.source))
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
