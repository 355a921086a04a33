"""``plimsoll lab``: the experiments, with their claims; one of them, carried out; or all."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from plimsoll.cli.paths import folder_here
from plimsoll.cli.terminal import console, say, say_json, say_line
from plimsoll.errors import ArgumentError
from plimsoll_lab.screens.experiment_list import list_experiments, list_rows
from plimsoll_lab.screens.progress import told
from plimsoll_lab.screens.result import show

if TYPE_CHECKING:
    from plimsoll_lab import Outcome


def lab(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The experiment. Without it, all are listed.")
    ] = None,
    rows: Annotated[
        bool, typer.Option("--list", help="Lists every row of the evidence base, with its state; of --out, if given.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Carries out all of them, one after the other.")] = False,
    out: Annotated[
        str | None,
        typer.Option("--out", help="The folder for runs, reports and result.json. As it comes, lab-NAME or lab-all."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="How many steps each training has.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of weights and data.")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option("--device", help="cpu emulates FP16; cuda computes in it.")
    ] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="A larger model, for longer.")] = False,
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="Text for people, or JSON for other programs.")
    ] = "text",
) -> None:
    """The experiments behind the claims. Exit code 0: all claims of it hold; 1: one does not; 2: it was not done."""
    _check(name, rows, every, steps)
    folder = folder_here("lab", "--out", out, f"lab-{name or 'all'}")
    if rows:
        list_rows(folder, output)
    elif every:
        _all(folder or Path("lab-all"), output, seed=seed, device=device, full=full)
    elif name is None:
        list_experiments(folder, output)
    else:
        _one(name, folder or Path(f"lab-{name}"), output, seed=seed, device=device, steps=steps, full=full)


def _one(name: str, folder: Path, output: str, **settings: Any) -> None:
    from plimsoll_lab import experiment_named, perform

    chosen, target = experiment_named(name), console()
    if output == "text":
        target.print(Text.assemble((f"lab {chosen.name}  ", "bold"), (chosen.claim, "")))
    with told() as progress:
        result = perform(chosen, folder, progress=progress, **settings)
    if output == "json":
        say_json(result.to_dict())
    else:
        show(result, target)
    if not result.holds:
        raise typer.Exit(1)


def _all(folder: Path, output: str, **settings: Any) -> None:
    """A line for each as it ends; exit code 2 where one was not carried out, else 1 where a claim does not hold."""
    from plimsoll_lab import perform_all

    with told() as progress:
        outcomes = perform_all(
            folder, progress=progress, done=_say if output == "text" else None, **settings
        )  # fmt: skip
    if output == "json":
        say((folder / "outcomes.json").read_text())
    else:
        held, minutes = sum(outcome.holds for outcome in outcomes), sum(outcome.seconds for outcome in outcomes) / 60
        say_line(f"{held} of {len(outcomes)} experiments hold; {minutes:.0f} minutes. {folder}: outcomes.json")
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
