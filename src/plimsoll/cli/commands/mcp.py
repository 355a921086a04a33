"""``plimsoll mcp``: other commands' answers for agents and editors, over MCP."""

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plimsoll.cli import messages
from plimsoll.cli.messages import in_command_words
from plimsoll.cli.options import Json, Quiet, RunsFolder
from plimsoll.cli.paths import OpenRun, by_model, expand, open_runs, start_reading, view_of
from plimsoll.errors import ArgumentError, MissingExtraError, PlimsollError, RunError
from plimsoll.extras import install_line
from plimsoll.version import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

Answer = dict[str, Any]

_INSTRUCTIONS = (
    "Answers from recorded training runs: what is wrong with a run, which number format would work, whether one recipe "
    "trains as well as another, in which precision a run was. Runs are named by their paths below the served folder: "
    "call `runs` first. Nothing is written, and no script is run."
)


def mcp(
    folder: RunsFolder = "runs",
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Answer agents and editors from recorded runs, over MCP.

    Reads requests from standard input and writes answers to standard output, until the client closes it. It writes no
    file and reads runs in or below DIR only. With --json it prints the entry for a client's configuration instead.
    """
    root = Path(folder).resolve()
    if not root.is_dir():
        raise RunError(f"No such folder: {folder}. Name the folder that runs are recorded below.")
    server = _server(root)
    if as_json:
        entry = {"command": sys.executable, "args": ["-m", "plimsoll", "mcp", str(root)]}
        messages.write_json({"mcpServers": {"plimsoll": entry}})
        return
    if sys.stdin.isatty() and not messages.is_quiet():
        messages.error(
            "A client starts this command and speaks to it. plimsoll mcp DIR --json prints what to configure it with. "
            "Ctrl-C ends it."
        )
    server.run("stdio")


def _server(root: Path) -> "MCPServer[Any]":
    """Return the server of a folder: its tools are the public methods of `Tools`."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"mcp: expected the package mcp, of version 2 or later; got none. Install it: {install_line('mcp')}"
        ) from error
    server: MCPServer[Any] = MCPServer("plimsoll", version=__version__, instructions=_INSTRUCTIONS, log_level="WARNING")
    tools, harmless = Tools(root), ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in (tools.runs, tools.findings, tools.whatif, tools.plan, tools.parity, tools.receipt):
        server.add_tool(_answering(tool), annotations=harmless)
    return server


_one_at_a_time = threading.Lock()  # the server calls tools from several threads


def _answering(tool: Callable[..., Answer]) -> Callable[..., Answer]:
    """Return a tool with errors as messages, and missing records in its answer."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(tool)
    def answer(*arguments: Any, **named: Any) -> Answer:
        with _one_at_a_time:
            opened = start_reading()
            try:
                found = tool(*arguments, **named)
                missing = {run.path.name: run.missing for run in opened if run.missing}
            except PlimsollError as error:
                raise ToolError(in_command_words(str(error), tool.__name__)) from error
            finally:
                start_reading()  # lets go of the runs
        return {**found, "missing_records": missing} if missing else found

    return answer


class Tools:
    """Questions about runs below a folder, answered with their commands' JSON.

    The folder's path is without symbolic links.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def runs(
        self, sort: Literal["started", "name", "state", "severity", "steps", "loss", "size"] = "started"
    ) -> Answer:
        """List the recorded runs with their verdicts, as `plimsoll ls` does.

        Args:
            sort: The column to sort by. By default the newest run comes first.
        """
        from plimsoll.cli.commands.ls import rows_below

        inside = [row for row in rows_below(self._root, sort) if self._is_inside(Path(row.path))]
        return {"runs": [{**row.to_dict(), "path": str(Path(row.path).relative_to(self._root))} for row in inside]}

    def findings(self, run: str, until: int | None = None) -> Answer:
        """Judge a run, as `plimsoll check` does: the verdict, and each problem with its place, evidence and fix.

        Args:
            run: Path of the run below the served folder.
            until: Last step that counts. Default: all.
        """
        from plimsoll.cli.checked_run import judge

        return self._of_each(run, lambda opened: judge(opened, until, None, {}).to_dict())

    def whatif(
        self,
        run: str,
        fmt: str,
        shift: int | None = None,
        collection: str = "gradients",
        inference: bool = False,
    ) -> Answer:
        """Estimate how much of a run's values another number format or scale would lose, as `plimsoll whatif` does.

        Args:
            run: Path of the run below the served folder.
            fmt: A number format: fp16, bf16, e4m3, e5m2, mxfp8_e4m3 and others.
            shift: Multiply the values by 2 to this power. Default: the best single one.
            collection: gradients, weights, activations, activation_gradients, optimizer or updates.
            inference: Whether weights and activations are judged unscaled.
        """
        from plimsoll.diagnosis import whatif

        return self._of_each(
            run, lambda opened: whatif(view_of(opened, None), fmt, shift, collection, inference).to_dict()
        )

    def plan(self, run: str, target: str) -> Answer:
        """Choose a number format and scales for each module from a run, as `plimsoll plan` does.

        Args:
            run: Path of the run below the served folder.
            target: fp16, bf16, fp8, mxfp8, mxfp6, mxfp4, nvfp4, nvfp4_single, or cheapest.
        """
        from plimsoll.diagnosis import plan

        return self._of_each(run, lambda opened: plan(view_of(opened, None), target).to_dict())

    def parity(
        self,
        base: list[str],
        candidate: list[str],
        tolerance: str,
        scalar: str = "loss",
        better: Literal["lower", "higher"] | None = None,
        until: int | None = None,
    ) -> Answer:
        """Judge whether one recipe trains as well as another: equivalent, worse, better or undecided.

        Answers as `plimsoll parity` does. Declare the tolerance before you look at the losses.

        Args:
            base: Paths of the runs of the recipe to go by, below the served folder. Globs work too.
            candidate: Paths of the runs of the recipe to judge, likewise.
            tolerance: Largest difference that does not matter: "0.01", or "1%" of the base's level.
            scalar: Name of the recorded number.
            better: Whether lower or higher values are better. Default, of a loss: lower.
            until: Last step that counts. Default: all.
        """
        from plimsoll.cli.commands.parity import amount, runs_at
        from plimsoll.diagnosis import parity

        sides = [runs_at([str(self._inside(p)) for p in self._expanded(paths)]) for paths in (base, candidate)]
        return parity(*sides, tolerance=amount(tolerance), scalar=scalar, better=better, until=until).to_dict()

    def receipt(self, run: str, declared: str | None = None) -> Answer:
        """Return the formats that a run was in, held against a declared precision, as `plimsoll receipt` does.

        Args:
            run: Path of the run below the served folder.
            declared: A level such as amp-bf16, or the path of a plan's TOML file below the served folder.
        """
        from plimsoll.receipts import receipt_of_run

        if declared is not None and declared.endswith(".toml"):
            declared = str(self._inside(declared))
        return self._of_each(run, lambda opened: receipt_of_run(opened.run, declared).to_dict())

    def _of_each(self, run: str, answer: Callable[[OpenRun], Mapping[str, object]]) -> Answer:
        """Return the answer for a run; of a script of several models, one for each."""
        opened = open_runs(str(self._inside(run)))
        for each in opened:
            self._inside(str(each.run.path))
        return by_model([(each, answer(each)) for each in opened])

    def _expanded(self, paths: list[str]) -> list[str]:
        return expand([str(self._inside(path)) for path in paths], files=True)

    def _inside(self, path: str) -> Path:
        """Return the path, which must be below the folder with symbolic links followed."""
        try:
            place = (self._root / path).resolve()
        except (OSError, ValueError, RuntimeError):  # a NUL, a name too long, a loop of links
            place = Path()
        if self._is_inside(place):
            return place
        raise ArgumentError(
            f"mcp: expected a path below the served folder; got {path!r}. Call runs, which lists the paths."
        )

    def _is_inside(self, place: Path) -> bool:
        return place.resolve().is_relative_to(self._root)
