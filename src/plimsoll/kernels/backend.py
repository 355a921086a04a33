"""Choice of the backend: by device, or forced by `use` or PLIMSOLL_BACKEND.

The choice is visible (`plimsoll doctor` prints `report`) and never silent: where the fast backend of a device is
missing, the reference one takes over and a warning says so once, with the reason.
"""

import contextlib
import contextvars
import functools
import importlib
import os
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from torch import Tensor

from plimsoll.errors import ArgumentError, BackendError

Name = Literal["torch", "numba", "triton"]
NAMES: tuple[Name, ...] = ("torch", "numba", "triton")
_FOR_DEVICE: dict[str, Name] = {"cpu": "numba", "cuda": "triton"}

_forced: contextvars.ContextVar[Name | None] = contextvars.ContextVar("plimsoll_backend", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """A backend's availability here, and the reason if it is not available."""

    name: Name
    available: bool
    detail: str


@contextlib.contextmanager
def use(name: Name) -> Generator[None]:
    """Force one backend inside the block, for this thread or task, or raise `BackendError`."""
    if name not in NAMES:
        raise ArgumentError(f"kernels.use: expected one of {', '.join(NAMES)}; got {name!r}.")
    state = status(name)
    if not state.available:
        raise BackendError(f"kernels.use: expected a backend that runs here; got {name!r}. {state.detail}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(x: Tensor) -> ModuleType:
    """The backend module for a tensor on this device."""
    name = forced()
    if name is None:
        return _automatic("cpu" if x.is_cpu else x.device.type)
    if name == "numba" and not x.is_cpu:
        raise BackendError(
            f"kernels: expected tensors in the CPU's memory for the forced backend 'numba'; got one on {x.device}. "
            "Force 'torch', or none."
        )
    return _load(name)


def choose_for_host() -> ModuleType:
    """The backend module for numpy arrays: the CPU's, unless the reference is forced."""
    return _load("torch") if forced() == "torch" else _automatic("cpu")


def forced() -> Name | None:
    """The backend that `use` or PLIMSOLL_BACKEND asks for, or None."""
    name = _forced.get()
    return name if name is not None else _from_environment(os.environ.get("PLIMSOLL_BACKEND"))


def report() -> list[BackendStatus]:
    """The state of every backend."""
    return [status(name) for name in NAMES]


@functools.cache
def status(name: Name) -> BackendStatus:
    """Return the status of the backend of that name; tried once a process."""
    try:
        detail = _load(name).describe()
    except Exception as error:  # noqa: BLE001  (a broken install may fail in any way, and must not stop training)
        own = isinstance(error, BackendError)  # a sentence for people
        return BackendStatus(name=name, available=False, detail=f"{'' if own else f'{type(error).__name__}: '}{error}")
    return BackendStatus(name=name, available=True, detail=detail)


@functools.cache
def _automatic(device: str) -> ModuleType:
    name = _FOR_DEVICE.get(device, "torch")
    if not status(name).available:
        _say_missing(name)
        name = "torch"
    return _load(name)


@functools.cache
def _load(name: Name) -> ModuleType:
    return importlib.import_module(f"plimsoll.kernels.{name}_backend")


@functools.cache
def _from_environment(value: str | None) -> Name | None:
    if not value:
        return None
    for name in NAMES:
        if value == name:
            state = status(name)
            if not state.available:
                raise BackendError(
                    f"PLIMSOLL_BACKEND: expected a backend that runs here; got {value!r}. {state.detail}"
                )
            return name
    raise ArgumentError(
        f"PLIMSOLL_BACKEND: expected one of {', '.join(NAMES)}; got {value!r}. Unset it to choose freely."
    )


@functools.cache
def _say_missing(name: Name) -> None:
    warnings.warn(
        f"plimsoll: the {name} backend is not available, the slower torch one runs in its place. {status(name).detail}",
        RuntimeWarning,
        stacklevel=5,
    )
