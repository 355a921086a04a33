"""``plimsoll parity``: comparison of two recipes' training, and an exit code."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import AlsoInFile, Json, Quiet, Until
from plimsoll.cli.paths import expand, local_file, open_single

if TYPE_CHECKING:
    from plimsoll.diagnosis import Parity
    from plimsoll.runs import Run

_STYLES = {"equivalent": "bold green", "better": "bold green", "worse": "bold red", "undecided": "bold yellow"}


def parity(
    base: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE",
            help="Runs of the recipe to go by: folders, URIs, or files of TensorBoard, W&B or CSV. Globs work too.",
        ),
    ],
    against: Annotated[
        list[str],
        typer.Option(
            "--against", metavar="CANDIDATE...", help="Runs of the recipe to judge, likewise, up to the next option."
        ),
    ],
    tolerance: Annotated[
        str,
        typer.Option(
            "--tolerance", metavar="AMOUNT", help="Largest difference that does not matter: 0.01, or 1% of the base."
        ),
    ],
    scalar: Annotated[str, typer.Option("--scalar", metavar="NAME", help="The recorded number to compare.")] = "loss",
    better: Annotated[
        Literal["lower", "higher"] | None,
        typer.Option(
            "--better", metavar="WHICH", help="Whether lower or higher values are better. Default, of a loss: lower."
        ),
    ] = None,
    confidence: Annotated[
        float,
        typer.Option(
            "--confidence",
            metavar="SHARE",
            help="Probability that the interval is right at every step at which it is read.",
        ),
    ] = 0.95,
    run_noise: Annotated[
        str | None,
        typer.Option(
            "--run-noise",
            metavar="AMOUNT",
            help="Standard deviation of the difference between two runs of one recipe, if it is known.",
        ),
    ] = None,
    until: Until = None,
    output: AlsoInFile = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Judge whether one recipe trains as well as another.

    Losses are paired by step, and run by run where both sides have equally many runs. The answer may be read at every
    step of runs that go on. Exit code 0: no worse than the tolerance allows. 1: worse. 2: undecided, or a run cannot be
    read.
    """
    from plimsoll.diagnosis import parity as judged

    file = local_file("parity", "-o", output, "parity.html")
    if file is not None:
        from plimsoll.report.single_file.parity_file import check_parity_path

        check_parity_path(file)  # before the work
    found = judged(
        runs_at(base),
        runs_at(against),
        tolerance=amount(tolerance),
        scalar=scalar,
        better=better,
        confidence=confidence,
        run_noise=None if run_noise is None else amount(run_noise),
        until=until,
    )
    if file is not None:
        from plimsoll.report import write_parity

        write_parity(found, file)
    if as_json:
        messages.write_json(found.to_dict())
    else:
        _print(found)
        if file is not None:
            messages.write_line(f"written to {file}")
    if not found.is_no_worse:
        raise typer.Exit(1 if found.verdict == "worse" else 2)


def runs_at(paths: list[str]) -> "list[Run]":
    """Return the runs at paths, whoever recorded them."""
    from plimsoll.runs import Run
    from plimsoll.runs.importing.tracker_files import kind_of

    return [
        open_single(path, "parity").run if kind_of(path) is None else Run.of(path) for path in expand(paths, files=True)
    ]


def amount(text: str) -> float | str:
    """Return a number of the command line as one, and a share with its sign as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def _print(found: "Parity") -> None:
    from rich.text import Text

    from plimsoll.cli.terminal import console, table_width

    target = console()
    target.print(Text(found.sentence, style=_STYLES[found.verdict]))
    if found.remaining:
        target.print(Text(found.remaining))
    target.print()
    target.print(found.table(width=table_width(target)))
    if found.notes:
        target.print()
    for note in found.notes:
        target.print(Text(note, style="dim"))
