"""The experiments that Plimsoll's claims rest on: `plimsoll lab` lists them, `plimsoll lab NAME` carries one out.

An experiment trains, watches its trainings into run folders, and measures its claims from these runs alone. What comes
of it is a `Result`: each claim with its number, its threshold and whether it holds, as JSON beside runs and reports.
`perform_all` carries out all of them; `standings` says where each row of the evidence base stands after that.

Names are loaded when they are first used: a worker of one experiment needs none of the others.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.lab._all import perform_all as perform_all
    from plimsoll.lab._claim import Claim as Claim
    from plimsoll.lab._experiment import Bench as Bench, Experiment as Experiment, Progress as Progress
    from plimsoll.lab._outcomes import Outcome as Outcome, found_in as found_in, recorded as recorded
    from plimsoll.lab._perform import perform as perform
    from plimsoll.lab._registry import EXPERIMENTS as EXPERIMENTS, experiment_named as experiment_named
    from plimsoll.lab._result import Measured as Measured, Result as Result, Training as Training
    from plimsoll.lab._rows import ROWS as ROWS, Row as Row
    from plimsoll.lab._standing import Standing as Standing, standings as standings

# Where each name lives: the same as the block for type checkers above (a test compares them).
_HOMES = {
    "perform_all": "_all",
    "Claim": "_claim",
    "Bench": "_experiment",
    "Experiment": "_experiment",
    "Progress": "_experiment",
    "Outcome": "_outcomes",
    "found_in": "_outcomes",
    "recorded": "_outcomes",
    "perform": "_perform",
    "EXPERIMENTS": "_registry",
    "experiment_named": "_registry",
    "Measured": "_result",
    "Result": "_result",
    "Training": "_result",
    "ROWS": "_rows",
    "Row": "_rows",
    "Standing": "_standing",
    "standings": "_standing",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"plimsoll.lab.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'plimsoll.lab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
