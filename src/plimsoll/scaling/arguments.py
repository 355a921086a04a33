"""Argument checks of loss scalers."""

import math
from typing import Any

import torch
from torch import Tensor

from plimsoll import checks
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP32, Format, get_element

LARGEST = 3.4028234663852886e38  # of float32, the dtype of the scale
SMALLEST = 2.0**-126  # smallest normal float32: the reciprocal of a smaller number may be Inf


def check_scale(operation: str, name: str, value: object) -> float:
    """Return a scale as a float: a finite positive number with a finite reciprocal."""
    number = _number(value)
    if number is None or not SMALLEST <= number <= LARGEST:
        raise ArgumentError(
            f"{operation}: expected {name} from 2**-126 to the largest float32, {LARGEST:.8g}; got {value!r}. Use a "
            "power of two, which multiplies exactly: 2.0**16, for example."
        )
    return number


def check_bounds(operation: str, low: float, scale: float, high: float) -> None:
    """Raise `ArgumentError` unless the three are in order."""
    if not low <= scale <= high:
        raise ArgumentError(
            f"{operation}: expected min_scale <= init_scale <= max_scale; got min_scale={low:g}, init_scale={scale:g}, "
            f"max_scale={high:g}. Bring them in order."
        )


def check_within(operation: str, low: float, scale: float, high: float) -> None:
    """Raise `ArgumentError` unless a scale lies within a scaler's bounds."""
    if not low <= scale <= high:
        raise ArgumentError(
            f"{operation}: expected new_scale within the scaler's bounds, {low:g} to {high:g}; got {scale:g}. Create "
            "the scaler with other bounds: min_scale, max_scale; StaticScaler has its scale alone."
        )


def check_measures(operation: str, device: str) -> None:
    """Raise `ArgumentError` for a device without float64, in which gradients are measured."""
    if torch.device(device).type == "mps":
        raise ArgumentError(
            f"{operation}: expected a device with float64, in which it measures gradients; got device={device!r}. Use "
            "DynamicScaler there."
        )


def check_format(operation: str, name: str, value: object) -> Format:
    """Return the format of a backward pass: signed, and within float32's range."""
    fmt = get_element(value, operation)
    if fmt.max > FP32.max or not fmt.signed:
        raise ArgumentError(
            f"{operation}: expected a signed format within float32's range; got {name}={fmt.name}. Use 'fp16', the "
            "backward pass's format under autocast."
        )
    return fmt


def check_growth(operation: str, value: object) -> float:
    """Return a growth factor as a float above 1."""
    remedy = "Use 2.0, or StaticScaler for a constant scale."
    return checks.number(operation, "growth_factor", value, above=1, remedy=remedy)


def check_backoff(operation: str, value: object) -> float:
    """Return a back-off factor as a float between 0 and 1."""
    remedy = "Use 0.5, or StaticScaler for a constant scale."
    return checks.number(operation, "backoff_factor", value, above=0, below=1, remedy=remedy)


def check_interval(operation: str, name: str, value: object) -> int:
    """Return a number of steps, at least 1."""
    return checks.integer(operation, name, value, low=1, remedy="Use 2000, for example.")


def _number(value: object) -> float | None:
    """Return a real number or one-element tensor as a float, or None."""
    plain: Any = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        number = float(plain)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(plain, (str, bytes)) or math.isnan(number) else number
