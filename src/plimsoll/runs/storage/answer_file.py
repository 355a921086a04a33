"""Files of an answer (receipt, verdict, certificate), by the file name's ending."""

import os
from collections.abc import Iterable
from pathlib import Path

from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs.storage.atomic_files import replacing


def check_place(operation: str, path: str | os.PathLike[str], endings: Iterable[str]) -> Path:
    """Return the path of a file to write, before the work that the answer takes.

    Args:
        operation: The function or command, for messages.
        path: The file.
        endings: The endings that name a form, in small letters.

    Raises:
        ArgumentError: The ending is another one, or the path is a folder or in one that does not exist.
    """
    place = Path(path)
    if place.suffix.lower() not in (known := [*endings]):
        raise ArgumentError(
            f"{operation}: expected a file that ends in {', '.join(known)}; got {os.fspath(place)!r}. Choose one of "
            "these."
        )
    if place.is_dir() or not place.parent.is_dir():
        raise ArgumentError(
            f"{operation}: expected a file in a folder that exists; got {os.fspath(place)!r}. Make its folder first."
        )
    return place


def write_text(operation: str, file: Path, text: str) -> None:
    """Write a text file, whole or not at all.

    Raises:
        ArgumentError: The path is a folder.
        RunError: It cannot be written.
    """
    if file.is_dir():
        raise ArgumentError(f"{operation}: expected the path of a file; got {file}, a folder. Name a file in it.")
    try:
        with replacing(file) as stream:
            stream.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(
            f"{operation}: expected a file that can be written; got {file} ({error}). Choose another."
        ) from error
