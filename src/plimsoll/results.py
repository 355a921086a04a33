"""Bases of results: text that notebooks show instead of fields, and data that JSON can hold."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast


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


class JsonRecord:
    """A base for dataclasses whose `to_dict` is their fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON-able data; NaN and infinities are names ("nan", "inf")."""
        return fields_of(self)


def fields_of(record: Any) -> dict[str, Any]:
    """Return a dataclass's fields as JSON-able data, in their order."""
    return {part.name: as_data(getattr(record, part.name)) for part in fields(record)}


def _record_or_text(value: object) -> Any:
    """Return what a record's `to_dict` returns, or else its fields; of other objects their text."""
    if hasattr(value, "to_dict"):
        return cast("Any", value).to_dict()
    return fields_of(value) if is_dataclass(value) else str(value)


def as_data(value: object, other: Callable[[object], Any] = _record_or_text) -> Any:
    """Return a value as JSON can hold it.

    Args:
        value: Any value. NaN and infinities become their names. NumPy's scalars are numbers.
        other: Makes data of an object that JSON has no kind for. Default: of a record its fields, else the text.

    >>> as_data({"low": 0.5, "high": float("inf"), "window": (1, 2)})
    {'low': 0.5, 'high': 'inf', 'window': [1, 2]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:  # so that this module needs no NumPy
        return as_data(cast("Any", value).item(), other)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): as_data(item, other) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(item, other) for item in cast("Iterable[object]", value)]
    return other(value)
