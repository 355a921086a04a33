"""Registry of the function that shows a run in a notebook. The package of reports registers it."""

import importlib
from collections.abc import Callable
from typing import Any

# The argument is a `Run`. Its module imports this one, so the type is left open.
_functions: list[Callable[[Any], dict[str, Any]]] = []


def register(function: Callable[[Any], dict[str, Any]]) -> None:
    """Show runs by this function, which returns data by media type."""
    _functions[:] = [function]


def shown(run: object) -> dict[str, Any]:
    """Return a run's data by media type. Loads the report package if nothing is registered."""
    if not _functions:
        importlib.import_module("plimsoll.report.single_file.notebook")
    return _functions[0](run)
