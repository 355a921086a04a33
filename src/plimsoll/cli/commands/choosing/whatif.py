"""``plimsoll whatif``: losses of another format or scale, estimated from a run."""

from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import Json, NumberFormat, Quiet, RunArgument, Until, collection_names
from plimsoll.cli.paths import by_model, open_runs, view_of
from plimsoll.text import printable

if TYPE_CHECKING:
    from plimsoll.diagnosis import WhatIf


def whatif(
    run: RunArgument,
    fmt: NumberFormat,
    shift: Annotated[
        int | None,
        typer.Option(
            "--shift", metavar="POWER", help="Multiply the values by 2^POWER. Default: the best single shift."
        ),
    ] = None,
    collection: Annotated[
        str,
        typer.Option(
            "--collection",
            metavar="NAME",
            autocompletion=collection_names,
            help="The tensors: gradients, weights, activations, ...",
        ),
    ] = "gradients",
    inference: Annotated[
        bool, typer.Option("--inference", help="Judge weights and activations as they are, unscaled.")
    ] = False,
    layers: Annotated[
        int, typer.Option("--layers", metavar="N", min=1, help="Number of layers to list, largest losses first.")
    ] = 20,
    until: Until = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Estimate how many values another format would lose.

    Nothing is trained again: the answer comes from the values that a run recorded. It says how much would be lost,
    subnormal or overflow, and which scales work.
    """
    from plimsoll.diagnosis import whatif as answer_of

    answers = [
        (opened, answer_of(view_of(opened, until), fmt, shift, collection, inference)) for opened in open_runs(run)
    ]
    if as_json:
        messages.write_json(by_model([(opened, answer.to_dict()) for opened, answer in answers]))
        return
    for index, (opened, answer) in enumerate(answers):
        if len(answers) > 1:
            messages.write(("\n" if index else "") + printable(opened.label, lines=False))
        _print(answer, layers)


def _print(answer: "WhatIf", layers: int) -> None:
    from rich.text import Text

    from plimsoll.cli.terminal import console, table_width

    target = console()
    target.print(Text(answer.sentence, style="bold"))
    target.print()
    target.print(answer.table(most=layers, width=table_width(target)))
    if answer.censored:
        target.print()
        target.print(Text("Values that underflowed in the run's own format already are not in the estimates.", "dim"))
