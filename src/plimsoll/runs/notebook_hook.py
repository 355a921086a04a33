"""Who shows a run in a notebook: the room of reports lies above this one, and registers its function here."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plimsoll.runs.reading.run import Run

_shower: list[Callable[["Run"], dict[str, Any]]] = []


def register(shower: Callable[["Run"], dict[str, Any]]) -> None:
    """Lets runs be shown by this function, which gives data by media type."""
    _shower[:] = [shower]


def shown(run: "Run") -> dict[str, Any]:
    """The run by media type, by who has registered: the report's room, which does so when it is loaded."""
    if not _shower:
        importlib.import_module("plimsoll.report.single_file.notebook")
    return _shower[0](run)
