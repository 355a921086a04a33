"""``plimsoll whatif``: what another format would have made of a run."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from plimsoll.cli.paths import RunPlace, opened, view_at
from plimsoll.cli.terminal import console, say_json
from plimsoll.text import printable

if TYPE_CHECKING:
    from plimsoll.diagnosis import WhatIf


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

    answers = [(one, asked(view_at(one, None), fmt, shift, collection, inference)) for one in opened(run)]
    if output == "json":
        data = [{"model": one.model, **answer.to_dict()} for one, answer in answers]
        whole = {"runs": data} if len(data) > 1 else answers[0][1].to_dict()
        say_json(whole)
        return
    for place, (one, answer) in enumerate(answers):
        if len(answers) > 1:
            console().print(Text(("\n" if place else "") + printable(one.called, lines=False), style="bold"))
        _print(answer, layers)


def _print(answer: "WhatIf", layers: int) -> None:
    target = console()
    target.print(Text(answer.sentence, style="bold"))
    target.print()
    target.print(answer.table(most=layers, width=min(target.width, 100)))
    if answer.censored:
        target.print()
        target.print(
            Text("The run's own format may have flushed values already: they are not in the estimates.", "dim")
        )
