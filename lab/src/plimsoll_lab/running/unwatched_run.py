"""Run of a training that is not watched: its numbers alone, no spectra."""

from pathlib import Path
from typing import Self

from torch import Tensor

from plimsoll.runs import RunWriter, Scalars


class Unwatched:
    """In a Watch's place: `log` as `Watch.log`; written at the context's end.

    A step begins with the first number whose name the step before has already.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._steps: list[dict[str, Tensor]] = [{}]

    def log(self, **scalars: Tensor) -> None:
        """Keeps numbers of the present step."""
        if scalars.keys() & self._steps[-1].keys():
            self._steps.append({})
        self._steps[-1] |= scalars

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with RunWriter(self._run) as writer:
            for step, values in enumerate(self._steps):
                writer.write(Scalars(step=step, values={name: value.item() for name, value in values.items()}))
