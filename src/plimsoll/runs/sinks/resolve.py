"""Takes what a user gives for a sink: one of ours by name, an object with `put`, or a plain function of a record."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from plimsoll.errors import ArgumentError
from plimsoll.runs.records import Sink, StepRecord
from plimsoll.runs.sinks.mlflow import MLflow
from plimsoll.runs.sinks.tensorboard.sink import TensorBoard
from plimsoll.runs.sinks.wandb import WandB

_BY_NAME: Mapping[str, Callable[[], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
_METHODS = ("open", "put", "flush", "close")
_CHOICES = (
    "a function that takes a StepRecord, an object with a method put(record), or one of "
    "'tensorboard', 'wandb', 'mlflow'"
)


class _Partial:
    """A sink made of the methods that there are."""

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
    """The sink that `given` stands for.

    - "tensorboard", "wandb", "mlflow": that sink with its defaults;
    - an object with `put`: itself; `open`, `flush` and `close` may be missing;
    - any other callable: called with each `StepRecord`, on the sink's own thread.
    """
    if isinstance(given, str):
        return _by_name(given)
    if isinstance(given, type):
        raise ArgumentError(f"as_sink: expected {_CHOICES}; got the class {given.__name__}. Give {given.__name__}().")
    methods = {name: getattr(given, name) for name in _METHODS if callable(getattr(given, name, None))}
    if len(methods) == len(_METHODS):
        return cast("Sink", given)
    name = str(getattr(given, "__name__", type(given).__name__))
    if "put" not in methods:
        methods = {"put": _function(given)}
    return _Partial(name, methods)


def _by_name(name: str) -> Sink:
    if name not in _BY_NAME:
        raise ArgumentError(f"as_sink: expected {_CHOICES}; got {name!r}. Choose one of these.")
    return _BY_NAME[name]()


def _function(given: object) -> Callable[..., object]:
    if not callable(given):
        raise ArgumentError(f"as_sink: expected {_CHOICES}; got {given!r} ({type(given).__name__}). Give one of these.")
    if inspect.iscoroutinefunction(given):
        raise ArgumentError(f"as_sink: expected {_CHOICES}; got the coroutine function {given!r}. Give a plain one.")
    if not _takes_one(given):
        raise ArgumentError(
            f"as_sink: expected {_CHOICES}; got {given!r}, which cannot be called with one argument. Give one that can."
        )
    return given


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-ins that do not tell
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True
