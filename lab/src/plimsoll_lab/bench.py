"""The settings that an experiment runs with, and how it reports its progress."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """Receiver of an experiment's progress."""

    def begin(self, title: str, steps: int) -> None:
        """Start a part of so many steps."""
        ...

    def advance(self) -> None:
        """Count one step of the part as done."""
        ...


class Silent:
    """Progress that reports nothing."""

    def begin(self, title: str, steps: int) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Settings of one call of `plimsoll lab NAME`.

    - `runs`: folder of the run folders, empty at the start.
    - `seed`: of weights and data. `device`: "cpu" or "cuda".
    - `steps`: length of each training, None for the experiment's own. `full`: use the large sizes.
    - `progress`: receives parts and steps.
    """

    runs: Path
    seed: int
    device: str
    steps: int | None
    full: bool
    progress: Progress
