"""Spellings of version 0.1, which work for one release with a warning.

Each is rewritten before the command reads its arguments, so that no command knows them. Delete this module, and its one
use in `entry_point`, in the release after next.
"""

from collections.abc import Sequence
from typing import Any

from plimsoll.cli import messages

_Values = dict[str, tuple[str, ...]]  # new arguments for each value of an old option

_TEXT_OR_JSON: _Values = {"text": (), "json": ("--json",)}

# By command and old option: the new option, or the new arguments by value.
_OLD: dict[str, dict[str, str | _Values]] = {
    "check": {"--format": _TEXT_OR_JSON},
    "diff": {"--format": _TEXT_OR_JSON, "--computed-in": "--format"},
    "lab": {"--format": _TEXT_OR_JSON, "--out": "--output"},
    "plan": {"--output": _TEXT_OR_JSON, "--out": "--output"},
    "report": {
        "--format": {
            "html": ("--output-format", "html"),
            "markdown": ("--output-format", "markdown"),
            "json": ("--json",),
        }
    },
    "run": {"--out": "--output"},
    "whatif": {"--output": _TEXT_OR_JSON},
}


def rewritten(command: str, arguments: Sequence[str], parameters: Sequence[Any], interspersed: bool) -> list[str]:
    """Return a command's arguments with old spellings replaced; warn of each.

    Warnings go to standard error. `parameters` show whether an option takes a value. Unless `interspersed`, the first
    argument ends the options: `plimsoll run` leaves those of the script alone.
    """
    options = [p for p in parameters if p.param_type_name == "option" and not p.is_flag and not p.count]
    takes_value = {name for option in options for name in option.opts} | set(_OLD.get(command, {}))
    result: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--" or (not interspersed and not word.startswith("-")):
            return [*result, word, *rest]
        name, sign, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if name not in takes_value:
            result.append(word)
            continue
        if not sign and not rest:
            result.append(word)  # the value is missing, as the command will report
            continue
        value = value if sign else rest.pop(0)
        replacement = _replacement(command, name, value)
        if replacement is None:
            replacement = [word] if sign else [name, value]
        result += replacement
    return result


def _replacement(command: str, name: str, value: str) -> list[str] | None:
    """Return the new arguments for an old option and value; None for a current one."""
    new = _OLD.get(command, {}).get(name)
    if isinstance(new, str):
        _warn(f"{command}: {name} is now {new}.")
        return [new, value]
    if new is None or value not in new:
        return None
    if new[value]:
        _warn(f"{command}: {name} {value} is now {' '.join(new[value])}.")
    else:
        _warn(f"{command}: {name} {value} is the default now. Leave it out.")
    return list(new[value])


def _warn(change: str) -> None:
    messages.error(f"{change} The old spelling works in this release and not in the next one.")
