"""``plimsoll diff``: where two runs part, as text or JSON, and an exit code for scripts."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from plimsoll.cli.paths import Opened, opened, view_at
from plimsoll.cli.terminal import console, say_json
from plimsoll.errors import ArgumentError
from plimsoll.tensor_collections import LABELS

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
    from plimsoll.diagnosis import diff as asked, shown

    pairs, alone = _pairs(opened(run_a), opened(run_b))
    found = [
        replace(
            asked(view_at(a, until), view_at(b, until), tolerance=tolerance, formats=computed or ()),
            a=_called(run_a, a), b=_called(run_b, b),
        )
        for a, b in pairs
    ]  # fmt: skip
    found = _earliest_named([a.model for a, _ in pairs], found)
    if output == "json":
        data = [{"model": a.model, **each.to_dict()} for (a, _), each in zip(pairs, found, strict=True)]
        whole = {"runs": data, "only_in_one": alone} if len(data) + len(alone) > 1 else found[0].to_dict()
        say_json(whole)
    else:
        for place, each in enumerate(found):
            if place:
                console().print()
            _print(each, console())
        for name in map(shown, alone):
            console().print(Text(f"only one of the scripts trains {name}", style="bold red"))
    if alone or any(each.first is not None for each in found):
        raise typer.Exit(1)


def _pairs(of_a: list[Opened], of_b: list[Opened]) -> tuple[list[tuple[Opened, Opened]], list[str]]:
    """Return the runs of the same models, and the models that only one of the scripts has."""
    if len(of_a) == len(of_b) == 1:
        return [(of_a[0], of_b[0])], []
    models_a, models_b = ({one.model: one for one in runs} for runs in (of_a, of_b))
    both = [name for name in models_a if name in models_b]
    if not both:
        raise ArgumentError(
            "diff: expected runs of the same models; got "
            f"{' and '.join(', '.join(one.model or one.called for one in runs) for runs in (of_a, of_b))}. "
            "Name the folder of one model's run on each side."
        )
    alone = [name for name in (*models_a, *models_b) if name not in both]
    return [(models_a[name], models_b[name]) for name in both], alone


def _earliest_named(models: list[str], found: "list[Divergence]") -> "list[Divergence]":
    """Of a script's models, a note for those that part later than another, or as early in a computed input."""
    from plimsoll.diagnosis import shown

    parted = [(each.first.step, ":input" in each.first.name, model)
              for model, each in zip(models, found, strict=True) if each.first is not None]  # fmt: skip
    if len(parted) < 2:
        return found
    step, _, first = min(parted)
    note = f"{shown(first)} is the script's model that parts first, at step {step:,}: look there first."
    return [
        each if each.first is None or model == first else replace(each, notes=(*each.notes, note))
        for model, each in zip(models, found, strict=True)
    ]


def _called(given: str, one: Opened) -> str:
    """Return the run's folder, or the URI that it was given by."""
    from plimsoll.runs.storage.location import is_uri

    return one.called if is_uri(given) else str(one.run.path)


def _print(found: "Divergence", target: "Console") -> None:
    from plimsoll.diagnosis import grouped, shown

    target.print(Text(f"A  {shown(found.a)}\nB  {shown(found.b)}", style="dim"))
    target.print(Text(found.sentence, style="bold red" if found.first else "bold green"))
    if found.first is not None:
        target.print()
        target.print(found.table(width=min(target.width, 100)))
    for note in found.notes:
        target.print(Text(note))
    for name, a, b in found.changed[:_TOLD]:
        target.print(Text(f"{shown(name)}: {shown(a)} in A, {shown(b)} in B"))
    if len(found.changed) > _TOLD:
        target.print(Text(f"and {len(found.changed) - _TOLD} more settings"))
    for which, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            target.print(Text(f"only in {which}: {grouped([_with_label(name) for name in names], _TOLD)}"))


def _with_label(series: str) -> str:
    """Return "collection name" with the collection's label, as all other output has it."""
    collection, _, name = series.partition(" ")
    return f"{LABELS.get(collection, collection)} {name}"
