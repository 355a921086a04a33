"""Paths of commands: runs anywhere that `plimsoll.Run` reads, local output.

An argument that names a run stays text until it is known to be no URI: a path would make ``s3://`` of ``s3:/``.
"""

import contextlib
import glob
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll.cli import messages
from plimsoll.errors import ArgumentError, PlimsollError, RunError

if TYPE_CHECKING:
    from plimsoll.diagnosis import View
    from plimsoll.runs import Run
    from plimsoll.runs.reading.run_folder import NoRunError

# Commands that copy a file, and a folder, to a store.
_COPIES = {
    "s3": ("aws s3 cp", "aws s3 sync"),
    "gs": ("gcloud storage cp", "gcloud storage rsync -r"),
    "gcs": ("gcloud storage cp", "gcloud storage rsync -r"),
    "abfs": ("azcopy copy", "azcopy sync"),
    "abfss": ("azcopy copy", "azcopy sync"),
    "hdfs": ("hdfs dfs -put", "hdfs dfs -put"),
}


_opened: "list[Run]" = []  # by the command that runs in this process


def start_reading() -> "list[Run]":
    """Return a new list, to which each run that is opened from now on is added."""
    global _opened  # noqa: PLW0603  (one command at a time)
    _opened = []
    return _opened


def report_missing_records(runs: "list[Run]") -> bool:
    """Report runs with missing records on stderr; return whether there are any."""
    incomplete = [run for run in runs if run.missing]
    for run in incomplete:
        missing = run.missing
        more = f", and {len(missing) - 1} more such problems" if len(missing) > 1 else ""
        messages.error(f"records of {run.path} are missing, and the answer is from the rest: {missing[0]}{more}")
    return bool(incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that a command reads."""

    run: "Run"
    label: str  # its path or URI in messages, without secrets
    model: str = ""  # The model's name among those of one script. Empty for a run that is the only one.


def open_runs(path: str, several: str = "") -> list[OpenRun]:
    """Return the run at a path or URI, or the runs of one script, one for each model.

    `several` is the command, if it takes several runs: it is offered for all of a folder's. Raises a `RunError` in the
    words of the command line if there is no run.
    """
    from plimsoll.runs.reading.run_folder import NoRunError
    from plimsoll.runs.storage.location import ITSELF, Stored, names_of_runs, place_of

    location, label = place_of(path), label_of(path)
    try:
        names = names_of_runs(location)
        if not names:
            return [OpenRun(run=_read(path, None), label=label)]
        folders = [location.path if name == ITSELF else location.path / name for name in names]
        filesystem = location.filesystem if isinstance(location, Stored) else None
        runs = [_read(folder.as_posix() if filesystem else folder, filesystem) for folder in folders]
    except NoRunError as error:
        advice = _advice(error, label, several) if error.place == str(location) else error.advice
        raise RunError(f"No Plimsoll run in {error.place}. {advice}") from error
    models = [_model(run) if name == ITSELF else name for name, run in zip(names, runs, strict=True)]
    labels = [label if name == ITSELF else f"{label.rstrip('/')}/{name}" for name in names]
    return [OpenRun(run=r, label=text, model=m) for r, text, m in zip(runs, labels, models, strict=True)]


def _advice(error: "NoRunError", label: str, several: str) -> str:
    """Return the runs to name instead, written so that they can be pasted into a shell."""
    from plimsoll.checks import nearest
    from plimsoll.runs.reading.run_folder import holds_run, named

    if error.below:
        below = named([_pasted(f"{label.rstrip('/')}/{name}" if label != "." else name) for name in error.below])
        flat = not any("/" in name for name in error.below)
        every = "*" if label == "." else f"{glob.escape(label)}/*"
        more = f", or all: plimsoll {several} {shlex.quote(every)}" if several and error.here and flat else ""
        return f"Runs below it: {below}. Name one of them{more}."
    place = Path(label)
    if error.here and not place.exists():
        with contextlib.suppress(OSError):
            runs = [folder.name for folder in place.parent.iterdir() if holds_run(folder)]
            if near := [_pasted(str(place.with_name(name))) for name in nearest(place.name, runs)]:
                return f"Did you mean {' or '.join(near)}?"
    return error.advice


def _pasted(path: str) -> str:
    # A backslash is a separator on Windows, where quotes of a POSIX shell mean nothing.
    return path if os.name == "nt" else shlex.quote(path)


def later_training(path: str, runs: "Sequence[Run]") -> Path | None:
    """Return the numbered folder of the last training that was meant for this path, after these runs."""
    from plimsoll.runs import Run
    from plimsoll.runs.storage import manifest
    from plimsoll.runs.storage.location import is_uri

    if is_uri(path):
        return None
    folder, latest, last = Path(path), None, max((_last_start(run.manifest) for run in runs), default=math.inf)
    name = folder.absolute().name
    # A number does not tell which is later: in a notebook it is the earlier training that gets one.
    for candidate in folder.absolute().parent.glob(f"{glob.escape(name)}-*"):
        if not candidate.name.removeprefix(f"{name}-").isdecimal():
            continue
        with contextlib.suppress(PlimsollError, OSError, ValueError):  # whatever else lies there
            for run in Run.find(candidate):
                if (start := _last_start(manifest.read(run / manifest.file_name(0)))) > last:
                    latest, last = folder.parent / candidate.name, start
    return latest


def _last_start(content: "Mapping[str, Any]") -> float:
    from plimsoll.runs.storage import manifest

    return max((session.started for session in manifest.sessions_of(content)), default=0.0)


def expand(paths: Sequence[str], *, files: bool = False) -> list[str]:
    """Return the paths with globs replaced by their folders, ordered by name.

    Shells expand globs too, but not in quotes and not on Windows. A path that exists is never taken for a glob. With
    `files` globs match files too. One that matches nothing is an error.
    """
    expanded: list[str] = []
    for path in paths:
        if not glob.has_magic(path) or "://" in path or Path(path).exists():
            expanded.append(path)
            continue
        matches = glob.glob(path)  # noqa: PTH207  (keeps `./`)
        folders = sorted(match for match in matches if files or Path(match).is_dir())
        if not folders:
            raise RunError(f"No folder matches {path!r}. plimsoll ls lists the runs below a folder.")
        expanded += folders
    return expanded


def _read(path: str | Path, filesystem: Any) -> "Run":
    """Return the run, with foreign files reported as one line on stderr."""
    from plimsoll.runs import Run

    run = Run(path, filesystem=filesystem, warn=False)
    _opened.append(run)
    foreign = [problem for problem in run.problems if problem not in run.missing]
    if foreign:
        more = f", and {len(foreign) - 1} more such problems" if len(foreign) > 1 else ""
        messages.error(f"{foreign[0]}{more}")
    return run


def view_of(opened: OpenRun, until: int | None) -> "View":
    """Return the view of a run up to a step, by which something must be recorded."""
    from plimsoll.diagnosis import View

    view = View(opened.run, until)
    refuse_empty(opened, view)
    return view


def refuse_empty(opened: OpenRun, view: "View") -> None:
    """Raise `RunError` if a view has no step."""
    from plimsoll.diagnosis import View

    if view.last_step >= 0:
        return
    first, last = min(opened.run.steps, default=-1), View(opened.run).last_step
    if last < 0:
        if opened.run.closed:
            what = (
                "Its watch was closed. Look at the messages of the script: a full disk, or no training step. Steps "
                "through a frozen model are seen if the watch is given the optimizer."
            )
        elif opened.run.was_abandoned:
            what = "Its process is gone, killed or ended by os._exit, and what it had measured by then is lost."
        else:
            what = (
                "Records appear some seconds after the first training step. If they do not, look at the script's "
                "messages."
            )
        raise RunError(f"Nothing was recorded in {opened.label}: it holds a run without a step. {what}")
    begins = "" if first < 0 else f"{first:,} to "
    raise RunError(f"Nothing was recorded in {opened.label} up to step {view.until}. It has steps {begins}{last:,}.")


def _model(run: "Run") -> str:
    """Return the name of the model whose run is the script's folder itself."""
    return str(run.manifest.get("model") or run.path.name).rpartition(".")[2]


def label_of(path: str) -> str:
    """Return a command's name for a run: the path, or the URI without secrets."""
    from plimsoll.runs.storage.location import is_uri, without_secrets

    return without_secrets(path) if is_uri(path) else str(Path(path))


def local_file(operation: str, option: str, path: str | None, example: str) -> Path | None:
    """Return the path of a file to write, or raise an error if it is a URI."""
    return _local(operation, f"{option} to name a file of this machine", path, example, 0)


def write_text(operation: str, file: Path, text: str) -> None:
    """Write a text file, whole or not at all, and print its path."""
    from plimsoll.runs.storage import atomic_files

    atomic_files.write_text(operation, file, text)
    messages.write_line(str(file))


def local_folder(operation: str, path: str | None, example: str) -> Path | None:
    """Return the path of a folder to write runs to, which is no URI and no file."""
    folder = _local(operation, "--output to name a folder of this machine", path, example, 1)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise ArgumentError(
            f"{operation}: expected --output to name a folder; got {folder}, which is a file. Name a folder."
        )
    return folder


def _local(operation: str, expected: str, path: str | None, example: str, kind: int) -> Path | None:
    # Checked first: before a script runs, `plimsoll run` imports nothing that the script might miss.
    if path is None or "://" not in path:
        return None if path is None else Path(path)
    from plimsoll.runs.storage.location import is_uri, without_secrets

    if not is_uri(path):
        return Path(path)
    shown = without_secrets(path)
    copy = _COPIES.get(path.partition("://")[0].lower())
    how = f"copy it: {copy[kind]} {example} {shown}" if copy else "copy it there"
    again = ", again and again while it grows" if kind else ""
    raise ArgumentError(
        f"{operation}: expected {expected}; got the URI {shown}. Write to {example} and {how}{again}"
        f"{' (docs/how-to/scale.md)' if kind else ''}."
    )


def open_single(path: str, operation: str) -> OpenRun:
    """Return the only run at a path or URI, which is not of several models."""
    runs = open_runs(path)
    if len(runs) > 1:
        raise ArgumentError(
            f"{operation}: expected the run of one model; got {label_of(path)}, whose script trains several. "
            f"Name one: {', '.join(opened.label for opened in runs)}."
        )
    return runs[0]


def by_model(answers: Sequence[tuple[OpenRun, Mapping[str, object]]]) -> dict[str, object]:
    """Return the answer for a run as data; of a script of several models, one for each."""
    if len(answers) == 1:
        return dict(answers[0][1])
    return {"runs": [{"model": opened.model, **answer} for opened, answer in answers]}


def file_for_model(path: Path, opened: OpenRun, runs: int) -> Path:
    """Return a run's file; several models have their own, as ``plan-G.toml``."""
    return path if runs == 1 else path.with_name(f"{path.stem}-{opened.model}{path.suffix}")
