"""The experiments that Plimsoll's claims rest on: `plimsoll lab` lists them, `plimsoll lab NAME` carries one out.

An experiment trains, watches its trainings into run folders, and measures its claims from these runs alone. What comes
of it is a `Result`: each claim with its number, its threshold and whether it holds, as JSON beside runs and reports.
`perform_all` carries out all of them; `standings` says where each row of the evidence base stands after that.
"""

from plimsoll.lab._all import perform_all as perform_all
from plimsoll.lab._claim import Claim as Claim
from plimsoll.lab._experiment import Bench as Bench, Experiment as Experiment, Progress as Progress
from plimsoll.lab._outcomes import Outcome as Outcome, found_in as found_in, recorded as recorded
from plimsoll.lab._perform import perform as perform
from plimsoll.lab._registry import EXPERIMENTS as EXPERIMENTS, experiment_named as experiment_named
from plimsoll.lab._result import Measured as Measured, Result as Result, Training as Training
from plimsoll.lab._rows import ROWS as ROWS, Row as Row
from plimsoll.lab._standing import Standing as Standing, standings as standings
