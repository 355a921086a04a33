"""``plimsoll lab``: the experiments with their claims; runs one or all."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.options import Json, Quiet
from plimsoll.cli.paths import local_folder
from plimsoll.cli.terminal import console
from plimsoll.errors import ArgumentError
from plimsoll_lab.screens import list_experiments, list_rows, live_progress, show

if TYPE_CHECKING:
    from plimsoll_lab import Outcome


def lab(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The experiment. Without it, all are listed.")
    ] = None,
    rows: Annotated[
        bool, typer.Option("--list", help="List every row of the evidence base with its state, from --output if given.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Run all experiments, one after the other.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for runs, reports and result.json. Default: lab-NAME or lab-all.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Steps of each training. Default: the experiment's own.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of weights and data.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", metavar="NAME", help="cpu emulates FP16; cuda computes in it.")
    ] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="Train a larger model, for longer.")] = False,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Run the experiments behind the documentation's claims.

    Exit code 0: all claims hold. 1: a claim fails. 2: an experiment did not run.
    """
    _check(name, rows, every, steps)
    folder = local_folder("lab", output, f"lab-{name or 'all'}")
    if rows:
        list_rows(folder, as_json)
    elif every:
        _all(folder or Path("lab-all"), as_json, seed=seed, device=device, full=full)
    elif name is None:
        list_experiments(folder, as_json)
    else:
        _one(name, folder or Path(f"lab-{name}"), as_json, seed=seed, device=device, steps=steps, full=full)


def _one(name: str, folder: Path, as_json: bool, **settings: Any) -> None:
    from plimsoll_lab import experiment_named, perform

    chosen, target = experiment_named(name), console()
    if not as_json:
        target.print(Text.assemble((f"lab {chosen.name}  ", "bold"), (chosen.claim, "")))
    with live_progress() as progress:
        result = perform(chosen, folder, progress=progress, **settings)
    if as_json:
        messages.write_json(result.to_dict())
    else:
        show(result, target)
    if not result.holds:
        raise typer.Exit(1)


def _all(folder: Path, as_json: bool, **settings: Any) -> None:
    """Carry out all with a line each; exit with 2 for a failure, 1 for a failed claim."""
    from plimsoll_lab import perform_all

    with live_progress() as progress:
        outcomes = perform_all(
            folder, progress=progress, done=_say if not as_json else None, **settings
        )  # fmt: skip
    if as_json:
        messages.write((folder / "outcomes.json").read_text())
    else:
        held, minutes = sum(outcome.holds for outcome in outcomes), sum(outcome.seconds for outcome in outcomes) / 60
        messages.write_line(
            f"{held} of {len(outcomes)} experiments hold; {minutes:.0f} minutes. {folder}: outcomes.json"
        )
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(2)
    if not all(outcome.holds for outcome in outcomes):
        raise typer.Exit(1)


def _say(outcome: "Outcome") -> None:
    target, colour = console(), "green" if outcome.holds else "bold red"
    line = Text.assemble((f"{outcome.experiment:<14}", "bold"), (outcome.state, colour))
    target.print(line.append(f"  {outcome.seconds:.0f} s", style="dim"))
    for said in (*outcome.failed, *filter(None, [outcome.error])):
        target.print(Text(f"  {said}"), soft_wrap=True)


def _check(name: str | None, rows: bool, every: bool, steps: int | None) -> None:
    if (name is not None) + rows + every > 1:
        raise ArgumentError("lab: expected one of NAME, --list and --all; got more than one. Leave out the others.")
    if every and steps is not None:
        raise ArgumentError(
            f"lab: expected --steps with one experiment, since each needs its own; got it with --all ({steps}). "
            "Name the experiment."
        )
