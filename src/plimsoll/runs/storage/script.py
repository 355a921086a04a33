"""The runs of one script: ``script.json`` in a folder lists the runs of the models that the script trains.

`plimsoll run` writes it where it finds a second model. It tells the folder of a script, which is one answer, from a
folder that holds runs of several trainings. A run's own folder may hold it, too, where the script's first model was
taken for the only one: the others lie in folders below it then.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from plimsoll.errors import RunError
from plimsoll.runs.storage import atomic_files
from plimsoll.runs.storage.location import Folder, StorageLocation

NAME = "script.json"
SCHEMA = 1
ITSELF = "."  # the run that the folder itself is


def names_in(place: StorageLocation) -> tuple[str, ...]:
    """The runs that the folder's ``script.json`` lists, by their folder's name; none where there is no such file."""
    if NAME not in place.names():
        return ()
    try:
        names: Any = json.loads(place.read(NAME))["runs"]
        sound = isinstance(names, list) and all(_is_name(name) for name in cast("list[object]", names))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"Run: expected a list of a script's runs in {place}: {NAME}; got {error}.") from error
    if not sound:
        raise RunError(f"Run: expected the names of folders in {place}: {NAME}; got {names!r}. Correct the file.")
    return tuple(cast("list[str]", names))


def has_several(run: Path) -> bool:
    """Whether the run in this folder is one of several of a script."""
    below, itself = names_in(Folder(run.parent)), names_in(Folder(run))
    return (run.name in below and len(below) > 1) or (ITSELF in itself and len(itself) > 1)


def _is_name(name: object) -> bool:
    """Whether it names a folder right below: a list that leads elsewhere is none that was written here."""
    return isinstance(name, str) and bool(name) and not {"/", "\\", os.sep} & set(name) and name != ".."


def write(folder: Path, names: Sequence[str]) -> None:
    """Lists the runs of a script in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"plimsoll": "script", "schema": SCHEMA, "runs": list(names)}
    with atomic_files.replacing(folder / NAME) as file:
        file.write((json.dumps(content) + "\n").encode())
