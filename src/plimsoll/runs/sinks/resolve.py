"""Sinks from a user's argument: a name, an object with `put`, or a function.

Names are those of the classes in `TRACKERS`, and of entry points in the group `plimsoll.sinks`, by which another
package offers a sink. An entry point is loaded only when its name is asked for.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.runs.records import Sink, StepRecord
from plimsoll.runs.sinks.clients import MLflow, WandB
from plimsoll.runs.sinks.tensorboard import TensorBoard
from plimsoll.text import clause

GROUP = "plimsoll.sinks"
TRACKERS: Mapping[str, Callable[[], Sink]] = {sink.name: sink for sink in (TensorBoard, WandB, MLflow)}
_METHODS = ("open", "put", "flush", "close")


class _Partial:
    """A sink made of the methods that an object has."""

    def __init__(self, name: str, methods: Mapping[str, Callable[..., object]]) -> None:
        self.sink_name = name
        self._methods = methods

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        self._call("open", run_path, settings)

    def put(self, record: StepRecord) -> None:
        self._call("put", record)

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: object) -> None:
        if method in self._methods:
            self._methods[method](*arguments)


def as_sink(given: object) -> Sink:
    """Return the sink that `given` stands for.

    Args:
        given: The name of a sink, for that sink with its defaults. Or an object with `put`; `open`, `flush` and
            `close` may be missing. Or any other callable, which is called with each `StepRecord` on the sink's thread.

    Raises:
        ArgumentError: `given` is none of these, or the package that offers a sink of that name cannot be loaded.
        MissingExtraError: The tracker of that name is not installed.
    """
    if isinstance(given, str):
        return _by_name(given)
    if isinstance(given, type):
        raise ArgumentError(f"{_expected()}; got the class {given.__name__}. Give {given.__name__}().")
    methods = {name: getattr(given, name) for name in _METHODS if callable(getattr(given, name, None))}
    if len(methods) == len(_METHODS):
        return cast("Sink", given)
    name = str(getattr(given, "__name__", type(given).__name__))
    if "put" not in methods:
        methods = {"put": _function(given)}
    return _Partial(name, methods)


def _by_name(name: str) -> Sink:
    if name in TRACKERS:
        return TRACKERS[name]()
    offered = tuple(entry_points(group=GROUP, name=name))
    if not offered:
        raise ArgumentError(f"{_expected()}; got {name!r}. Choose one of these.")
    packages = sorted({_package(entry) for entry in offered})
    if len(packages) > 1:
        raise ArgumentError(
            f"as_sink: expected one package that offers the sink {name!r}; got {', '.join(packages)}. "
            "Uninstall all but one."
        )
    try:
        # The entry point is a class or a function without arguments. What it returns may lack methods, as any object.
        return as_sink(offered[0].load()())
    except PlimsollError:  # a missing package, for example: the message says what to do
        raise
    except Exception as error:  # whatever the code of another package raises
        raise ArgumentError(
            f"as_sink: expected the sink {name!r} of the package {packages[0]} to load from {offered[0].value!r}; got "
            f"{type(error).__name__}: {clause(error)}. Update that package, or uninstall it."
        ) from error


def _package(entry: EntryPoint) -> str:
    # A folder of metadata that lacks its METADATA file has no name.
    return str(getattr(entry.dist, "name", None) or "of unknown name")


def _expected() -> str:
    names = dict.fromkeys((*TRACKERS, *sorted(entry_points(group=GROUP).names)))
    return (
        "as_sink: expected a function that takes a StepRecord, an object with a method put(record), or one of "
        f"{', '.join(map(repr, names))}"
    )


def _function(given: object) -> Callable[..., object]:
    if not callable(given):
        raise ArgumentError(f"{_expected()}; got {given!r} ({type(given).__name__}). Give one of these.")
    if inspect.iscoroutinefunction(given):
        raise ArgumentError(f"{_expected()}; got the coroutine function {given!r}. Give a plain one.")
    if not _accepts_one_argument(given):
        raise ArgumentError(
            f"{_expected()}; got {given!r}, which cannot be called with one argument. Give one that can."
        )
    return given


def _accepts_one_argument(function: Callable[..., object]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have no signature
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True
