"""The function that draws audits. Reports lie above this package, and register it here."""

import importlib
from collections.abc import Callable
from typing import Any

# Audits are `Any` here: the records import this module.
_drawers: list[Callable[[Any, Any], Any]] = []


def register(drawer: Callable[[Any, Any], Any]) -> None:
    """Draw audits with this function: of one audit, or of one before and one after."""
    _drawers[:] = [drawer]


def figure(before: Any, after: Any) -> Any:
    """Return the figure of an audit, or of two. The report's own drawer is loaded if no other is registered."""
    if not _drawers:
        importlib.import_module("plimsoll.report.figures.audit")
    return _drawers[0](before, after)
