"""Where commands read and write: a run lies anywhere that `plimsoll.Run` reads, what is written on this machine only.

An argument that names a run stays text until it is known to be no URI: a path would make ``s3://`` of ``s3:/``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll.errors import ArgumentError

if TYPE_CHECKING:
    from plimsoll.runs import Run

RunPlace = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or a URI: s3://bucket/run.")]

# What brings a file, and what a folder, to a store.
_COPIES = {
    "s3": ("aws s3 cp", "aws s3 sync"),
    "gs": ("gcloud storage cp", "gcloud storage rsync -r"),
    "gcs": ("gcloud storage cp", "gcloud storage rsync -r"),
    "abfs": ("azcopy copy", "azcopy sync"),
    "abfss": ("azcopy copy", "azcopy sync"),
    "hdfs": ("hdfs dfs -put", "hdfs dfs -put"),
}


def opened(place: str) -> "Run":
    """The run at a path or URI, as every command opens it. Raises as `plimsoll.Run` does."""
    from plimsoll.runs import Run

    return Run(place)


def said(place: str) -> str:
    """What a command calls the run: the path, or the URI without what is secret in it."""
    from plimsoll.runs._uri import is_uri, without_secrets

    return without_secrets(place) if is_uri(place) else str(Path(place))


def file_here(operation: str, option: str, given: str | None, example: str) -> Path | None:
    """The path of a file to write; `ArgumentError` for a URI."""
    return _here(operation, f"{option} to name a file of this machine", given, example, 0)


def folder_here(operation: str, option: str, given: str | None, example: str) -> Path | None:
    """The path of a folder to write runs to; `ArgumentError` for a URI."""
    path = _here(operation, f"{option} to name a folder of this machine", given, example, 1)
    if path is not None and path.exists() and not path.is_dir():
        raise ArgumentError(
            f"{operation}: expected {option} to name a folder; got {path}, which is a file. Name a folder, new or old."
        )
    return path


def _here(operation: str, expected: str, given: str | None, example: str, kind: int) -> Path | None:
    if given is None or "://" not in given:  # asked first: before a script runs, `run` loads nothing that it might miss
        return None if given is None else Path(given)
    from plimsoll.runs._uri import is_uri, without_secrets

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
