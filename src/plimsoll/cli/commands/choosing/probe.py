"""``plimsoll probe``: fit of a model to a format, from a folder, file or script."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import AsModule, Json, PlanFile, Quiet, format_names
from plimsoll.cli.paths import local_file
from plimsoll.cli.script import runner
from plimsoll.cli.script.runner import AnswerSession
from plimsoll.errors import ArgumentError
from plimsoll.formats.catalogue import TARGETS
from plimsoll.probing.result import Question

if TYPE_CHECKING:
    from plimsoll.probing import Probe
    from plimsoll.probing.script_training import ScriptTraining


def _checked(name: str) -> str:
    Question.of(name)  # a format of scales has none
    return name


def probe(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|SCRIPT",
            help="A model folder (config.json, safetensors), a file of weights, or a Python script.",
        ),
    ],
    fmt: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            callback=_checked,
            autocompletion=lambda: [*dict.fromkeys((*TARGETS, *format_names()))],
            help=f"A number format, or {', '.join(TARGETS)}.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="The script's own arguments. Put -- before those that probe has too."),
    ] = None,
    as_module: AsModule = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Batches for a model folder: .pt, .safetensors. Default: random tokens.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option("--batches", metavar="N", min=1, help="Batches, or steps of a script.")] = 4,
    output: PlanFile = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Answer whether a model fits a format, from a few batches.

    It names the modules that overflow, lose values or flip decisions, and makes the plan. A script runs for a few
    training steps and is stopped then. What it prints goes to standard error. Exit code 0: it fits. 1: it does not. 2:
    the model, data or script cannot be read.
    """
    printer = _Printer(file=_file(output), as_json=as_json)
    if as_module or _is_script(target):
        _start_script(target, arguments or [], fmt, data, batches, printer, as_module=as_module)
    if arguments:
        raise ArgumentError(f"probe: expected no arguments after a model; got {' '.join(arguments)!r}. Leave them out.")
    from plimsoll.probing import probe as answer_of

    raise typer.Exit(printer.show(answer_of(target, data, fmt, batches=batches)))


def _start_script(
    target: str, arguments: list[str], fmt: str, data: str | None, steps: int, printer: "_Printer", *, as_module: bool
) -> None:
    if data is not None:
        raise ArgumentError(f"probe: expected no --data with a script, which has its own; got {data}. Leave it out.")
    if not as_module:
        runner.check(target, "probe")
    name = Path(target).name

    def recorder(give_up: Callable[[], None]) -> "ScriptTraining":
        from plimsoll.probing.script_training import ScriptTraining

        return ScriptTraining(Question.of(fmt), name, steps, give_up)

    session = AnswerSession("probe", recorder, printer.show)
    raise runner.RunAfterCli(lambda: session.run(target, arguments, as_module=as_module))


class _Printer:
    """Shows an answer as the options ask."""

    def __init__(self, *, file: Path | None, as_json: bool) -> None:
        self._file, self._as_json = file, as_json

    def show(self, found: "Probe", rank: int = 0) -> int:
        """Print the answer and write its plan, on the first rank; return the exit code."""
        if rank == 0:
            if self._as_json:
                messages.write_json(found.to_dict())
            else:
                messages.write(str(found))
            if self._file is not None:
                self._save(found, self._file)
        return 0 if found.fits else 1

    def _save(self, found: "Probe", file: Path) -> None:
        """Write the plan, after the answer, which a file that cannot be written must not cost."""
        if found.plan is None:
            messages.error(f"no plan was written to {file}: there is none")
            return
        found.plan.save(file)
        if not self._as_json:
            messages.write_line(f"written to {file}")


def _is_script(target: str) -> bool:
    path = Path(target)
    return path.suffix == ".py" or (path / "__main__.py").is_file()


def _file(output: str | None) -> Path | None:
    file = local_file("probe", "--output", output, "plan.toml")
    if file is None:
        return None
    from plimsoll.formats.plan_file import checked_path

    checked_path("probe", file)  # before the work
    return file.absolute()  # the script may change the working folder
