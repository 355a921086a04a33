"""How far the scales of a watched training have moved from where they began, and how FP8 holds the products' operands.

The drift of a tensor is the logarithm to base 2 of its root mean square over that of the first sample.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.formats import get_element
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum

Floats = NDArray[np.float64]

COLLECTIONS = ("weights", "activations", "activation_gradients")
PRODUCTS = ("qkv", "out", "up", "down", "readout")  # the linear modules of a block, and the last
_OPERANDS = {"weights": ".weight", "activations": ":input", "activation_gradients": ":output"}
FORMATS = {"weights": "e4m3", "activations": "e4m3", "activation_gradients": "e5m2"}


def drift(run: Run) -> dict[str, float]:
    """In binades: the median of the tensors' absolute drifts at the end, and the one furthest from 0 at any sample.

    Both also by collection ("weights_drift_median", ...), with the median scale of the first sample as a logarithm.
    """
    moved = {collection: dict(_moves(run, collection)) for collection in COLLECTIONS}
    found: dict[str, float] = {}
    for collection, tensors in moved.items():
        if tensors:
            found[f"{collection}_begin"] = float(np.median([begin for begin, _ in tensors.values()]))
            found |= _summed(f"{collection}_drift", [binades for _, binades in tensors.values()])
    return found | _summed("drift", [binades for tensors in moved.values() for _, binades in tensors.values()])


def _summed(name: str, moved: Sequence[Floats]) -> dict[str, float]:
    if not moved:
        return {}
    furthest = [float(binades[np.argmax(np.abs(binades))]) for binades in moved]
    ends = [abs(float(binades[-1])) for binades in moved]
    return {f"{name}_median": float(np.median(ends)), f"{name}_most": max(furthest, key=abs)}


def _moves(run: Run, collection: str) -> Iterator[tuple[str, tuple[float, Floats]]]:
    """Of each tensor the logarithm of its first scale, and its drift at each sample."""
    for name in run.tensors.get(collection, ()):
        rms = run.series(collection, name, "rms")[1]
        # What is zero at some sample (a gradient that is lost) has no scale to drift.
        if len(rms) and (rms > 0).all():
            yield name, (math.log2(float(rms[0])), np.log2(rms / rms[0]))


def headroom(run: Run) -> dict[str, float]:
    """What E4M3 and E5M2 make of the operands of linear layers, at their worst in any tensor and sample.

    `operands_overflow` and, of the gradients among them, `gradients_lost`: shares of the nonzero values, where one that
    is not finite has overflowed; `operands_room`: binades between the largest value and the largest of its format. All
    are NaN of a run that has recorded no such operand.
    """
    overflow, flushed, room = [math.nan], [math.nan], [math.nan]
    for collection, name in FORMATS.items():
        fmt = get_element(name, "lab unit")
        for spectrum in _operands(run, collection):
            fit, broken = spectrum.fit(fmt), spectrum.nonfinite / spectrum.count
            overflow.append(max(fit.overflow.estimate, broken) if spectrum.nonzero else broken)
            room.append(-math.inf if broken else math.log2(fmt.max / spectrum.absmax))
            if collection == "activation_gradients" and spectrum.nonzero:
                flushed.append(fit.lost.estimate)
    worst = {"operands_overflow": np.fmax.reduce(overflow), "gradients_lost": np.fmax.reduce(flushed)}
    return {name: float(value) for name, value in (worst | {"operands_room": np.fmin.reduce(room)}).items()}


def _operands(run: Run, collection: str) -> Iterator[Spectrum]:
    endings = tuple(f"{product}{_OPERANDS[collection]}" for product in PRODUCTS)
    for name in run.tensors.get(collection, ()):
        if name.endswith(endings):
            found = (spectrum for *_, spectrum in run.spectra(collection, name))
            yield from (spectrum for spectrum in found if spectrum.nonzero or spectrum.nonfinite)
