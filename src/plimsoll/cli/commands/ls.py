"""``plimsoll ls``: the runs below a folder, one row each."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plimsoll.cli import messages
from plimsoll.cli.options import Json, Quiet, RunsFolder
from plimsoll.errors import ArgumentError, PlimsollError, RunError
from plimsoll.results import as_data
from plimsoll.text import number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from plimsoll.diagnosis import View
    from plimsoll.runs import Run

Order = Literal["name", "state", "severity", "steps", "loss", "started", "size"]
_LIVE_SECONDS = 300.0  # an open run to which nothing was written for so long is not called live
_SEVERITIES = ("alarm", "warning", "healthy", "empty", "")  # the worst first
_COLOURS = {"alarm": "bold red", "warning": "yellow", "healthy": "green"}
_ROOM_FOR_VERDICT = 130  # columns
_HEADS: tuple[str, ...] = ("run", "state", "severity", "last step", "loss", "precision", "started (UTC)", "size")
_DROPPED = ("size", "started (UTC)", "precision", "loss", "last step", "state")  # on narrow terminals, the first first


def ls(
    folder: RunsFolder = "runs",
    sort: Annotated[
        Order,
        typer.Option("--sort", metavar="COLUMN", help="name, state, severity, steps, loss, started or size."),
    ] = "started",
    fast: Annotated[
        bool, typer.Option("--fast", help="Do not judge the runs: no severity and no verdict. For thousands of them.")
    ] = False,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """List the runs below a folder: state, severity, last step.

    The newest run comes first, or with --sort the worst or largest. A pipe and a terminal of 130 columns or more also
    get the verdicts, a narrow one fewer columns. Exit code 0: listed. 2: there is no run.
    """
    if fast and sort == "severity":
        raise ArgumentError(
            "ls: expected another column than severity with --fast, which judges no run; got --sort severity. Leave "
            "one of the two out."
        )
    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"No such folder: {folder}. Name the folder that runs are recorded below.")
    rows = rows_below(root, sort, judge=not fast)
    if not rows:
        raise RunError(f"No Plimsoll run in or below {folder}. plimsoll run SCRIPT records one.")
    if as_json:
        messages.write_json([row.to_dict() for row in rows])
    else:
        _print(rows, judged=not fast)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of the list."""

    name: str  # its path below the listed folder
    path: str
    state: str  # "live", "closed", "open" (silent for minutes), "damaged", or how it ended early
    severity: str = ""  # The highest severity of its findings. Empty if it was not judged.
    verdict: str = ""  # it in one sentence, or the problem of a damaged run
    last_step: int = -1  # The last recorded step. -1: none.
    loss: float | None = None
    precision: str = ""  # the level it was trained at, else the formats of its weights and activations
    started: float | None = None  # start of the recording in Unix seconds
    size_bytes: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON-able data."""
        started = None if self.started is None else datetime.fromtimestamp(self.started, UTC).isoformat()
        return {
            "name": self.name,
            "path": self.path,
            "state": self.state,
            "severity": self.severity or None,
            "verdict": self.verdict or None,
            "last_step": self.last_step,
            "loss": as_data(self.loss),
            "precision": self.precision or None,
            "started": started,
            "size_bytes": self.size_bytes,
        }


_ORDERS: Mapping[Order, Callable[[RunRow], Any]] = {
    "name": lambda row: row.name,
    "state": lambda row: (row.state, row.name),
    "severity": lambda row: (_SEVERITIES.index(row.severity), row.name),
    "steps": lambda row: (-row.last_step, row.name),
    # A loss that is missing or no number comes last.
    "loss": lambda row: (math.inf if row.loss is None or math.isnan(row.loss) else row.loss, row.name),
    "started": lambda row: (-(row.started or 0.0), row.name),
    "size": lambda row: (-row.size_bytes, row.name),
}


def rows_below(root: Path, sort: Order, *, judge: bool = True) -> list[RunRow]:
    """Return the rows of the runs in a folder and below it, in an order."""
    from plimsoll.runs import Run

    return sorted((_row(path, root, judge=judge) for path in Run.find(root)), key=_ORDERS[sort])


def _row(path: Path, root: Path, *, judge: bool) -> RunRow:
    """Return the row of a run. A defect of the run costs only its own row."""
    from plimsoll.diagnosis import View
    from plimsoll.report.verdicts.run_summary import started_at, summary
    from plimsoll.runs import Run

    name = path.relative_to(root).as_posix() if path != root else path.name or str(path)
    size_bytes, modified = _size_and_time(path)
    try:
        run = Run(path, warn=False)
        view = View(run)
        losses = view.scalar("loss")[1]
        facts = summary(view) if judge else None
    except (PlimsollError, ValueError, LookupError, TypeError) as error:
        problem = " ".join(str(error).split())
        return RunRow(name=name, path=str(path), state="damaged", verdict=problem, size_bytes=size_bytes)
    return RunRow(
        name=name,
        path=str(path),
        state=_state(view, modified),
        severity="" if facts is None else facts.state,
        verdict="" if facts is None else facts.verdict,
        last_step=view.last_step,
        loss=float(losses[-1]) if len(losses) else None,
        precision=_precision(run),
        started=started_at(run),
        size_bytes=size_bytes,
    )


def _state(view: "View", modified: float) -> str:
    if view.ending is not None:
        return view.ending.how
    if view.run.closed:
        return "closed"
    return "live" if time.time() - modified < _LIVE_SECONDS else "open"


def _precision(run: "Run") -> str:
    from plimsoll.report.verdicts.run_summary import formats_of

    level = run.manifest.get("precision")
    if isinstance(level, str):
        return level
    # Under autocast most activations may be FP32 (norms, residuals): the narrowest is what products run in.
    activations = sorted(formats_of(run, "activations"), key=_bits)
    return "/".join(dict.fromkeys([*formats_of(run, "weights")[:1], *activations[:1]]))


def _bits(fmt: str) -> int:
    from plimsoll.errors import FormatError
    from plimsoll.formats import get_element

    try:
        return get_element(fmt, "ls").bits
    except FormatError:  # of a run that another version wrote
        return 64


def _size_and_time(path: Path) -> tuple[int, float]:
    """Return the size of a run's files and the time of the last change."""
    size_bytes, modified = 0, 0.0
    for place, below, files in os.walk(path):
        below[:] = [name for name in below if place != str(path) or name in ("spectra", "scalars", "events")]
        for name in files:
            try:
                found = os.stat(os.path.join(place, name))  # noqa: PTH116, PTH118  (thousands of files)
            except OSError:  # a writer has replaced it
                continue
            size_bytes, modified = size_bytes + found.st_size, max(modified, found.st_mtime)
    return size_bytes, modified


def _print(rows: Sequence[RunRow], *, judged: bool) -> None:
    from rich.measure import Measurement

    from plimsoll.cli.terminal import console

    target, heads = console(), [head for head in _HEADS if judged or head != "severity"]
    unlimited = target.options.update(width=sys.maxsize)
    for head in _DROPPED:
        if Measurement.get(target, unlimited, _table(rows, heads, target)).maximum <= target.width:
            break
        heads.remove(head)
    if target.width >= _ROOM_FOR_VERDICT and any(row.verdict for row in rows):
        heads.append("verdict")
    target.print(_table(rows, heads, target))


def _table(rows: Sequence[RunRow], heads: Sequence[str], target: "Console") -> "Table":
    """Return the columns of these headings, with a line below the headings for people."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    ruled = target.is_terminal
    table = Table(
        box=box.SIMPLE_HEAD if ruled else None, show_edge=False, pad_edge=False, padding=(0, 1 if ruled else 2, 0, 0)
    )
    for head in heads:
        right = head in ("last step", "loss", "size")
        # A name or verdict that has no room goes on in the next line.
        table.add_column(
            head, justify="right" if right else "left", no_wrap=head not in ("run", "verdict"), overflow="fold"
        )
    for row in rows:
        started = "" if row.started is None else f"{datetime.fromtimestamp(row.started, UTC):%Y-%m-%d %H:%M}"
        cells = {
            "run": row.name,
            "state": row.state,
            "severity": Text(row.severity, style=_COLOURS.get(row.severity, "dim")),
            "last step": f"{row.last_step:,}" if row.last_step >= 0 else "",
            "loss": "" if row.loss is None else number(row.loss),
            "precision": row.precision,
            "started (UTC)": started,
            "size": _size(row.size_bytes),
            "verdict": row.verdict,
        }
        table.add_row(*(cells[head] for head in heads))
    return table


def _size(size_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes / 1e3:.0f} kB"
