"""Text and JSON on standard output, notes and errors on standard error.

Every command prints through here or through `plimsoll.cli.terminal`. Names, settings and texts of a run come from
elsewhere: `plimsoll.text.printable` shows control characters as escapes, so that a terminal does not obey them. Errors
of the parser and of the API are put into the words of the command line. This module imports no Rich, which `--json` and
`--help` do not need.
"""

import json
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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


def defect() -> int:
    """Print the traceback of the exception at hand to standard error, and return the exit code of no answer, 3."""
    print(printable(traceback.format_exc()), file=sys.stderr, end="")  # noqa: T201
    error("This is a defect of Plimsoll, and no answer. Please report it with the lines above.")
    return 3


def _print(text: str) -> None:
    # typer.echo removes colours where the output is no terminal, and handles Windows consoles.
    import typer

    typer.echo(text)


# -- errors of the parser and of the API, in the words of the command line ---------------------------------------------

_CHOICES = re.compile(r"is not one of (.+?)\.?$")
_LEAST = re.compile(r"(?:greater than or equal to |x>=)(-?[\d.]*\d)")
_OPERATION = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*(?=: expected )")  # of the API: `diagnose`, `Plan.load`
_FORMATS = ("a format's name, a Format or a floating torch dtype", "the name of a number format")
_EXTRA = re.compile(r"argument\S* \((.*)\)\.?$", re.DOTALL)  # the noun is "argument", "arguments" or "argument(s)"


def explained(error: Any) -> str:
    """Return a parser's error as a line: command, expectation, value, remedy."""
    context = error.ctx
    command, path = context.command, context.command_path
    operation = "" if context.parent is None else f"{command.name}: "
    more = f"{path} -h lists the options."
    if hasattr(error, "possibilities"):
        near = f"Did you mean {' or '.join(sorted(error.possibilities))}? " if error.possibilities else ""
        return f"{operation}expected an option of {path}; got {error.option_name}. {near}{more}"
    if hasattr(error, "option_name"):
        option = next((p for p in command.params if error.option_name in p.opts), None)
        if option is None or option.is_flag:
            return f"{operation}expected {error.option_name} alone; got a value for it. Leave the value out."
        return f"{operation}expected {error.option_name} {option.metavar}; got no value. {more}"
    parameter = getattr(error, "param", None)
    if parameter is None and context.parent is None:
        return f"expected a command; got none. {path} -h lists them."
    if parameter is None:
        extra = _EXTRA.search(error.message)
        got = f"{extra[1]} as well. Leave it out" if extra else f"something else ({error.message.rstrip('.')})"
        return f"{operation}expected {_line(path, command)}; got {got}. {more}"
    if hasattr(error, "param_type"):  # an argument or option that is missing
        return f"{operation}expected {_shown(parameter)}; got none. Write {_line(path, command)}."
    return f"{operation}expected {_rule(parameter, error.message)}; got {_given(error)}. {more}"


# Parameters of a command are named as the arguments of the API that take their values.
def in_command_words(message: str, command: str, parameters: Iterable[Any] = ()) -> str:
    """Return an API error's message on one line, in the words of a command.

    The API's operation gives way to the command, and its arguments to the command's options. A file that a message
    begins with stays.
    """
    message = " ".join(message.split())
    operation = _OPERATION.match(message)
    if operation is None or operation[0].isupper() or Path(operation[0]).exists():  # a variable of the environment
        return message
    rest = message[operation.end() :]
    for parameter in parameters:
        name, option = parameter.name, f"{parameter.opts[0]} " if _is_option(parameter) else ""
        rest = re.sub(rf"\b{name}=None\b", "none", rest)
        rest = re.sub(rf"\b{name}=True\b", option.rstrip(), rest)
        rest = re.sub(rf"\b{name}=", option, rest)
        if option:
            rest = re.sub(rf"^: expected {name}\b", f": expected {option.rstrip()}", rest)
    return f"{command}{rest.replace(*_FORMATS)}"


def _line(path: str, command: Any) -> str:
    """Return the command with its arguments and the options that it cannot do without."""
    words = [_shown(p) if p.required else f"[{_shown(p)}]" for p in command.params if p.param_type_name == "argument"]
    return " ".join([path, *words, *(_shown(p) for p in command.params if _is_option(p) and p.required)])


def _shown(parameter: Any) -> str:
    word = str(parameter.metavar)
    if _is_option(parameter):
        return f"{parameter.opts[0]} {word}"
    return word if parameter.nargs == 1 else f"{word}..."


def _is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


def _rule(parameter: Any, message: str) -> str:
    """Return what must hold of a parameter, from the parser's message."""
    name = parameter.opts[0] if _is_option(parameter) else str(parameter.metavar)
    if choices := _CHOICES.search(message):
        *most, last = (word.strip(" '\"") for word in choices[1].split(","))
        return f"{name} to be {', '.join(most)} or {last}" if most else f"{name} to be {last}"
    if least := _LEAST.search(message):
        return f"{name} to be at least {least[1]}"
    if "integer" in message:
        return f"{name} to be a whole number"
    return f"{name} to be a number" if "number" in message or "float" in message else f"{name} to be valid ({message})"


def _given(error: Any) -> str:
    values, *_ = error.ctx.command.make_parser(error.ctx).parse_args(args=list(error.arguments))
    return f"{values.get(error.param.name)!r}"
