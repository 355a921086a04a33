"""The experiments behind Plimsoll's claims: `plimsoll lab` lists and runs them.

An experiment trains, watches its trainings into run folders, and measures its claims from these runs alone. What comes
of it is a `Result`: each claim with its number, its threshold and whether it holds, as JSON beside runs and reports.
`perform_all` carries out all of them; `standings` says where each row of the evidence base stands after that.

Names are loaded when they are first used: a worker of one experiment needs none of the others.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll_lab.bench import Bench as Bench, Progress as Progress
    from plimsoll_lab.evidence import (
        ROWS as ROWS,
        Outcome as Outcome,
        Row as Row,
        found_in as found_in,
        recorded as recorded,
    )
    from plimsoll_lab.registry import (
        EXPERIMENTS as EXPERIMENTS,
        Standing as Standing,
        experiment_named as experiment_named,
        standings as standings,
    )
    from plimsoll_lab.result import Claim as Claim, Measured as Measured, Result as Result, Training as Training
    from plimsoll_lab.running.perform import perform as perform, perform_all as perform_all
    from plimsoll_lab.study import Experiment as Experiment, Job as Job, Kind as Kind, Sizes as Sizes, Study as Study

# Where each name lives: the same as the block for type checkers above (a test compares them).
_HOMES = {
    "perform_all": "running.perform",
    "Claim": "result",
    "Bench": "bench",
    "Experiment": "study",
    "Progress": "bench",
    "Outcome": "evidence",
    "found_in": "evidence",
    "recorded": "evidence",
    "perform": "running.perform",
    "EXPERIMENTS": "registry",
    "experiment_named": "registry",
    "Measured": "result",
    "Result": "result",
    "Training": "result",
    "ROWS": "evidence",
    "Row": "evidence",
    "Job": "study",
    "Kind": "study",
    "Sizes": "study",
    "Study": "study",
    "Standing": "registry",
    "standings": "registry",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"plimsoll_lab.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'plimsoll_lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
