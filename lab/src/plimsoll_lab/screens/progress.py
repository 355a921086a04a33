"""Progress of an experiment, on stderr: bars on a terminal, else plain lines."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from plimsoll.cli.terminal import console

_WIDEST = 22  # cells of a part's title


class Bars:
    """A bar for each part."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._task = progress, TaskID(0)

    def begin(self, title: str, steps: int) -> None:
        """Adds the part's bar."""
        self._task = self._progress.add_task(f"{title:<{_WIDEST}}", total=steps)

    def advance(self) -> None:
        """Moves it on."""
        self._progress.advance(self._task)


class Lines:
    """A line for each part."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, title: str, steps: int) -> None:
        """Says that the part begins."""
        self._console.print(f"{title}: {steps:,} steps", soft_wrap=True)

    def advance(self) -> None:
        """Says nothing."""


@contextmanager
def told() -> Generator[Bars | Lines]:
    """Whom to tell; bars are there until the end of the block."""
    target = console(stderr=True)
    if not target.is_terminal:
        yield Lines(target)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=30),
        TextColumn("{task.completed:>5.0f}/{task.total:.0f}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=target, transient=True) as progress:
        yield Bars(progress)
