"""Base class of the sinks that send a run to a tracker: what each declares, and its optional package."""

import importlib
import importlib.util
from typing import Any, ClassVar

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line


class Tracker:
    """Declarations of a tracker's sink. `plimsoll.runs.sinks.resolve.TRACKERS` lists the classes.

    Attributes:
        name: The name that `watch(sinks=[...])` takes.
        extra: The extra of pyproject.toml that installs the tracker.
        module: The tracker's top module. It is imported when the sink is opened, on the sink's thread.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    module: ClassVar[str]

    @classmethod
    def require(cls) -> None:
        """Check that the tracker is installed, without importing it: trackers take seconds.

        Raises:
            MissingExtraError: It is not.
        """
        try:
            spec = importlib.util.find_spec(cls.module)
        except ValueError as error:  # an entry of sys.modules without a specification
            raise cls._missing() from error
        # A folder ./wandb or ./mlflow in the working directory is a namespace package, which has no origin.
        if spec is None or spec.origin is None:
            raise cls._missing()

    @classmethod
    def _missing(cls) -> MissingExtraError:
        return MissingExtraError(
            f"{cls.__name__}: expected the package {cls.module}; got none. Install it: {install_line(cls.extra)}"
        )


def load(module: str) -> Any:
    """Return a tracker's module, untyped: the type checker runs without trackers, and most have no types."""
    return importlib.import_module(module)
