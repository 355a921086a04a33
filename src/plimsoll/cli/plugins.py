"""Commands of other installed distributions, found through the entry-point group ``plimsoll.commands``."""

import importlib.metadata
from collections.abc import Callable, Collection
from typing import Any

import typer

from plimsoll.cli.terminal import complain
from plimsoll.errors import MissingExtraError

GROUP = "plimsoll.commands"
# Arguments of a command that cannot be loaded are accepted, so that its own error is shown and no usage error.
_ANY_ARGUMENTS: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_LAB = (
    "lab: expected the distribution plimsoll-lab, which has the experiments; got an environment without it. In a "
    "checkout of Plimsoll: pip install -e ./lab"
)


def add_commands(app: typer.Typer, own: Collection[str]) -> None:
    """Add the commands of the entry points to the app, and one for the laboratory that says how to install it.

    Args:
        app: The command line.
        own: Names of Plimsoll's own commands; an entry point cannot replace them.
    """
    names: set[str] = set()
    for point in sorted(importlib.metadata.entry_points(group=GROUP)):
        if point.name in own or point.name in names:
            complain(f"The command {point.name!r} of {point.value} is left out: there is one of that name already.")
            continue
        names.add(point.name)
        try:
            app.command(point.name)(point.load())
        except Exception as error:  # noqa: BLE001  (a broken distribution must not take the other commands with it)
            reason = f"{type(error).__name__}: {error}"
            message = f"{point.name}: expected {point.value} to import; got {reason}. Reinstall its distribution."
            app.command(point.name, context_settings=_ANY_ARGUMENTS)(_failing(message))
    if "lab" not in names:
        app.command("lab", context_settings=_ANY_ARGUMENTS)(_failing(_LAB))


def _failing(message: str) -> Callable[..., Any]:
    def command() -> None:
        raise MissingExtraError(message)

    command.__doc__ = message.replace(": expected", " is not available: expected", 1)
    return command
