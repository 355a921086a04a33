"""Arguments and options that several commands share, as parameters' types.

One grammar holds for every command: ``--json`` prints JSON, ``--output`` names the path to write, ``--format`` names a
number format, ``--until`` ends at a step, and ``--quiet`` prints errors only.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from plimsoll.cli import messages
from plimsoll.errors import ArgumentError

_RUN = "The folder of a run or script, or a URI: s3://bucket/run."


def format_names() -> list[str]:
    """Return the names of all formats, for completion."""
    from plimsoll.formats import BLOCKS, ELEMENTS

    return [fmt.name for fmt in (*ELEMENTS, *BLOCKS)]


def _checked_until(context: typer.Context, until: int | None) -> int | None:
    if until is not None and until < 0:
        raise ArgumentError(
            f"{context.command.name}: expected --until to be a step, 0 or later; got {until}. Leave it out "
            "for all that was recorded."
        )
    return until


def collection_names() -> list[str]:
    """Return the names of all collections, for completion."""
    from plimsoll.tensor_collections import NAMES

    return list(NAMES)


def rule_names() -> list[str]:
    """Return the ids of all rules, for completion."""
    from plimsoll.diagnosis.rules.registry import known_rules

    return list(known_rules())


AsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments and options.")
]
RunsFolder = Annotated[str, typer.Argument(metavar="DIR", help="The folder that runs are in or below. Default: runs.")]
PlanFile = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="The TOML file to write the plan to.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=_RUN)]
RunArguments = Annotated[list[str] | None, typer.Argument(metavar="RUN", help=f"{_RUN} Globs work too: 'runs/*'.")]
NumberFormat = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORMAT",
        autocompletion=format_names,
        help="A number format: any name that plimsoll formats lists.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


AlsoInFile = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", help="Also write it to a file: .html, .json, .md or .txt."),
]


def form_of(command: str, as_json: bool, form: str | None, default: str) -> str:
    """Return the form that `--json` and `--output-format` ask for, if they agree."""
    if as_json and form not in (None, "json"):
        raise ArgumentError(
            f"{command}: expected either --json or --output-format {form}; got both. Leave one of them out."
        )
    return "json" if as_json else form or default


Until = Annotated[
    int | None,
    typer.Option(
        "--until", metavar="STEP", callback=_checked_until, help="Use the run up to this step. Default: all of it."
    ),
]


def _set_quiet(quiet: bool) -> bool:
    # Only ever turned on here: `plimsoll -q check` has done so before `check` reads its own options.
    if quiet:
        messages.set_quiet(True)
    return quiet


# A parameter `_quiet: Quiet = False` is all that a command needs: text and notes then stop by themselves.
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=_set_quiet, help="Print JSON and errors only. The exit code is the same."),
]


def with_repeated_names(arguments: Sequence[str], parameters: Sequence[Any]) -> list[str]:
    """Return a command's arguments with an option's name before each of its values."""
    # An option whose metavar ends in three dots takes all words up to the next option: `--against a b` is `--against a
    # --against b`, which is what the parser knows.
    greedy = {name for p in parameters if str(p.metavar or "").endswith("...") for name in p.opts}
    result: list[str] = []
    name = ""
    for index, word in enumerate(arguments):
        if word == "--":
            return [*result, *arguments[index:]]
        if word.startswith("-") and word != "-":
            name = word if word in greedy else ""
        elif name and result[-1] != name:
            result.append(name)
        result.append(word)
    return result
