"""Functions of a higher package that show an object of a lower one, found by name.

A run shows itself in a notebook, an audit draws its figure, and a guard writes a report before it stops training. Their
packages lie below the reports and cannot import them. So `pyproject.toml` declares the functions as entry points.
"""

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from plimsoll.errors import StateError

GROUP = "plimsoll.display"


@functools.cache  # reading the metadata of all installed packages takes milliseconds
def function(name: str) -> Callable[..., Any]:
    """Return the function that shows objects of one kind: "run", "audit" or "report".

    Raises:
        StateError: Plimsoll is not installed, or the installation is older than the source.
    """
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise StateError(
        f"display: expected an installed Plimsoll with the entry point {name!r} in the group {GROUP}; got none. "
        "Install Plimsoll again with pip."
    )
