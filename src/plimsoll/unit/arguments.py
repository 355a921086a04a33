"""Checks of arguments that functions of the package share."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, UnsupportedTensorError

# The checks of functions run under torch.compile too, where a number may be a symbol. So they do not use
# `plimsoll.checks`, whose test for a number is no test that the compiler can trace.


def check_floating(operation: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that are not floating point. None is an omitted argument."""
    for name, x in tensors.items():
        if x is not None and not (isinstance(x, Tensor) and x.dtype.is_floating_point):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnsupportedTensorError(
                f"{operation}: expected a floating-point tensor; got {name}={described(x)}. Convert it first: a scale "
                "is of real numbers."
            )


def check_mult(operation: str, mult: float) -> float:
    """Return `mult` as a number, or raise an error unless it is from 2**-32 to 2**32."""
    if isinstance(mult, bool) or not isinstance(mult, (int, float, torch.SymFloat)) or not 2**-32 <= mult <= 2**32:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{operation}: expected mult to be a number from 2**-32 to 2**32; got {described(mult)}. Use 1.0 to leave "
            "the input as it is."
        )
    # A compiler may hold the multiplier as a symbol. copysign makes it a number with a guard, as no symbol passes it.
    return math.copysign(mult, 1.0)


def check_not_inplace(operation: str, inplace: bool) -> None:
    """Refuse `inplace`: the input's values are not at the scale of the result."""
    if inplace:
        raise ArgumentError(
            f"{operation}: expected inplace=False, since the result has another scale than its input; got "
            f"inplace={inplace!r}. Leave it out."
        )


def check_probability(operation: str, p: float) -> None:
    """Raise an error unless `p` is a number from 0 to 1."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"{operation}: expected the share to drop between 0 and 1; got {described(p)}. 0.1 drops a tenth."
        )


def check_tau(operation: str, tau: object) -> None:
    """Raise an error unless `tau` is between 0 and 1."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau < 1:
        raise ArgumentError(
            f"{operation}: expected tau between 0 and 1, the branch's share of the variance; got {described(tau)}. 0.5 "
            "gives branch and skip the same."
        )


def described(value: object) -> str:
    """Return a value with its type, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor ({value.dtype}, {tuple(value.shape)})"
    return f"{value!r} ({type(value).__name__})"


def call_arguments(operation: str, example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example as positional and keyword arguments of a call.

    It must be a tensor, a tuple or a mapping of names.
    """
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple):
        return cast("tuple[Any, ...]", example), {}
    if isinstance(example, Mapping):
        named = dict(cast("Mapping[Any, Any]", example))
        if all(isinstance(name, str) for name in named):
            return (), named
    raise ArgumentError(
        f"{operation}: expected an example that is a tensor, a tuple of arguments or a mapping of keyword arguments; "
        f"got {type(cast('object', example)).__name__}. Write a batch as the model is called with it: (x, y) for "
        "model(x, y)."
    )
