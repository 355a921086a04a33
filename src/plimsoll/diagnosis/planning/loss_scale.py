"""Loss scale of FP16 modules: one for all if one works, else one for each layer.

Or for as many layers as it can. Windows are of the true gradients, as shifts. A module's own scale includes the loss
scale.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.diagnosis.planning.series_windows import Window

FLOOR = -14  # of a loss scaler's scale
_START = 16  # where nothing is known
HIGHEST = 24  # what a loss scale begins with at most: higher ones change nothing that is rounded
_HIGHEST_OF_LAYER = 100  # `LayerScaler`'s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Exponents of the loss scale and of modules that need their own; `unserved` have none at this loss scale."""

    loss: int
    layers: Mapping[str, int]
    unserved: tuple[str, ...] = ()


def solve(windows: Mapping[str, Window], *, margin: int, layer_scales: bool) -> Scales:
    """Return the scales for modules that each have a usable one."""
    ranges = {name: _range(window, margin) for name, window in windows.items() if window.bounded}
    if not ranges:
        return Scales(loss=_START, layers={})
    low, high = max(low for low, _ in ranges.values()), min(high for _, high in ranges.values())
    if max(low, FLOOR) <= high:
        return Scales(loss=_one(low, high), layers={})
    if layer_scales:
        own = {name: min(high, _HIGHEST_OF_LAYER) for name, (_, high) in ranges.items()}
        usual = int(statistics.median_low(own.values()))
        return Scales(loss=min(max(usual, FLOOR), HIGHEST), layers=own)
    return _most(ranges)


def _range(window: Window, margin: int) -> tuple[int, int]:
    return window.low, window.high - margin


def _one(low: int, high: int) -> int:
    return min(high, max(low, HIGHEST))


def _most(ranges: Mapping[str, tuple[int, int]]) -> Scales:
    """Return the scale that works for most modules, of several the one with most room."""
    serving = {k: [n for n, (low, high) in ranges.items() if low <= k <= high] for k in {h for _, h in ranges.values()}}
    best = max((k for k in serving if k >= FLOOR), key=lambda k: (len(serving[k]), -k), default=None)
    if best is None:
        return Scales(loss=_START, layers={}, unserved=tuple(ranges))
    served = serving[best]
    low, high = max(ranges[n][0] for n in served), min(ranges[n][1] for n in served)
    return Scales(loss=_one(low, high), layers={}, unserved=tuple(n for n in ranges if n not in served))
