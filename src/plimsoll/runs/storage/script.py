"""Runs of one script: ``script.json`` lists the runs of the models it trains."""

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
    """Return the runs in ``script.json`` by folder name; none without the file."""
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
    """Return whether a run is one of several runs of a script."""
    below, itself = names_in(Folder(run.parent)), names_in(Folder(run))
    return (run.name in below and len(below) > 1) or (ITSELF in itself and len(itself) > 1)


def _is_name(name: object) -> bool:
    """Return whether it names a folder directly below: no list may lead elsewhere."""
    return isinstance(name, str) and bool(name) and not {"/", "\\", os.sep} & set(name) and name != ".."


# `plimsoll run` writes the file when it finds a second model. It distinguishes the folder of one script from a folder
# with runs of several trainings. It may be in a run's own folder, if the first model was taken for the only one; the
# other models' folders are below it then.
def write(folder: Path, names: Sequence[str]) -> None:
    """Write the list of a script's runs into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"plimsoll": "script", "schema": SCHEMA, "runs": list(names)}
    with atomic_files.replacing(folder / NAME) as file:
        file.write((json.dumps(content) + "\n").encode())
