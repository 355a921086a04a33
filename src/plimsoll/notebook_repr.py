"""`NotebookRepr`: results that notebooks show as text, not as fields."""

from typing import Any


class NotebookRepr:
    """A base for results whose `str` notebooks show; `repr` stays the class's."""

    __slots__ = ()

    # IPython walks the class hierarchy and takes the first class that defines `_repr_pretty_` or `__repr__` itself. A
    # dataclass defines `__repr__` itself and would win over an inherited method. So each subclass gets the method as
    # its own.
    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._repr_pretty_ = NotebookRepr._repr_pretty_

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle  # no result contains itself
        for index, line in enumerate(str(self).split("\n")):
            if index:
                printer.break_()  # keeps the indentation of a list around it
            printer.text(line)
