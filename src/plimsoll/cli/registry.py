"""Registry of the commands: the list for `plimsoll --help`, completion, tests.

The command NAME is the function `NAME` of the module `plimsoll.cli.commands.NAME`, or of NAME in a folder there. It is
imported when the command runs. docs/contributing/add-a-command.md shows how to add one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: Its name, also that of its module and function.
        heading: The heading under which `plimsoll --help` lists it.
        summary: Its line there: the first line of the function's docstring, which a test compares. It stands here so
            that help needs no import of the module.
        own_arguments: Whether all that follows the first argument belongs to a script that the command runs.
        foreign_options: Whether options that the command does not have belong to a script that it runs.
        folder: The folder of its module in `plimsoll.cli.commands`. Default: none.
    """

    name: str
    heading: str
    summary: str
    own_arguments: bool = False
    foreign_options: bool = False
    folder: str = ""

    @property
    def module(self) -> str:
        """The full name of its module."""
        return ".".join(["plimsoll.cli.commands", *([self.folder] if self.folder else []), self.name])


# In the order of `plimsoll --help`.
COMMANDS: tuple[Command, ...] = (
    Command(
        name="run",
        heading="Record",
        summary="Run a training script and record its numbers.",
        own_arguments=True,
    ),
    Command(name="check", heading="Diagnose", summary="Report problems of runs: where, since when, and the fix."),
    Command(name="ls", heading="Diagnose", summary="List the runs below a folder: state, severity, last step."),
    Command(name="diff", heading="Diagnose", summary="Find the first step and tensor where two runs diverge."),
    Command(
        name="receipt",
        heading="Diagnose",
        summary="Record the precision that one training step really runs in.",
        foreign_options=True,
    ),
    Command(name="parity", heading="Diagnose", summary="Judge whether one recipe trains as well as another."),
    Command(name="report", heading="Diagnose", summary="Write a run as one HTML, Markdown or JSON file."),
    Command(name="serve", heading="Diagnose", summary="Serve a web page that follows runs live."),
    Command(name="mcp", heading="Diagnose", summary="Answer agents and editors from recorded runs, over MCP."),
    Command(
        name="probe",
        heading="Choose a precision",
        summary="Answer whether a model fits a format, from a few batches.",
        foreign_options=True,
        folder="choosing",
    ),
    Command(
        name="whatif",
        heading="Choose a precision",
        summary="Estimate how many values another format would lose.",
        folder="choosing",
    ),
    Command(
        name="plan",
        heading="Choose a precision",
        summary="Choose a format and scale for each module.",
        folder="choosing",
    ),
    Command(name="certify", heading="Facts", summary="Test a cast, pack, product or sum against its format."),
    Command(name="formats", heading="Facts", summary="List number formats, or show one in full."),
    Command(
        name="doctor",
        heading="Facts",
        summary="Show devices, kernel backends and optional packages.",
        own_arguments=True,
    ),
)
