"""The command line's frame: subcommands, the version, and how errors look.

An error that Plimsoll raises on purpose is a message on stderr and exit code 2, never a traceback. Anything else is a
defect of Plimsoll, and keeps its traceback. An answer about a run of which records are missing is given, and exit code
2 instead of 0: what is missing might have changed it.
"""

import importlib.metadata
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from plimsoll.cli.commands.check import check
from plimsoll.cli.commands.diff import diff
from plimsoll.cli.commands.doctor import doctor
from plimsoll.cli.commands.formats import formats
from plimsoll.cli.commands.plan import plan
from plimsoll.cli.commands.report import report
from plimsoll.cli.commands.run import run
from plimsoll.cli.commands.serve import serve
from plimsoll.cli.commands.whatif import whatif
from plimsoll.cli.paths import begin_reading, say_what_is_missing
from plimsoll.cli.script.runner import Handover
from plimsoll.cli.terminal import complain
from plimsoll.errors import MissingExtraError, PlimsollError
from plimsoll.text import printable
from plimsoll.version import __version__

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


_UsageError: Any = typer.BadParameter.__base__  # click's, which newer versions of typer carry within them


class _Group(TyperGroup):
    """Turns a `PlimsollError` into its message and exit code 2."""

    def invoke(self, ctx: Any) -> object:  # typer has moved its context class between versions
        runs = begin_reading()
        try:
            result = super().invoke(ctx)
        except PlimsollError as error:
            complain(" ".join(str(error).split()))
            raise typer.Exit(2) from error
        except _UsageError as error:  # typer shows it, with the argument that it is about
            error.message = printable(error.message, lines=False)
            raise
        if say_what_is_missing(runs):
            raise typer.Exit(2)
        return result


app = typer.Typer(
    name="plimsoll",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"plimsoll {__version__}")
        raise typer.Exit


@app.callback()
def _frame(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """How low in precision a PyTorch training run may go."""


_COMMANDS = (formats, doctor, check, whatif, plan, diff, report, serve, run)
for _command in _COMMANDS[:-1]:
    app.command()(_command)
# What follows SCRIPT is the script's own.
app.command(context_settings={"allow_interspersed_args": False})(run)
add_commands(app, own=[command.__name__ for command in _COMMANDS])


def main() -> None:
    """Run the command line; the entry point of ``plimsoll`` and of ``python -m plimsoll``."""
    script: Callable[[], None] | None = None
    try:
        app(prog_name="plimsoll")
    except Handover as handover:
        script = handover.script
    except Exception:  # noqa: BLE001  (as Python does, with the error's text as a terminal can show it)
        print(printable(traceback.format_exc()), file=sys.stderr, end="")  # noqa: T201
        sys.exit(1)
    if script is not None:
        script()
