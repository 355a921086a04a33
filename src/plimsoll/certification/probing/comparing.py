"""Comparisons of results: right places, the number wrong, and the best input."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.probing.arrays import CallFailedError, Values

Mask = NDArray[np.bool_]
Place = tuple[int, ...]


def same(found: Values, expected: Values) -> Mask:
    """Return where two arrays are equal; a NaN equals a NaN, and zero's sign counts."""
    both_nan = np.isnan(found) & np.isnan(expected)
    return both_nan | ((found == expected) & (np.signbit(found) == np.signbit(expected)))


def compared(
    found: Values,
    expected: Values,
    shown: Callable[[Place], tuple[object, str]],
    *,
    where: Mask | None = None,
    right: Mask | None = None,
    order: Values | None = None,
) -> Outcome:
    """Return the outcome of a comparison, with one wrong result as its counterexample.

    Args:
        found: Results.
        expected: Conforming results.
        shown: Input and note of a counterexample at an index of the results.
        where: Which results are judged. Default: all.
        right: Where a result is right. Default: where both are the same.
        order: Values of which the shortest one's result is shown. Default: the first wrong result is.
    """
    right = same(found, expected) if right is None else right
    where = np.ones(right.shape, np.bool_) if where is None else where
    tried, wrong = int(np.count_nonzero(where)), np.argwhere(where & ~right)
    if not len(wrong):
        return Outcome(tried=tried)
    place: Place = tuple(wrong[0 if order is None else shortest(order[tuple(wrong.T)])].tolist())
    value, note = shown(place)
    return deviation(value, float(expected[place]), float(found[place]), note, tried=tried, wrong=len(wrong))


def deviation(
    input: object,  # noqa: A002  (the field's name)
    expected: object,
    got: object,
    note: str = "",
    *,
    tried: int = 1,
    wrong: int = 1,
    detail: str = "",
) -> Outcome:
    """Return the outcome of a check that failed, with its counterexample."""
    example = Counterexample(input=input, expected=expected, got=got, note=note)
    return Outcome(tried=tried, wrong=wrong, counterexample=example, detail=detail)


def attempted(what: str, check: Callable[[], Outcome]) -> Outcome:
    """Return a check's outcome, or a refusal if the function raises an error."""
    try:
        return check()
    except CallFailedError as error:
        return replace(deviation("a tensor", "a result", str(error), what), refused=f"{what}: {error}")


def shortest(values: Values, *ties: NDArray[np.generic]) -> int:
    """Return the index of the value that is shortest to write, always the same one.

    Finite values come first. Of these the ones with the fewest significant bits do, where eight powers of two away
    from 1 count as much as a bit. Then positive ones and the keys in `ties` decide.

    >>> shortest(np.array([1.3, -2.5, 2.5, 1e30]))
    2
    """
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    mantissa, exponent = np.frexp(finite)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    lowest = (whole & -whole).astype(np.float64)
    significant = 53 - np.log2(np.where(lowest > 0, lowest, 2.0**53)).astype(np.int64)
    keys = [~np.isfinite(values), 8 * significant + np.abs(exponent - 1), np.signbit(values), *ties]
    return int(np.lexsort(keys[::-1])[0])
