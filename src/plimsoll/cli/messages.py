"""Text and JSON on standard output, notes and errors on standard error.

Every command prints through here or through `plimsoll.cli.terminal`. Names, settings and texts of a run come from
elsewhere: `plimsoll.text.printable` shows control characters as escapes, so that a terminal does not obey them. This
module imports no Rich, which `--json` and `--help` do not need.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from plimsoll.cli.usage_errors import in_command_words
from plimsoll.errors import PlimsollError
from plimsoll.text import printable

# Of the command that runs in this process:
_quiet = False
_command: tuple[str, Sequence[Any]] = ("", ())  # its name and parameters


def set_quiet(quiet: bool) -> None:
    """Turn text and notes off or on. JSON and errors are always printed."""
    global _quiet  # noqa: PLW0603  (one command at a time)
    _quiet = quiet


def is_quiet() -> bool:
    """Return whether ``--quiet`` was given."""
    return _quiet


def set_command(name: str, parameters: Sequence[Any]) -> None:
    """Set the command whose words `failure` uses."""
    global _command  # noqa: PLW0603  (one command at a time)
    _command = (name, parameters)


def write(text: str) -> None:
    """Print text of any number of lines, unwrapped."""
    if not _quiet:
        _print(printable(text.removesuffix("\n")))


def write_line(text: str) -> None:
    """Print one line, unwrapped, whatever it contains."""
    if not _quiet:
        _print(printable(text, lines=False))


def json_text(data: object) -> str:
    """Return JSON for other programs, in printable ASCII."""
    return json.dumps(data, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def write_json(data: object) -> None:
    """Print JSON for other programs."""
    _print(json_text(data))


def note(text: str) -> None:
    """Print one line to standard error, unless the command is quiet."""
    if not _quiet:
        error(text)


def error(text: str) -> None:
    """Print one line to standard error, unwrapped, so that it can be copied."""
    print(printable(f"plimsoll: {text}", lines=False), file=sys.stderr)  # noqa: T201


def failure(raised: PlimsollError, more: str = "") -> str:
    """Print an error's message to standard error in the words of the command, and return it."""
    name, parameters = _command
    message = in_command_words(f"{raised}", name, parameters) if name else " ".join(f"{raised}".split())
    message = f"{message} {more}".rstrip()
    error(message)
    return message


def _print(text: str) -> None:
    # typer.echo removes colours where the output is no terminal, and handles Windows consoles.
    import typer

    typer.echo(text)
