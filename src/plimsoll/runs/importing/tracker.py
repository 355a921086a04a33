"""Trackers whose files can be read: which one wrote a path, and its reader."""

import os
from pathlib import Path
from typing import Literal

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line
from plimsoll.runs.importing.csv_file import read_csv
from plimsoll.runs.importing.scalar_table import ScalarTable
from plimsoll.runs.importing.tensorboard_events import event_files, read_tensorboard
from plimsoll.runs.importing.wandb_file import read_wandb, wandb_files
from plimsoll.runs.storage import manifest, script
from plimsoll.runs.storage.location import Folder, is_elsewhere

Kind = Literal["csv", "tensorboard", "wandb"]


def kind_of(path: str | os.PathLike[str]) -> Kind | None:
    """Return the tracker whose files are at a path; None for Plimsoll's and others."""
    if is_elsewhere(path):
        return None
    place = Path(path)
    if place.suffix.lower() in (".csv", ".tsv") and place.is_file():
        return "csv"
    if place.is_dir():
        names = [entry.name for entry in place.iterdir()]
        if script.names_in(Folder(place)) or any(manifest.rank_of(name) is not None for name in names):
            return None
    if wandb_files(place):
        return "wandb"
    return "tensorboard" if event_files(place) else None


def read(path: Path, kind: Kind, *, step: str | None = None, delimiter: str | None = None) -> ScalarTable:
    """Return the scalars at a path.

    Args:
        path: File or folder.
        kind: The tracker.
        step: Column or key of the steps, of CSV and W&B. Default: the usual one.
        delimiter: Character between cells, of CSV.

    Raises:
        MissingExtraError: The package of the tracker is missing.
    """
    try:
        if kind == "csv":
            return read_csv(path, step=step, delimiter=delimiter)
        return read_wandb(path, step=step) if kind == "wandb" else read_tensorboard(path)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{path}: expected the package {kind}, which reads it; got none. Install it: {install_line(kind)}"
        ) from error
