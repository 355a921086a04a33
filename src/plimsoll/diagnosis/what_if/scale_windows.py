"""Usable scales over time, and the step ranges for which one scale works."""

from dataclasses import dataclass

import numpy as np

from plimsoll import exports
from plimsoll.diagnosis.tables.cells import Floats, Ints


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A step range with the shifts that work at all of its steps.

    Attributes:
        from_step: The first step.
        to_step: The last step.
        window: The lowest and the highest shift. None: no shift works at any of the steps.
    """

    from_step: int
    to_step: int
    window: tuple[int, int] | None

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able data."""
        window = None if self.window is None else list(self.window)
        return {"from_step": self.from_step, "to_step": self.to_step, "window": window}


def stretches_of(steps: Ints, low: Floats, high: Floats) -> list[Stretch]:
    """Return the fewest step ranges, each as long as one shift works (or none does).

    Steps at which nothing was recorded (NaN) belong to the range around them.
    """
    stretches: list[Stretch] = []
    for step, lowest, highest in zip(steps.tolist(), low.tolist(), high.tolist(), strict=True):
        known = not (np.isnan(lowest) or np.isnan(highest))
        here = (int(lowest), int(highest)) if known and lowest <= highest else None
        last = stretches[-1] if stretches else None
        if last is None:
            stretches.append(Stretch(from_step=step, to_step=step, window=here))
        elif not known or here == last.window:
            stretches[-1] = Stretch(from_step=last.from_step, to_step=step, window=last.window)
        else:
            both = _both(last.window, here)
            if both is None:
                stretches.append(Stretch(from_step=step, to_step=step, window=here))
            else:
                stretches[-1] = Stretch(from_step=last.from_step, to_step=step, window=both)
    return stretches


def sentence(fmt: str, stretches: list[Stretch], scaled: bool) -> str:
    """Return the requirements of a format in one sentence.

    >>> one = Stretch(from_step=0, to_step=3990, window=(9, 13))
    >>> sentence("fp16", [one, Stretch(from_step=4000, to_step=9990, window=None)], True)
    'FP16 needs a scale of 2^9 to 2^13 until step 3,990, no scale works afterwards.'
    """
    name = fmt.upper()
    if not stretches:
        return f"{name}: nothing was recorded to judge it by."
    if len(stretches) == 1 and stretches[0].window is None:
        return f"No scale works for {name} at any step."
    if len(stretches) == 1:
        return f"{name} {_need(stretches[0], scaled)} at all steps."
    if len(stretches) > 4:
        unusable = sum(1 for stretch in stretches if stretch.window is None)
        tail = f", and in {unusable} of the {len(stretches)} step ranges no scale works" if unusable else ""
        return f"No single scale works for {name}: it would have to change {len(stretches) - 1} times{tail}."
    first, *rest = stretches
    clauses = [f"{name} {_need(first, scaled)} until step {first.to_step:,}"]
    clauses += [f"{_then(stretch)} until step {stretch.to_step:,}" for stretch in rest[:-1]]
    return ", ".join([*clauses, f"{_then(rest[-1])} afterwards"]) + "."


def block_sentence(fmt: str, stretches: list[Stretch]) -> str:
    """Return in one sentence whether a block format works.

    >>> bad = Stretch(from_step=0, to_step=90, window=None)
    >>> block_sentence("mxfp4", [bad, Stretch(from_step=100, to_step=900, window=(0, 0))])
    'MXFP4 may lose 1 % or more of some layer until step 90, works afterwards.'
    """
    name = fmt.upper()
    if not stretches:
        return f"{name}: nothing was recorded to judge it by."
    if len(stretches) == 1:
        return f"{name} {_effect(stretches[0])} at all steps."
    if len(stretches) > 4:
        lossy = sum(1 for stretch in stretches if stretch.window is None)
        return f"{name} may lose 1 % or more of some layer in {lossy} of {len(stretches)} step ranges."
    clauses = [f"{_effect(stretch)} until step {stretch.to_step:,}" for stretch in stretches[:-1]]
    return f"{name} {', '.join(clauses)}, {_effect(stretches[-1])} afterwards."


def _effect(stretch: Stretch) -> str:
    return "may lose 1 % or more of some layer" if stretch.window is None else "works"


def _need(stretch: Stretch, scaled: bool) -> str:
    if stretch.window is None:
        return "has no scale that works"
    low, high = stretch.window
    if low <= 0 <= high:
        return f"works without a scale{f', and with {scales(low, high)},' if scaled else ''}"
    return f"needs a scale of {scales(low, high)}"


def _then(stretch: Stretch) -> str:
    return "no scale works" if stretch.window is None else f"one of {scales(*stretch.window)}"


def scales(low: int, high: int) -> str:
    """Return the scales between two shifts as all surfaces write them.

    >>> scales(7, 25), scales(7, 7)
    ('2^7 to 2^25', '2^7')
    """
    return f"2^{low}" if low == high else f"2^{low} to 2^{high}"


def _both(a: tuple[int, int] | None, b: tuple[int, int] | None) -> tuple[int, int] | None:
    if a is None or b is None or max(a[0], b[0]) > min(a[1], b[1]):
        return None
    return max(a[0], b[0]), min(a[1], b[1])
