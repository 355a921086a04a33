"""What a notebook and IPython show of an answer: its words, and not its fields."""

from typing import Any


class Shown:
    """Answers whose `str` is what a reader wants; `repr` stays that of the dataclass."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))
