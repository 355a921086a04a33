"""Who draws an audit: the room of reports lies above this one, and registers its function here."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plimsoll.unit.auditing.result import Audit

_drawers: list[Callable[["Audit", "Audit | None"], Any]] = []


def register(drawer: Callable[["Audit", "Audit | None"], Any]) -> None:
    """Lets audits be drawn by this function: of one audit, or of one before and one after."""
    _drawers[:] = [drawer]


def figure(before: "Audit", after: "Audit | None") -> Any:
    """The figure, by who has registered; the report's room, which does so when it is loaded, unless another has."""
    if not _drawers:
        importlib.import_module("plimsoll.report.figures.audit")
    return _drawers[0](before, after)
