"""``plimsoll whatif``: what another format would have made of a run."""

import json
from typing import Annotated, Literal

import typer
from rich.text import Text

from plimsoll.cli._place import RunPlace, opened
from plimsoll.cli._terminal import console


def whatif(
    run: RunPlace,
    fmt: Annotated[str, typer.Option("--format", help="The format to ask about: any name of plimsoll formats.")],
    shift: Annotated[
        int | None, typer.Option("--shift", help="Multiply the values by 2 to this power; the best as it comes.")
    ] = None,
    collection: Annotated[
        str, typer.Option("--collection", help="Which tensors: gradients, weights, activations, ...")
    ] = "gradients",
    inference: Annotated[
        bool, typer.Option("--inference", help="Ask about weights and activations, unscaled.")
    ] = False,
    layers: Annotated[int, typer.Option("--layers", min=1, help="How many layers to list, the worst first.")] = 20,
    output: Annotated[
        Literal["text", "json"], typer.Option("--output", help="Text for people, or JSON for other programs.")
    ] = "text",
) -> None:
    """What a format would make of a run's tensors: how much is lost, subnormal or overflows, and which scales serve."""
    from plimsoll.diagnosis import whatif as asked

    answer = asked(opened(run), fmt, shift, collection, inference)
    if output == "json":
        typer.echo(json.dumps(answer.to_dict(), indent=2, allow_nan=False))
        return
    target = console()
    target.print(Text(answer.sentence, style="bold"))
    target.print()
    target.print(answer.table(most=layers, width=min(target.width, 100)))
    if answer.censored:
        target.print()
        target.print(
            Text("The run's own format may have flushed values already: they are not in the estimates.", "dim")
        )
