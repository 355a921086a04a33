"""`Experiment`: what the lab knows of each; and the bench that its code works at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from plimsoll_lab.result import Measured

Engine = Literal["local", "ray"]


class Progress(Protocol):
    """Who is told how far an experiment has come."""

    def begin(self, title: str, steps: int) -> None:
        """A part begins, which has so many steps."""
        ...

    def advance(self) -> None:
        """One of them is done."""
        ...


class Silent:
    """Tells nobody."""

    def begin(self, title: str, steps: int) -> None:
        """Does nothing."""

    def advance(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What an experiment is given to work with.

    - `runs`: the folder that its runs go to, one folder each, empty at the beginning.
    - `seed`, `device`; `steps`: how long to train, None for the experiment's own; `full`: at full size.
    - `progress`: to be told of parts and steps.
    - `engine`: what the trainings run on, one of the experiment's own `engines`.
    """

    runs: Path
    seed: int
    device: str
    steps: int | None
    full: bool
    progress: Progress
    engine: Engine = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment by its name.

    - `claim`: what it shows, one sentence. `source`: the rows of the evidence base that it belongs to.
    - `settings`: what it will do at such a bench, as plain numbers; raises `ArgumentError` where it cannot.
    - `measure`: does it.
    - `engines`: what its trainings can run on; all experiments run on this machine's processes, "local".
    """

    name: str
    claim: str
    source: str
    settings: Callable[[Bench], Mapping[str, object]]
    measure: Callable[[Bench], Measured]
    engines: tuple[Engine, ...] = ("local",)
