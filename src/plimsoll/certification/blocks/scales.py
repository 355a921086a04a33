"""Rules for the scale of a block, in exact float64 arithmetic, and the scale that explains a block's results."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plimsoll.certification.probing.arrays import Values, same
from plimsoll.formats import BlockFormat, Format
from plimsoll.formats.codec import Rounding

_LARGEST = 127  # exponent of the largest E8M0 scale; the smallest has -127


def expected_scales(fmt: BlockFormat, rule: str, absmax: Values, tensor_scale: float) -> Values:
    """Return the scale that a rule gives blocks of these largest magnitudes, none of which is 0, Inf or NaN.

    Args:
        fmt: The block format.
        rule: "floor", "ceil", "rceil" or "even".
        absmax: Largest magnitudes.
        tensor_scale: Scale of the tensor; 1 where there is none.
    """
    if fmt.scale.signed:
        rounding: Rounding = "up" if rule in ("ceil", "rceil") else "nearest_even"
        return fmt.scale.decode(fmt.scale.encode(absmax / (fmt.element.max * tensor_scale), rounding, saturate=True))
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
    """Return the name of a rule. A scale with a mantissa is the nearest one by "floor" and "even", else the next above.

    >>> from plimsoll.formats import NVFP4
    >>> rule_words(NVFP4, "floor")
    'nearest'
    """
    if not fmt.scale.signed:
        return rule
    return {"floor": "nearest", "even": "nearest", "ceil": "next above", "rceil": "next above"}.get(rule, rule)


def explaining_scales(
    fmt: BlockFormat, x: Values, y: Values, tensor_scale: float, roundings: tuple[Rounding, ...]
) -> Values:
    """Return for each block the scale under which its results are the roundings of its values; NaN if there is none.

    Args:
        fmt: The block format.
        x: Values, one block a row.
        y: Results, likewise.
        tensor_scale: Scale of the tensor; 1 where there is none.
        roundings: The modes of which one, for each value, gives its result.
    """
    absmax = np.max(np.abs(x), axis=1)
    best, most = np.full(len(x), np.nan), np.zeros(len(x))
    for scale in _candidates(fmt, absmax, tensor_scale):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            quotient = np.where(scale[:, None] > 0, x / (scale[:, None] * tensor_scale), 0.0)
        # What becomes of elements beyond the largest one is the question of another requirement.
        beyond = np.abs(quotient) > fmt.element.max
        right = beyond & (np.abs(quotient) < 2.0 ** (fmt.element.max_exponent + 1))
        for rounding in roundings:
            elements = fmt.element.decode(fmt.element.encode(quotient, rounding, saturate=True))
            right |= same(y, elements * scale[:, None] * tensor_scale) | ((y == 0) & (elements == 0))
        share = np.mean(right, axis=1)
        better = (share > most) & (share == 1)
        best[better], most[better] = scale[better], share[better]
    return best


def _candidates(fmt: BlockFormat, absmax: Values, tensor_scale: float) -> list[Values]:
    """Scales that any rule might give, the most usual first."""
    if not fmt.scale.signed:
        floor = _floor(absmax, fmt.element)
        return [np.ldexp(1.0, np.clip(floor + away, -_LARGEST, _LARGEST)) for away in (0, 1, -1, 2, -2, 3, -3)]
    nearest = fmt.scale.encode(absmax / (fmt.element.max * tensor_scale), "nearest_even", saturate=True).astype(
        np.int64
    )
    return [
        fmt.scale.decode(np.clip(nearest + away, 0, fmt.scale.max_code)) for away in (0, 1, -1, 2, -2, 3, -3, 8, -8)
    ]
