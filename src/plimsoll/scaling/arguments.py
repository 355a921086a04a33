"""Checks of what scalers are told."""

import math
from typing import Any

from torch import Tensor

from plimsoll.errors import ArgumentError

LARGEST = 3.4028234663852886e38  # of float32, in which the scale is kept
SMALLEST = 2.0**-126  # the smallest normal float32: the reciprocal of anything below it may be Inf


def check_scale(operation: str, name: str, value: object) -> float:
    """A scale as a float: finite, positive, and such that its reciprocal is finite too."""
    number = _number(value)
    if number is None or not SMALLEST <= number <= LARGEST:
        raise ArgumentError(
            f"{operation}: expected {name} from 2**-126 to the largest float32, {LARGEST:.8g}; got {value!r}. Use a "
            "power of two, which multiplies exactly: 2.0**16, say."
        )
    return number


def check_bounds(operation: str, low: float, scale: float, high: float) -> None:
    """Raises `ArgumentError` unless the three are in order."""
    if not low <= scale <= high:
        raise ArgumentError(
            f"{operation}: expected min_scale <= init_scale <= max_scale; got min_scale={low:g}, init_scale={scale:g}, "
            f"max_scale={high:g}. Bring them in order."
        )


def check_within(operation: str, low: float, scale: float, high: float) -> None:
    """Raises `ArgumentError` unless a scale lies within a scaler's bounds."""
    if not low <= scale <= high:
        raise ArgumentError(
            f"{operation}: expected new_scale within the scaler's bounds, {low:g} to {high:g}; got {scale:g}. Make the "
            "scaler with other bounds: min_scale, max_scale."
        )


def check_growth(operation: str, value: object) -> float:
    """A growth factor as a float: above 1."""
    number = _number(value)
    if number is None or not 1.0 < number < math.inf:
        raise ArgumentError(
            f"{operation}: expected growth_factor above 1; got {value!r}. Use 2.0, or StaticScaler for a scale that "
            "stays."
        )
    return number


def check_backoff(operation: str, value: object) -> float:
    """A back-off factor as a float: between 0 and 1."""
    number = _number(value)
    if number is None or not 0.0 < number < 1.0:
        raise ArgumentError(
            f"{operation}: expected backoff_factor above 0 and below 1; got {value!r}. Use 0.5, or StaticScaler for a "
            "scale that stays."
        )
    return number


def check_interval(operation: str, name: str, value: object) -> int:
    """A number of steps: 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{operation}: expected {name} of 1 step or more, an int; got {value!r}. Use 2000, say.")
    return value


def _number(value: object) -> float | None:
    """A real number as a float; None of what is none, or NaN."""
    given: Any = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        number = float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(given, (str, bytes)) or math.isnan(number) else number
