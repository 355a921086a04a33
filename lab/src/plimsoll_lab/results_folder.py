"""Folder of an experiment's results; only the lab's own files there are replaced."""

import os
import shutil
from pathlib import Path

from plimsoll.errors import ArgumentError, RunError

MARK = "plimsoll-lab.txt"
_MARKED = "Made by plimsoll lab {name}, which replaces runs/, report*.html and result.json here when it runs again.\n"
RUNS, RESULT = "runs", "result.json"


def clear(folder: Path, name: str) -> None:
    """Make the folder ready: new, empty, or the same experiment's, without results.

    Raises `ArgumentError` for any other folder, with all that is in it left as it is.
    """
    mark, text = folder / MARK, _MARKED.format(name=name)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise _refused(folder, "something that is no folder")
    try:
        if folder.exists() and any(folder.iterdir()) and not _made_here(mark, text):
            raise _refused(folder, "one with other things in it")
        folder.mkdir(parents=True, exist_ok=True)
        for old in (folder / RUNS, folder / RESULT, *folder.glob("report*.html")):
            _remove(old)
        mark.write_text(text)
        (folder / RUNS).mkdir()
    except OSError as error:
        if isinstance(error, RunError):
            raise
        raise _unwritable(folder, error) from error


def made_ready(folder: Path) -> None:
    """Makes the folder that those of several experiments go to, if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(folder, "read-only")


def _made_here(mark: Path, text: str) -> bool:
    return mark.is_file() and not mark.is_symlink() and mark.read_text(errors="replace") == text


def _remove(old: Path) -> None:
    """A link is removed, never what it leads to."""
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def _unwritable(folder: Path, why: object) -> RunError:
    return RunError(
        f"lab: expected a folder that can be written; got {folder} ({why}). Give another with --output DIR."
    )


def _refused(folder: Path, what: str) -> ArgumentError:
    return ArgumentError(
        f"lab: expected a new or empty folder, or one that this experiment has made; got {folder}, {what}. "
        "Nothing was changed. Give another with --output DIR."
    )
