"""Rules for a block's scale, in exact float64, and the scale behind its results."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plimsoll.certification.probing.arrays import Values
from plimsoll.certification.probing.comparing import Mask, same
from plimsoll.formats import BlockFormat, Format
from plimsoll.formats.codec import Rounding

_LARGEST = 127  # exponent of the largest E8M0 scale; the smallest has -127


def expected_scales(fmt: BlockFormat, rule: str, absmax: Values) -> Values:
    """Return a rule's scale for blocks of these magnitudes, at a tensor scale of 1.

    Args:
        fmt: The block format.
        rule: "floor", "ceil", "rceil" or "even".
        absmax: Largest magnitudes, none of them 0, Inf or NaN.
    """
    if fmt.scale.signed:
        rounding: Rounding = "up" if rule in ("ceil", "rceil") else "nearest_even"
        return fmt.scale.decode(fmt.scale.encode(absmax / fmt.element.max, rounding, saturate=True))
    exponents = _MX_RULES[rule](absmax, fmt.element)
    return np.ldexp(1.0, np.clip(exponents, -_LARGEST, _LARGEST))


def _exponent(absmax: Values) -> NDArray[np.int64]:
    return np.frexp(absmax)[1].astype(np.int64) - 1


def _floor(absmax: Values, element: Format) -> NDArray[np.int64]:
    return _exponent(absmax) - element.max_exponent


def _ceil(absmax: Values, element: Format) -> NDArray[np.int64]:
    return _exponent(absmax) + (np.frexp(absmax)[0] != 0.5) - element.max_exponent


def _rceil(absmax: Values, element: Format) -> NDArray[np.int64]:
    floor = _floor(absmax, element)
    return floor + (absmax > np.ldexp(element.max, floor))


def _even(absmax: Values, element: Format) -> NDArray[np.int64]:
    half_step = np.ldexp(1.0, _exponent(absmax) - element.mantissa_bits - 1)
    return _exponent(absmax + half_step) - element.max_exponent


# floor: OCP MX 1.0, 6.3. The others are the variants in use: docs/concepts/formats.md.
_MX_RULES: dict[str, Callable[[Values, Format], NDArray[np.int64]]] = {
    "floor": _floor, "ceil": _ceil, "rceil": _rceil, "even": _even,
}  # fmt: skip
RULES = tuple(_MX_RULES)


def rule_words(fmt: BlockFormat, rule: str) -> str:
    """Return the name of a rule; with a mantissa "nearest" or "next above".

    A scale with a mantissa is the nearest one by "floor" and "even", else the next above.

    >>> from plimsoll.formats import NVFP4
    >>> rule_words(NVFP4, "floor")
    'nearest'
    """
    if not fmt.scale.signed:
        return rule
    return {"floor": "nearest", "even": "nearest", "ceil": "next above", "rceil": "next above"}.get(rule, rule)


def explains(
    fmt: BlockFormat, x: Values, y: Values, scale: Values, roundings: tuple[Rounding, ...], *, clamped: bool = True
) -> Mask:
    """Return which blocks have the results that their values give under these scales.

    Args:
        fmt: The block format.
        x: Values, one block a row.
        y: Results, likewise.
        scale: Scale of each block.
        roundings: The modes of which one, for each value, gives its result.
        clamped: Whether elements beyond the largest one must become it. Default: True.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.where(scale[:, None] > 0, x / scale[:, None], 0.0)
    size = np.abs(quotient)
    limit = 2.0 ** (fmt.element.max_exponent + 1)
    right: Mask = (size > fmt.element.max) & (size < limit) & (not clamped)
    for rounding in roundings:
        elements = fmt.element.decode(fmt.element.encode(quotient, rounding, saturate=True))
        right |= same(y, elements * scale[:, None]) | ((y == 0) & (elements == 0))
    return np.asarray(right.all(axis=1))


def explaining_scales(fmt: BlockFormat, x: Values, y: Values, roundings: tuple[Rounding, ...]) -> Values:
    """Return for each block a scale that explains its results; NaN without one.

    The tensor scale is 1.
    """
    scales = np.full(len(x), np.nan)
    # What becomes of elements beyond the largest one is the question of another requirement. So a scale that explains
    # all others will do, if none explains these too.
    for clamped in (True, False):
        for scale in _candidates(fmt, np.max(np.abs(x), axis=1)):
            fits = explains(fmt, x, y, scale, roundings, clamped=clamped)
            scales = np.where(np.isnan(scales) & fits, scale, scales)
    return scales


def _candidates(fmt: BlockFormat, absmax: Values) -> list[Values]:
    """Scales that any rule might give, the most usual first."""
    if not fmt.scale.signed:
        floor = _floor(absmax, fmt.element)
        return [np.ldexp(1.0, np.clip(floor + away, -_LARGEST, _LARGEST)) for away in (0, 1, -1, 2, -2, 3, -3)]
    nearest = fmt.scale.encode(absmax / fmt.element.max, "nearest_even", saturate=True).astype(np.int64)
    return [
        fmt.scale.decode(np.clip(nearest + away, 0, fmt.scale.max_code)) for away in (0, 1, -1, 2, -2, 3, -3, 8, -8)
    ]
