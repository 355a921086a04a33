"""``plimsoll diff``: the place where two runs diverge, and an exit code."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import Json, Quiet, Until
from plimsoll.cli.paths import OpenRun, open_runs, view_of
from plimsoll.errors import ArgumentError
from plimsoll.tensor_collections import LABELS

if TYPE_CHECKING:
    from rich.console import Console

    from plimsoll.diagnosis import Divergence

_LISTED = 8  # differences of settings and series


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="The folder or URI of the reference run.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="The folder or URI of the run to compare with it.")],
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", metavar="SHARE", help="Share of a tensor's values that may be zero in one run only."
        ),
    ] = 0.05,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help=("A format that operations use inside and no recorded tensor shows, such as tf32."),
        ),
    ] = None,
    until: Until = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Find the first step and tensor where two runs diverge.

    Differences that rounding explains do not count. Exit code 0: the runs do not diverge. 1: they do. 2: one of them
    cannot be read.
    """
    from plimsoll.diagnosis import diff as divergence_of, shown

    pairs, alone = _pairs(open_runs(run_a), open_runs(run_b))
    divergences = [
        replace(
            divergence_of(view_of(a, until), view_of(b, until), tolerance=tolerance, formats=formats or ()),
            a=_label(run_a, a), b=_label(run_b, b),
        )
        for a, b in pairs
    ]  # fmt: skip
    divergences = _earliest_named([a.model for a, _ in pairs], divergences)
    if as_json:
        data = [{"model": a.model, **each.to_dict()} for (a, _), each in zip(pairs, divergences, strict=True)]
        whole = {"runs": data, "only_in_one": alone} if len(data) + len(alone) > 1 else divergences[0].to_dict()
        messages.write_json(whole)
    else:
        from rich.text import Text

        from plimsoll.cli.terminal import console

        target = console()
        for index, divergence in enumerate(divergences):
            if index:
                target.print()
            _print(divergence, target)
        for name in map(shown, alone):
            target.print(Text(f"only one of the scripts trains {name}", style="bold red"))
    if alone or any(divergence.first is not None for divergence in divergences):
        raise typer.Exit(1)


def _pairs(of_a: list[OpenRun], of_b: list[OpenRun]) -> tuple[list[tuple[OpenRun, OpenRun]], list[str]]:
    """Return the runs of the same models, and the models of only one script."""
    if len(of_a) == len(of_b) == 1:
        return [(of_a[0], of_b[0])], []
    models_a, models_b = ({opened.model: opened for opened in runs} for runs in (of_a, of_b))
    both = [name for name in models_a if name in models_b]
    if not both:
        raise ArgumentError(
            "diff: expected runs of the same models; got "
            f"{' and '.join(', '.join(opened.model or opened.label for opened in runs) for runs in (of_a, of_b))}. "
            "Name the folder of one model's run on each side."
        )
    alone = [name for name in (*models_a, *models_b) if name not in both]
    return [(models_a[name], models_b[name]) for name in both], alone


def _earliest_named(models: list[str], found: "list[Divergence]") -> "list[Divergence]":
    """Return notes on the models of a script that diverge later than another one."""
    from plimsoll.diagnosis import shown

    parted = [(each.first.step, ":input" in each.first.name, model)
              for model, each in zip(models, found, strict=True) if each.first is not None]  # fmt: skip
    if len(parted) < 2:
        return found
    step, _, first = min(parted)
    note = f"{shown(first)} is the script's first model to diverge, at step {step:,}: start there."
    return [
        each if each.first is None or model == first else replace(each, notes=(*each.notes, note))
        for model, each in zip(models, found, strict=True)
    ]


def _label(path: str, opened: OpenRun) -> str:
    """Return the run's folder, or its URI if the command was given one."""
    from plimsoll.runs.storage.location import is_uri

    return opened.label if is_uri(path) else str(opened.run.path)


def _print(divergence: "Divergence", target: "Console") -> None:
    from rich.text import Text

    from plimsoll.cli.terminal import table_width
    from plimsoll.diagnosis import grouped, shown

    target.print(Text(f"A  {shown(divergence.a)}\nB  {shown(divergence.b)}", style="dim"))
    target.print(Text(divergence.sentence, style="bold red" if divergence.first else "bold green"))
    if divergence.first is not None:
        target.print()
        target.print(divergence.table(width=table_width(target)))
    for note in divergence.notes:
        target.print(Text(note))
    for name, a, b in divergence.changed[:_LISTED]:
        target.print(Text(f"{shown(name)}: {shown(a)} in A, {shown(b)} in B"))
    if len(divergence.changed) > _LISTED:
        target.print(Text(f"and {len(divergence.changed) - _LISTED} more settings"))
    for which, names in (("A", divergence.only_a), ("B", divergence.only_b)):
        if names:
            target.print(Text(f"only in {which}: {grouped([_with_label(name) for name in names], _LISTED)}"))


def _with_label(series: str) -> str:
    """Return "collection name" with the collection's label, as other output does."""
    collection, _, name = series.partition(" ")
    return f"{LABELS.get(collection, collection)} {name}"
