"""Calls of the function under test: contained, timed, with inputs checked."""

import contextlib
import io
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.certification.certificate import Counterexample
from plimsoll.certification.probing.arrays import CallFailedError, read_values, same, shortest, to_numpy
from plimsoll.errors import ArgumentError

_MOST_COMPARED_BYTES = 1 << 22  # larger inputs, which only statistics need, are not compared before and after
_FEWEST_TIMED = 512  # a call of fewer values takes its fixed cost, not that of the values


class OutOfTimeError(Exception):
    """The time limit has been reached."""


# The function is somebody else's. What it raises becomes a `CallFailedError`, what it prints and warns of becomes a
# note, and a changed input is kept as a counterexample. Random generators are restored when the certificate is done.
class Caller:
    """The function under test, its device, and a time limit checked between calls."""

    def __init__(self, function: Callable[..., Any], device: torch.device, seconds: float) -> None:
        self.function = function
        self.device = device
        self.limit = seconds
        self.numpy = False  # whether it takes NumPy arrays
        self.calls = 0
        self.notes: list[str] = []  # sentences on what was noticed
        self.changed: Counterexample | None = None  # the first input that the function changed
        # By the fastest call of many values, since the first may have compiled something.
        self.seconds_per_value = math.inf
        self._begin = time.perf_counter()

    @property
    def remaining(self) -> float:
        """Seconds left of the limit; negative when it has been passed."""
        return self.limit - (time.perf_counter() - self._begin)

    def affordable(self, values: int, share: float) -> int:
        """Return how many values a call may have to take at most a share of the time."""
        if self.seconds_per_value * values <= self.remaining * share:
            return values
        return max(0, int(self.remaining * share / self.seconds_per_value))

    def __call__(self, *arguments: object) -> Any:
        """Return the function's result for arguments, tensors moved to the device.

        Raises:
            CallFailedError: The function raised an error.
            OutOfTimeError: There is no time left for the call.
        """
        if self.remaining < 0:
            raise OutOfTimeError(f"the limit of {self.limit:g} s was reached")
        given = [self._given(argument) for argument in arguments]
        before = [_bytes(argument) for argument in given]
        self.calls += 1
        start = time.perf_counter()
        try:
            with self._watched():
                result = self.function(*given)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        except (Exception, SystemExit) as error:
            message = " ".join(str(error).split())
            raise CallFailedError(f"{type(error).__name__}: {message[:300]}".rstrip(": ")) from error
        taken = time.perf_counter() - start
        values = sum(argument.numel() for argument in arguments if isinstance(argument, Tensor))
        if values >= _FEWEST_TIMED:
            self.seconds_per_value = min(self.seconds_per_value, taken / values)
        self._compare(arguments, given, before)
        return result

    def _given(self, argument: object) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        moved = argument if self.device.type == "cpu" else argument.to(self.device)
        return to_numpy(moved) if self.numpy else moved

    @contextlib.contextmanager
    def _watched(self) -> Generator[None]:
        """Keep what is printed and warned of inside the block, as notes."""
        printed = io.StringIO()
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            yield
        if printed.getvalue():
            self.note(f"It prints: {_line(printed.getvalue())}")
        for warning in caught:
            self.note(f"It warns: {type(warning.message).__name__}: {_line(str(warning.message))}")

    def note(self, sentence: str) -> None:
        """Keep a sentence for the sheet, once whatever numbers it has."""
        if re.sub(r"\d+", "", sentence)[:80] not in (re.sub(r"\d+", "", kept)[:80] for kept in self.notes[:10]):
            self.notes.append(sentence)

    def _compare(self, arguments: tuple[object, ...], given: list[Any], before: list[bytes | None]) -> None:
        for argument, changed, old in zip(arguments, given, before, strict=True):
            if self.changed is None and isinstance(argument, Tensor) and old is not None and old != _bytes(changed):
                self.changed = _first_change(argument, old, _bytes(changed) or b"")


def refusal(wanted: str, errors: Mapping[str, str]) -> ArgumentError:
    """Return the error for a function that is not of its kind, with its own errors."""
    by_error: dict[str, list[str]] = {}
    for what, error in errors.items():
        by_error.setdefault(error, []).append(what)
    named = "; ".join(f"{', '.join(what)}: {error}" for error, what in list(by_error.items())[:4])
    remedy = "Call it with device='cuda'" if "cuda" in named.lower() else "Wrap it in a function that does"
    return ArgumentError(f"certify: expected {wanted}; got errors ({named}). {remedy}.")


def _first_change(argument: Tensor, old: bytes, new: bytes) -> Counterexample:
    """Return the shortest of the values that a call changed."""
    was, became = (read_values(torch.frombuffer(bytearray(b), dtype=argument.dtype)).values for b in (old, new))
    moved = np.flatnonzero(~same(was, became))
    note = f"{argument.dtype} of shape {tuple(argument.shape)}".removeprefix("torch.")
    value, expected, got = "NaN", "the same bits after the call", "others"
    if len(moved):
        index = moved[shortest(was[moved])]
        value, expected, got = float(was[index]), float(was[index]), float(became[index])
    return Counterexample(input=value, expected=expected, got=got, note=note)


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Generator[None]:
    """Seed the global generators for the block and restore them, so that a certificate is always the same."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what functions under test may use)
    # A device without an index is the current one.
    devices = [torch.empty(0, device=device).device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002


def _bytes(argument: object) -> bytes | None:
    """Return all bytes of an argument's memory, also between the values it shows."""
    if isinstance(argument, np.ndarray):
        return argument.tobytes() if argument.nbytes <= _MOST_COMPARED_BYTES else None
    if not isinstance(argument, Tensor):
        return None
    storage = argument.untyped_storage()
    if storage.nbytes() > _MOST_COMPARED_BYTES:
        return None
    whole = torch.empty(0, dtype=torch.uint8, device=argument.device).set_(storage)
    return whole.cpu().numpy().tobytes()


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
