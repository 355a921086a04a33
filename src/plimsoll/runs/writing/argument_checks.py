"""Checks of what a writer is given, before anything is made."""

import operator
import threading
from collections.abc import Iterable, Mapping
from typing import Any, cast

from plimsoll.errors import ArgumentError

_LAST_STEP = 1 << 62  # that a training can begin at: in a run's files, steps are integers of 64 bits
_SINK = ("open", "put", "flush", "close")


def whole(
    operation: str, name: str, value: Any, least: int, most: int | None = None, *, advice: str, shown: str = ""
) -> int:
    """Return an integer within bounds, also from NumPy or a tensor; `ArgumentError` for all else, True among it."""
    bounds = f"of {least} or more" if most is None else f"from {least} to {shown or most}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise ArgumentError(f"{operation}: expected {name} to be an integer {bounds}; got {name}={value!r}. {advice}")
    return number


def step(operation: str, name: str, value: Any) -> int:
    """Return the number of a step."""
    advice = "Give the number of the first step, as the restored checkpoint counts, or leave it out."
    return whole(operation, name, value, 0, _LAST_STEP, advice=advice, shown="2^62")


def seconds(operation: str, name: str, value: Any) -> float:
    """Return a time to wait; `ArgumentError` for what is no positive number, or more than a thread can wait."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"{operation}: expected {name} to be a positive number of seconds; got {name}={value!r}. Leave it out."
        )
    return float(value)


def settings(operation: str, value: Any) -> dict[str, object]:
    """Return a mapping as a dictionary; an empty one for None."""
    if value is not None and not isinstance(value, Mapping):
        raise ArgumentError(
            f"{operation}: expected settings to be a mapping; got settings={value!r}. Give a dict of what to keep."
        )
    return dict(cast("Mapping[str, object]", value or {}))


def listed(operation: str, name: str, value: Any) -> list[Any]:
    """Return the items of a list, tuple or the like; `ArgumentError` for a text, or what has none."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentError(f"{operation}: expected {name} to be a list; got {name}={value!r}. Put it in brackets.")
    return list(cast("Iterable[Any]", value))


def sinks(operation: str, value: Any) -> list[Any]:
    """Return a list of sinks."""
    found = listed(operation, "sinks", value)
    for sink in found:
        if not all(callable(getattr(sink, method, None)) for method in _SINK):
            raise ArgumentError(
                f"{operation}: expected sinks with the methods {', '.join(_SINK)}; got {sink!r}. "
                "plimsoll.runs.as_sink makes one of a name, a function or an object with put."
            )
    return found
