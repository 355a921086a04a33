"""``plimsoll receipt``: the precision of a script's step, or of a recorded run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import AlsoInFile, AsModule, Json, Quiet
from plimsoll.cli.paths import by_model, file_for_model, local_file, open_runs
from plimsoll.cli.script import runner
from plimsoll.cli.script.runner import AnswerSession
from plimsoll.errors import ArgumentError

if TYPE_CHECKING:
    from plimsoll.receipts import Receipt
    from plimsoll.receipts.script_step import ScriptStep

# Levels with their aliases: to import them would import torch before the script does, so a test compares the two.
LEVELS = (
    "fp32", "tf32", "amp-fp16", "amp-bf16", "fp16-master", "fp16-pure", "bf16-master", "bf16-stochastic", "bf16-kahan",
    "fp8-unit", "fp8-tensor", "o0", "o1", "o2", "o3",
)  # fmt: skip
ENDINGS = (".html", ".json", ".md", ".txt")  # likewise


def receipt(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT|RUN", help="A Python script, with -m the name of a module, or a recorded run's folder."
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGS", help=("The script's own arguments and options. Put -- before those that receipt has too.")
        ),
    ] = None,
    as_module: AsModule = False,
    declared: Annotated[
        str | None,
        typer.Option(
            "--declared", metavar="LEVEL|FILE", help=("The declared precision: a level, or a plan's TOML file.")
        ),
    ] = None,
    fail_on_deviation: Annotated[
        bool, typer.Option("--fail-on-deviation", help="Exit with 1 if anything deviates from --declared.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="List every operation, in the order of the step.")] = False,
    output: AlsoInFile = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Record the precision that one training step really runs in.

    A script runs until its second training step is done and recorded, and is stopped then. What it prints goes to
    standard error. The receipt of a recorded run has the formats between modules and of weights and state, and no
    single operations. Exit code 0: a receipt. 1: deviations, with --fail-on-deviation. 2: no training step, or no run.
    """
    if fail_on_deviation and declared is None:
        raise ArgumentError(
            "receipt: expected --declared with --fail-on-deviation; got none. Name a level: --declared amp-bf16."
        )
    _check_declared(declared)
    printer = Printer(file=_file(output), as_json=as_json, rows=rows, fail=fail_on_deviation, several=False)
    if as_module or _is_script(target):
        name = Path(target).name

        def recorder(give_up: Callable[[], None]) -> "ScriptStep":
            from plimsoll.receipts.script_step import ScriptStep

            return ScriptStep(declared, name, give_up)

        session = AnswerSession("receipt", recorder, printer.show)
        raise runner.RunAfterCli(lambda: session.run(target, arguments or [], as_module=as_module))
    if arguments:
        raise ArgumentError(
            f"receipt: expected no arguments after a recorded run; got {' '.join(arguments)!r}. Leave it out."
        )
    raise typer.Exit(_show_runs(target, declared, printer))


def _show_runs(target: str, declared: str | None, printer: "Printer") -> int:
    from plimsoll.receipts import receipt_of_run

    found = [(opened, receipt_of_run(opened.run, declared)) for opened in open_runs(target)]
    if len(found) == 1:
        return printer.show(found[0][1])
    if printer.as_json:
        messages.write_json(by_model([(opened, each.to_dict()) for opened, each in found]))
    codes: list[int] = []
    for opened, each in found:
        file = None if printer.file is None else file_for_model(printer.file, opened, len(found))
        codes.append(Printer(file=file, as_json=False, rows=printer.rows, fail=printer.fail,
                             several=printer.as_json).show(each))  # fmt: skip
    return max(codes)


class Printer:
    """Shows a receipt as the options ask, and returns the exit code."""

    def __init__(self, *, file: Path | None, as_json: bool, rows: bool, fail: bool, several: bool) -> None:
        self.file, self.as_json, self.rows, self.fail = file, as_json, rows, fail
        self._several = several  # its JSON is printed with that of others

    def show(self, receipt: "Receipt", rank: int = 0) -> int:
        """Print and write the receipt, or other ranks' deviations; return the exit code."""
        if not rank:
            self._print(receipt)
        elif receipt.deviations:
            messages.error(f"rank {rank}: {receipt.verdict}")
        return 1 if self.fail and receipt.deviations else 0

    def _print(self, receipt: "Receipt") -> None:
        if self.as_json:
            messages.write_json(receipt.to_dict())
        elif not self._several:
            from plimsoll.cli.terminal import console

            console().print(receipt.table(full=self.rows))
        if self.file is not None:
            receipt.save(self.file)  # after the answer, which a file that cannot be written must not cost
            if not self.as_json and not self._several:
                messages.write("")
                messages.write_line(f"written to {self.file}")


def _is_script(target: str) -> bool:
    """Return whether a target is a script: a file, or a folder with __main__.py."""
    if "://" in target:
        return False
    path = Path(target)
    if path.is_dir():
        return (path / "__main__.py").is_file()
    if not path.exists():
        raise ArgumentError(
            f"receipt: expected a Python script or the folder of a run; got {target!r}, which is not there. Give its "
            "path, or -m and the name of a module."
        )
    runner.check(target)
    return True


def _check_declared(declared: str | None) -> None:
    """Raise for what is no level and no plan. May import torch before the script."""
    if declared is None or declared.lower() in LEVELS:
        return
    if declared.endswith(".toml"):
        from plimsoll.formats import Plan

        if not Path(declared).is_file():
            raise ArgumentError(
                f"receipt: expected a plan file; got {declared!r}, which is not there. Write one with plimsoll plan."
            )
        Plan.load(declared)
        return
    from plimsoll.receipts.declared.declaration import parse

    parse(declared)


def _file(output: str | None) -> Path | None:
    file = local_file("receipt", "--output", output, "receipt.html")
    if file is None:
        return None
    if file.suffix.lower() not in ENDINGS:
        raise ArgumentError(
            f"receipt: expected --output to end in {', '.join(ENDINGS)}; got {file}. Choose one of these. Put -- "
            "before an option of the script."
        )
    if not file.absolute().parent.is_dir() or file.is_dir():
        raise ArgumentError(f"receipt: expected --output in a folder that exists; got {file}. Make its folder first.")
    return file.absolute()  # the script may change the working folder
