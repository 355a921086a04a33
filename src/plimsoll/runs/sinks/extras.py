"""Optional packages: whether one is there, without importing it (trackers take seconds), and its modules, untyped."""

import importlib
import importlib.util
from typing import Any

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line


def require(package: str, sink: str) -> None:
    """Raises `MissingExtraError` unless `package` can be imported; the extra bears the package's name."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError as error:  # something without a specification stands in its place
        raise _missing(package, sink) from error
    # A folder of that name (./wandb, ./mlflow) in the working directory is found too, as a namespace without an origin.
    if spec is None or spec.origin is None:
        raise _missing(package, sink)


def load(module: str) -> Any:
    """The module, without types: the type checker runs without the extras too, and most of them have none."""
    return importlib.import_module(module)


def _missing(package: str, sink: str) -> MissingExtraError:
    return MissingExtraError(f"{sink}: expected the package {package}; got none. Install it: {install_line(package)}")
