"""Checks of arguments: a function each, with errors of rule, value and remedy.

Every message has the shape of `plimsoll.errors`: `<operation>: expected <what must hold>; got <name>=<value>. <remedy>`
"""

import difflib
import itertools
import math
import numbers
import operator
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

from plimsoll.errors import ArgumentError, UnsupportedTensorError

Choice = TypeVar("Choice")
_MOST_SHOWN = 200  # characters of a value: that of a model has thousands


def integer(
    operation: str, name: str, value: object, *, low: int | None = None, high: int | None = None, remedy: str
) -> int:
    """Return `value` as an int if it is a whole number within the bounds.

    NumPy integers are accepted. Booleans and floats are not, since they are nearly always a mistake.

    Args:
        operation: What the user called, for the message: `"watch"`.
        name: The argument's name.
        value: What came.
        low: Smallest allowed value. Default: no bound.
        high: Largest allowed value. Default: no bound.
        remedy: What to do, as a sentence: `"Use 2000, for example."`

    Raises:
        ArgumentError: `value` is not a whole number, or is out of bounds.

    >>> integer("watch", "every", 10, low=1, remedy="Use 100.")
    10
    >>> integer("watch", "every", 0, low=1, remedy="Use 100.")
    Traceback (most recent call last):
    plimsoll.ArgumentError: watch: expected every to be an integer of at least 1; got every=0. Use 100.
    """
    try:
        result = None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):  # the last two: tensors of several values, or of the meta device
        result = None
    if result is None or (low is not None and result < low) or (high is not None and result > high):
        if low is not None and high is not None:
            bounds = f" from {low} to {_short(high)}"
        else:
            bounds = f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""
        raise _error(operation, f"{name} to be an integer{bounds}", name, value, remedy)
    return result


def number(
    operation: str,
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    remedy: str,
) -> float:
    """Return `value` as a float if it is a finite number within the bounds.

    Integers and NumPy numbers are accepted; NaN, infinities, booleans, tensors and text are not.

    Args:
        operation: What the user called, for the message.
        name: The argument's name.
        value: What came.
        above: Exclusive lower bound. Default: none.
        at_least: Inclusive lower bound. Default: none.
        below: Exclusive upper bound. Default: none.
        at_most: Inclusive upper bound. Default: none.
        remedy: What to do, as a sentence.

    Raises:
        ArgumentError: `value` is not a finite number, or is out of bounds.

    >>> number("prepare", "clip_norm", 1, above=0, remedy="Use 1.0.")
    1.0
    >>> number("prepare", "clip_norm", -1.0, above=0, remedy="Use 1.0.")
    Traceback (most recent call last):
    plimsoll.ArgumentError: prepare: expected clip_norm to be a number above 0; got clip_norm=-1.0. Use 1.0.
    """
    result = _as_float(value)
    fits = (
        result is not None
        and (above is None or result > above)
        and (at_least is None or result >= at_least)
        and (below is None or result < below)
        and (at_most is None or result <= at_most)
    )
    if result is None or not fits:
        words = {"above": above, "of at least": at_least, "below": below, "of at most": at_most}
        bounds = " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
        raise _error(operation, f"{name} to be a number {bounds or 'that is finite'}", name, value, remedy)
    return result


def one_of(operation: str, name: str, value: object, choices: Collection[Choice], *, remedy: str = "") -> Choice:
    """Return the choice that equals `value`.

    Args:
        operation: What the user called, for the message.
        name: The argument's name.
        value: What came.
        choices: What is allowed.
        remedy: What to do, as a sentence. Default: the nearest choice, or the first.

    Raises:
        ArgumentError: `value` is none of the choices.

    >>> one_of("watch", "ranks", "all", ("all", "reduce"))
    'all'
    >>> one_of("watch", "ranks", "sum", ("all", "reduce"))
    Traceback (most recent call last):
    plimsoll.ArgumentError: watch: expected ranks to be 'all' or 'reduce'; got ranks='sum'. Use 'all'.
    """
    for choice in choices:
        # A bool equals 0 or 1, and a tensor equals nothing: types are compared first.
        if type(value) is type(choice) and value == choice:
            return choice
    written = [repr(choice) for choice in choices]
    listed = ", ".join(written[:-1]) + (" or " if len(written) > 1 else "") + written[-1]
    if not remedy:
        near = nearest(str(value), [str(choice) for choice in choices], 1)
        shown = next((c for c in choices if near and str(c) == near[0]), None)
        remedy = f"Did you mean {shown!r}?" if near else f"Use {written[0]}."
    raise _error(operation, f"{name} to be {listed}", name, value, remedy)


def nearest(name: str, known: Iterable[str], many: int = 3) -> list[str]:
    """Return the known names like `name`, most similar first, whatever their case.

    >>> nearest("gradient", ["weights", "gradients", "updates"])
    ['gradients']
    """
    by_folded = {entry.casefold(): entry for entry in known}
    return [by_folded[n] for n in difflib.get_close_matches(name.casefold(), by_folded, n=many, cutoff=0.5)]


def items(operation: str, name: str, value: object, *, remedy: str = "Put it in brackets.") -> list[Any]:
    """Return the items of a list, a tuple or another iterable that is no text.

    Args:
        operation: What the user called, for the message.
        name: The argument's name.
        value: What came.
        remedy: What to do, as a sentence.

    Raises:
        ArgumentError: `value` is text or not iterable.

    >>> items("watch", "sinks", ("wandb", "mlflow"))
    ['wandb', 'mlflow']
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _error(operation, f"{name} to be a list", name, value, remedy)
    return list(cast("Iterable[Any]", value))


def path(operation: str, what: str, value: object, *, remedy: str) -> Path:
    """Return `value` as a path that a file system can hold.

    Args:
        operation: What the user called, for the message.
        what: What the path is to name, as "a folder".
        value: What came.
        remedy: What to do, as a sentence.

    Raises:
        ArgumentError: `value` is no path, is empty, or has a character that no path has.

    >>> path("report", "a file", "report.html", remedy="Name one.").name
    'report.html'
    """
    try:
        text = cast("object", os.fspath(cast("os.PathLike[str]", value)))
        usable = isinstance(text, str) and bool(text) and b"\0" not in os.fsencode(text)
    except (TypeError, ValueError):  # no path; or not to be written in the file system's encoding
        usable = False
    if not usable:
        raise ArgumentError(
            f"{operation}: expected the path of {what}, as a str or pathlib.Path, that is not empty and holds no NUL "
            f"or half a surrogate pair; got {value!r:.{_MOST_SHOWN}}. {remedy}"
        )
    return Path(cast("Any", value))


def initialized(operation: str, model: Any) -> None:
    """Raise if a lazy layer of a model has parameters or buffers without a size still.

    Args:
        operation: What the user called, for the message.
        model: A `torch.nn.Module`.

    Raises:
        UnsupportedTensorError: The model was not run before.
    """
    names = lazy_names(model)
    if names:
        raise UnsupportedTensorError(
            f"{operation}: expected parameters that have a shape; got {names[0]}, which is not initialized yet. Run "
            "the model once before."
        )


def lazy_names(model: Any) -> list[str]:
    """Return the parameters and buffers of a model that have no size before its first call."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    # By its method, so that this module needs no torch.
    return [name for name, tensor in named if hasattr(tensor, "materialize")]


def _short(bound: int) -> str:
    """Return a bound as text, a large power of two as one, which is recognizable."""
    exponent = bound.bit_length() - 1
    return f"2^{exponent}" if exponent > 40 and bound == 1 << exponent else f"{bound}"


def _as_float(value: object) -> float | None:
    """Return a finite float, or None for what is no number."""
    # numbers.Real has NumPy's scalars and fractions. A tensor is none of them: float() of it would wait for its device.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def _error(operation: str, rule: str, name: str, value: object, remedy: str) -> ArgumentError:
    return ArgumentError(f"{operation}: expected {rule}; got {name}={value!r:.{_MOST_SHOWN}}. {remedy}")


def regular_file(operation: str, given: object) -> Path:
    """Return the path of a file to write; `ArgumentError` for no path, a folder, a device or a pipe."""
    place = path(operation, "a file", given, remedy="Name a file.")
    if place.exists() and not place.is_file():
        kind, remedy = ("a folder", "Name a file in it.") if place.is_dir() else ("a device or a pipe", "Name a file.")
        raise ArgumentError(f"{operation}: expected the path of a file; got {place}, {kind}. {remedy}")
    return place
