"""Functions of a higher package that show an object of a lower one, found by name.

A run shows itself in a notebook, a spectrum and an audit draw their figures, a guard writes a report before it stops
training, and a watch ends with the verdict. Their packages lie below the reports and cannot import them. So
`pyproject.toml` declares the functions as entry points.
"""

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from plimsoll.errors import StateError

GROUP = "plimsoll.display"


@functools.cache  # reading the metadata of all installed packages takes milliseconds
def function(name: str) -> Callable[..., Any]:
    """Return a function by its name in pyproject.toml's entry points, such as "run".

    Raises:
        StateError: Plimsoll is not installed, or the installation is older than the source.
    """
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise StateError(
        f"display: expected an installed Plimsoll with the entry point {name!r} in the group {GROUP}; got none. "
        "Install Plimsoll again with pip."
    )
