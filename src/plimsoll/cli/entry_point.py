"""Frame of the command line: commands, common options, help, form of errors."""

import difflib
import errno
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from plimsoll.cli import messages, old_spellings
from plimsoll.cli.messages import explained
from plimsoll.cli.options import Quiet, with_repeated_names
from plimsoll.cli.paths import report_missing_records, start_reading
from plimsoll.cli.script.runner import RunAfterCli
from plimsoll.errors import ArgumentError, MissingExtraError, PlimsollError
from plimsoll.text import clause
from plimsoll.version import __version__

# -- the commands: for `plimsoll --help`, completion, tests ------------------------------------------------------------

# The command NAME is the function `NAME` of the module `plimsoll.cli.commands.NAME`, or of NAME in a folder there. It
# is imported when the command runs. docs/contributing/add-a-command.md shows how to add one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command."""

    name: str  # its name, also that of its module and function
    heading: str  # the heading under which `plimsoll --help` lists it
    # Its line there: the first line of the function's docstring, which a test compares. It stands here so that help
    # needs no import of the module.
    summary: str
    own_arguments: bool = False  # whether all that follows the first argument belongs to a script that the command runs
    foreign_options: bool = False  # whether options that the command does not have belong to a script that it runs
    folder: str = ""  # The folder of its module in `plimsoll.cli.commands`. Default: none.

    @property
    def module(self) -> str:
        """The full name of its module."""
        return ".".join(["plimsoll.cli.commands", *([self.folder] if self.folder else []), self.name])


# In the order of `plimsoll --help`.
COMMANDS: tuple[Command, ...] = (
    Command(
        name="run",
        heading="Record",
        summary="Run a training script and record its numbers.",
        own_arguments=True,
    ),
    Command(name="check", heading="Diagnose", summary="Report problems of runs: where, since when, and the fix."),
    Command(name="ls", heading="Diagnose", summary="List the runs below a folder: state, severity, last step."),
    Command(name="diff", heading="Diagnose", summary="Find the first step and tensor where two runs diverge."),
    Command(
        name="receipt",
        heading="Diagnose",
        summary="Record the precision that one training step really runs in.",
        foreign_options=True,
    ),
    Command(name="parity", heading="Diagnose", summary="Judge whether one recipe trains as well as another."),
    Command(name="report", heading="Diagnose", summary="Write a run as one HTML, Markdown or JSON file."),
    Command(name="serve", heading="Diagnose", summary="Serve a web page that follows runs live."),
    Command(name="mcp", heading="Diagnose", summary="Answer agents and editors from recorded runs, over MCP."),
    Command(
        name="probe",
        heading="Choose a precision",
        summary="Answer whether a model fits a format, from a few batches.",
        foreign_options=True,
        folder="choosing",
    ),
    Command(
        name="whatif",
        heading="Choose a precision",
        summary="Estimate how many values another format would lose.",
        folder="choosing",
    ),
    Command(
        name="plan",
        heading="Choose a precision",
        summary="Choose a format and scale for each module.",
        folder="choosing",
    ),
    Command(name="certify", heading="Facts", summary="Test a cast, pack, product or sum against its format."),
    Command(name="formats", heading="Facts", summary="List number formats, or show one in full."),
    Command(
        name="doctor",
        heading="Facts",
        summary="Show devices, kernel backends and optional packages.",
        own_arguments=True,
    ),
)

# -- the frame ---------------------------------------------------------------------------------------------------------

GROUP = "plimsoll.commands"  # entry points of other distributions
_MANY_OBJECTS = 100_000  # between two collections of the garbage collector; Python's own number is 700
# Errors of paths that the system or its rights rule out, whatever is done with them.
_NOT_TO_BE_USED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG}
_OTHERS = "Other packages"  # heading of their commands
# Arguments of a command that cannot be loaded are accepted, so that its own error is shown and no usage error.
_ANY_ARGUMENTS: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_LAB = (
    "lab: expected the distribution plimsoll-lab, which has the experiments; got an environment without it. In a "
    "checkout of Plimsoll: pip install -e ./lab"
)
_LAB_SUMMARY = "Run the experiments behind the documentation's claims."
_UsageError: Any = typer.BadParameter.__base__  # click's, which newer versions of typer carry within them


class _Command(TyperCommand):
    """A command whose help shows flags as flags and arguments by their names alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace old spellings, repeat names of options of several values, then parse."""
        messages.set_command(self.name or "", self.params)
        interspersed = ctx.allow_interspersed_args
        args = with_repeated_names(args, self.params) if interspersed else args
        args = old_spellings.rewritten(self.name or "", args, self.params, interspersed)
        try:
            return super().parse_args(ctx, list(args))
        except _UsageError as error:
            error.ctx, error.arguments = ctx, args
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command's name."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(_argument(p) for p in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if parameter.param_type_name == "argument":
                rows["Arguments"].append((str(parameter.metavar), str(getattr(parameter, "help", "") or "")))
            elif record is not None:
                rows["Options"].append((record[0], f"{record[1]} Repeatable." if parameter.multiple else record[1]))
        for heading, listed in rows.items():
            if listed:
                with formatter.section(heading):
                    formatter.write_dl(listed)


def _argument(parameter: Any) -> str:
    word = f"{parameter.metavar}{'' if parameter.nargs == 1 else '...'}"
    return word if parameter.required else f"[{word}]"


class _LazyCommands(Mapping[str, Any]):
    """All commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._own = {command.name: command for command in COMMANDS}
        self._loaded: dict[str, Any] = {}
        self._others: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name in self._own:
                self._loaded[name] = _own_command(self._own[name])
            else:
                self._loaded[name] = _other_command(name, self.others[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self.others})

    def __len__(self) -> int:
        return len({**self._own, **self.others})

    # Entry points are read only for help and for names that are not Plimsoll's own.
    @property
    def others(self) -> dict[str, Any]:
        """Entry points of other distributions by name, with None for a missing laboratory."""
        if self._others is None:
            self._others = _entry_points(self._own)
        return self._others


def _entry_points(own: Any) -> dict[str, Any]:
    import importlib.metadata  # reading the metadata of all installed packages takes some 20 ms

    points: dict[str, Any] = {}
    for point in sorted(importlib.metadata.entry_points(group=GROUP)):
        if point.name in own or point.name in points:
            messages.error(f"The command {point.name!r} of {point.value} is left out: a command of that name exists.")
        else:
            points[point.name] = point
    points.setdefault("lab", None)
    return points


def _own_command(command: Command) -> Any:
    module = importlib.import_module(command.module)
    settings: dict[str, Any] = {"allow_interspersed_args": False} if command.own_arguments else {}
    if command.foreign_options:
        settings["ignore_unknown_options"] = True
    return _built(command.name, getattr(module, command.name), settings)


def _other_command(name: str, point: Any) -> Any:
    if point is None:
        return _built(name, _failing(_LAB), _ANY_ARGUMENTS)
    try:
        return _built(name, point.load(), {})
    except Exception as error:  # noqa: BLE001  (a broken distribution must not take the other commands with it)
        reason = f"{type(error).__name__}: {error}"
        message = f"{name}: expected {point.value} to import; got {clause(reason)}. Reinstall its distribution."
        return _built(name, _failing(message), _ANY_ARGUMENTS)


def _failing(message: str) -> Callable[..., Any]:
    def command() -> None:
        raise MissingExtraError(message)

    command.__doc__ = message.replace(": expected", " is not available: expected", 1)
    return command


def _built(name: str, function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    single.command(name, cls=_Command, context_settings=settings)(function)
    return typer.main.get_command(single)


class _Group(TyperGroup):
    """The command `plimsoll`: loads commands on demand, prints errors as one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  (click's signature)
        """Return the names of all commands, in the order of help."""
        return list(self.commands)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse options before the command; ``plimsoll help NAME`` is ``NAME --help``."""
        messages.set_quiet(False)
        messages.set_command("", ())
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        if not args:
            return super().parse_args(ctx, args)  # prints the help
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            raise _refused(error, ctx) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names."""
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, self.list_commands(ctx))
            did_you_mean = f"Did you mean {' or '.join(near)}? " if near else ""
            raise ArgumentError(f"expected a command; got {name!r}. {did_you_mean}plimsoll -h lists them.")
        return super().resolve_command(ctx, args)

    # An error that Plimsoll raises on purpose is a message on stderr and exit code 2, never a traceback. Anything else
    # is a defect of Plimsoll, and keeps its traceback: `main` exits with 3, which is the code of no answer. If records
    # of a run are missing, the command still answers, and exits with 2 instead of 0: the missing records might have
    # changed the answer.
    def invoke(self, ctx: Any) -> object:
        """Run the command."""
        runs = start_reading()
        try:
            result = super().invoke(ctx)
        except PlimsollError as error:
            messages.failure(error)
            raise typer.Exit(2) from error
        except _UsageError as error:
            raise _refused(error, ctx) from error
        except typer.Exit as end:  # the command's own answer, such as an alarm, is the exit code
            if report_missing_records(runs) and not end.exit_code:
                raise typer.Exit(2) from end
            raise
        except OSError as error:
            if error.errno not in _NOT_TO_BE_USED or error.filename is None:
                raise
            messages.error(f"expected a path that can be used; got {error.filename!s:.300} ({error.strerror}).")
            raise typer.Exit(2) from error
        if report_missing_records(runs):
            raise typer.Exit(2)
        return result

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings, then the options."""
        for heading, listed in self._summaries().items():
            with formatter.section(heading):
                formatter.write_dl(listed)
        options = [parameter.get_help_record(ctx) for parameter in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl(options)

    def _summaries(self) -> dict[str, list[tuple[str, str]]]:
        rows: dict[str, list[tuple[str, str]]] = {}
        for command in COMMANDS:
            rows.setdefault(command.heading, []).append((command.name, command.summary))
        rows[_OTHERS] = [
            (name, _LAB_SUMMARY if name == "lab" else f"{point.dist.name}: {point.value}")
            for name, point in self.commands.others.items()
        ]
        return rows


def _refused(error: Any, ctx: Any) -> typer.Exit:
    error.ctx = error.ctx or ctx
    messages.error(" ".join(explained(error).split()))
    return typer.Exit(2)


app = typer.Typer(
    name="plimsoll",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help needs no import of Rich: 0.07 s of 0.2.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"plimsoll {__version__}")
        raise typer.Exit


@app.callback()
def _frame(
    _version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    _quiet: Quiet = False,
) -> None:
    """Find and fix numerical problems in low-precision PyTorch training."""


def main() -> None:
    """Run the command line; entry point of ``plimsoll`` and ``python -m plimsoll``."""
    script: Callable[[], None] | None = None
    thresholds = gc.get_threshold()
    # Imports make many objects and no garbage: collections in between are a tenth of the time of `plimsoll check`.
    gc.set_threshold(_MANY_OBJECTS, *thresholds[1:])
    try:
        app(prog_name="plimsoll")
    except RunAfterCli as handover:
        script = handover.script
    except Exception as error:  # noqa: BLE001  (as Python does, with the error's text as a terminal can show it)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            # What is left in the buffer would fail once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            messages.error(f"expected room for the output; got {error.strerror}. Make room, or write it elsewhere.")
            sys.exit(2)
        sys.exit(messages.defect())
    if script is not None:
        gc.set_threshold(*thresholds)  # as under plain Python
        script()
