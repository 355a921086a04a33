"""Paths of commands: runs may be anywhere that `plimsoll.Run` reads, output is local only.

An argument that names a run stays text until it is known to be no URI: a path would make ``s3://`` of ``s3:/``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plimsoll.cli.terminal import complain
from plimsoll.errors import ArgumentError, RunError

if TYPE_CHECKING:
    from plimsoll.diagnosis import View
    from plimsoll.runs import Run

RunPlace = Annotated[
    str, typer.Argument(metavar="RUN", help="The folder of a run or script, or a URI: s3://bucket/run.")
]

# What brings a file, and what a folder, to a store.
_COPIES = {
    "s3": ("aws s3 cp", "aws s3 sync"),
    "gs": ("gcloud storage cp", "gcloud storage rsync -r"),
    "gcs": ("gcloud storage cp", "gcloud storage rsync -r"),
    "abfs": ("azcopy copy", "azcopy sync"),
    "abfss": ("azcopy copy", "azcopy sync"),
    "hdfs": ("hdfs dfs -put", "hdfs dfs -put"),
}


_reading: "list[Run]" = []  # the runs that the present command has opened


def begin_reading() -> "list[Run]":
    """Forget the runs of an earlier command of this process; those that are opened from now on come into the list."""
    global _reading  # noqa: PLW0603  (one command at a time)
    _reading = []
    return _reading


def say_what_is_missing(runs: "list[Run]") -> bool:
    """Report on stderr which runs records are missing of; whether there are any. Damaged parts are known when read."""
    incomplete = [run for run in runs if run.missing]
    for run in incomplete:
        missing = run.missing
        more = f", and {len(missing) - 1} more such problems" if len(missing) > 1 else ""
        complain(f"records are missing of {run.path}, and the answer is of what is left: {missing[0]}{more}")
    return bool(incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A run that a command reads; `model` names it among those of one script, and is empty for the only one."""

    run: "Run"
    called: str  # as messages call it
    model: str = ""


def opened(place: str) -> list[Opened]:
    """Return the run at a path or URI, or the runs of one script, one for each model.

    Raises `RunError` where there is none, as `plimsoll.Run` does, in words of the command line.
    """
    from plimsoll.runs.reading.run_folder import NoRunError
    from plimsoll.runs.storage.location import Stored, place_of
    from plimsoll.runs.storage.script import ITSELF, names_in

    where = place_of(place)
    try:
        names = names_in(where)
        if not names:
            return [Opened(run=_read(place, None), called=said(place))]
        inside = [where.path if name == ITSELF else where.path / name for name in names]
        filesystem = where.filesystem if isinstance(where, Stored) else None
        runs = [_read(path.as_posix() if filesystem else path, filesystem) for path in inside]
    except NoRunError as error:
        raise RunError(f"No Plimsoll run in {error.place}. {error.advice}") from error
    models = [_model(run) if name == ITSELF else name for name, run in zip(names, runs, strict=True)]
    shown = [said(place) if name == ITSELF else f"{said(place).rstrip('/')}/{name}" for name in names]
    return [Opened(run=r, called=c, model=m) for r, c, m in zip(runs, shown, models, strict=True)]


def _read(path: str | Path, filesystem: Any) -> "Run":
    """Return the run; files that do not belong to it are one line on stderr."""
    from plimsoll.runs import Run

    run = Run(path, filesystem=filesystem, warn=False)
    _reading.append(run)
    foreign = [problem for problem in run.problems if problem not in run.missing]
    if foreign:
        more = f", and {len(foreign) - 1} more such problems" if len(foreign) > 1 else ""
        complain(f"{foreign[0]}{more}")
    return run


def view_at(one: Opened, until: int | None) -> "View":
    """Return the view of a run up to a step. Raise `RunError` if nothing was recorded up to there."""
    from plimsoll.diagnosis import View

    view = View(one.run, until)
    refuse_empty(one, view)
    return view


def refuse_empty(one: Opened, view: "View") -> None:
    """Raise `RunError` where a view has no step."""
    from plimsoll.diagnosis import View

    if view.last_step >= 0:
        return
    first, last = min(one.run.steps, default=-1), View(one.run).last_step
    if last < 0:
        raise RunError(
            f"Nothing was recorded in {one.called}: it holds a run without a step. Records appear some seconds after "
            "the first training step; look at the script's messages if they do not."
        )
    begins = "" if first < 0 else f"{first:,} to "
    raise RunError(f"Nothing was recorded in {one.called} up to step {view.until}. It has steps {begins}{last:,}.")


def _model(run: "Run") -> str:
    """Return the name of the model whose run is the script's folder itself."""
    return str(run.manifest.get("model") or run.path.name).rpartition(".")[2]


def said(place: str) -> str:
    """What a command calls the run: the path, or the URI without what is secret in it."""
    from plimsoll.runs.storage.location import is_uri, without_secrets

    return without_secrets(place) if is_uri(place) else str(Path(place))


def file_here(operation: str, option: str, given: str | None, example: str) -> Path | None:
    """Return the path of a file to write; `ArgumentError` for a URI."""
    return _here(operation, f"{option} to name a file of this machine", given, example, 0)


def folder_here(operation: str, option: str, given: str | None, example: str) -> Path | None:
    """Return the path of a folder to write runs to; `ArgumentError` for a URI."""
    path = _here(operation, f"{option} to name a folder of this machine", given, example, 1)
    if path is not None and path.exists() and not path.is_dir():
        raise ArgumentError(
            f"{operation}: expected {option} to name a folder; got {path}, which is a file. Name a folder, new or old."
        )
    return path


def _here(operation: str, expected: str, given: str | None, example: str, kind: int) -> Path | None:
    if given is None or "://" not in given:  # asked first: before a script runs, `run` loads nothing that it might miss
        return None if given is None else Path(given)
    from plimsoll.runs.storage.location import is_uri, without_secrets

    if not is_uri(given):
        return Path(given)
    shown = without_secrets(given)
    copy = _COPIES.get(given.partition("://")[0].lower())
    how = f"copy it: {copy[kind]} {example} {shown}" if copy else "copy it there"
    again = ", again and again while it grows" if kind else ""
    raise ArgumentError(
        f"{operation}: expected {expected}; got the URI {shown}. Write to {example} and {how}{again}"
        f"{' (docs/how-to/scale.md)' if kind else ''}."
    )


def only(place: str, operation: str) -> Opened:
    """Return the one run at a place; `ArgumentError` for a script's several models."""
    found = opened(place)
    if len(found) > 1:
        raise ArgumentError(
            f"{operation}: expected the run of one model; got {said(place)}, whose script trains several. "
            f"Name one: {', '.join(one.called for one in found)}."
        )
    return found[0]


def of_model(path: Path, one: Opened, runs: int) -> Path:
    """Return the file for a run: of several models each has its own, plan-G.toml for plan.toml."""
    return path if runs == 1 else path.with_name(f"{path.stem}-{one.model}{path.suffix}")
