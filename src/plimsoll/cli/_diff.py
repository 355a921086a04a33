"""``plimsoll diff``: where two runs part, as text or JSON, and an exit code for scripts."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from plimsoll.cli._place import opened, said
from plimsoll.cli._terminal import console

if TYPE_CHECKING:
    from rich.console import Console

    from plimsoll.diagnosis import Divergence

_TOLD = 8  # differences of settings and series that are listed


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN", help="One run's folder or URI, the one to go by.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN", help="The other one's.")],
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="Text for people, or JSON for other programs.")
    ] = "text",
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="The share of values that may be zero in one run only.")
    ] = 0.05,
    computed: Annotated[
        list[str] | None,
        typer.Option("--computed-in", metavar="FORMAT", help="A further format that was computed in. May be repeated."),
    ] = None,
    until: Annotated[int | None, typer.Option("--until", help="Compare up to this step.")] = None,
) -> None:
    """The first step and tensor where two runs part beyond rounding. Exit code 0: nowhere; 1: there; 2: unreadable."""
    from plimsoll.diagnosis import diff as asked

    found = asked(opened(run_a), opened(run_b), tolerance=tolerance, formats=computed or (), until=until)
    found = replace(found, a=_called(run_a, found.a), b=_called(run_b, found.b))
    if output == "json":
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        _print(found, console())
    if found.first is not None:
        raise typer.Exit(1)


def _called(given: str, path: str) -> str:
    """The run's folder, or the URI that it was given by."""
    from plimsoll.runs._uri import is_uri

    return said(given) if is_uri(given) else path


def _print(found: "Divergence", target: "Console") -> None:
    from plimsoll.diagnosis import grouped, shown

    target.print(Text(f"A  {shown(found.a)}\nB  {shown(found.b)}", style="dim"))
    target.print(Text(found.sentence, style="bold red" if found.first else "bold green"))
    if found.first is not None:
        target.print()
        target.print(found.table(width=min(target.width, 100)))
    for name, a, b in found.changed[:_TOLD]:
        target.print(Text(f"{name}: {shown(a)} in A, {shown(b)} in B"))
    if len(found.changed) > _TOLD:
        target.print(Text(f"and {len(found.changed) - _TOLD} more settings"))
    for which, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            target.print(Text(f"only in {which}: {grouped(names, _TOLD)}"))
