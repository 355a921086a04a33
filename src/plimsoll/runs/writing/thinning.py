"""Thinning by age while compacting: of old spectra only every n-th step stays.

A rule is ``(age_steps, keep_every)``: of the steps that are more than `age_steps` behind the last one, those divisible
by `keep_every` stay. A part is rewritten once for each rule that applies to all of its steps. Its generation is the
number of rules that were applied to all of it.
"""

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import ArgumentError
from plimsoll.runs.storage.parts import Part

Rules = tuple[tuple[int, int], ...]


def rules(thin: Sequence[tuple[int, int]]) -> Rules:
    """Return the rules, youngest age first.

    Raises:
        ArgumentError: An age is below 0 or an interval below 1.
    """
    try:
        checked = tuple(sorted((operator.index(age), operator.index(every)) for age, every in thin))
    except (TypeError, ValueError):
        checked = ((-1, 0),)
    for age, every in checked:
        if age < 0 or every < 1:
            raise ArgumentError(
                f"RunWriter: expected thin=((age_steps, keep_every), ...) with age_steps >= 0 and keep_every >= 1; got "
                f"thin={thin!r}. thin=((100_000, 100),) keeps every 100th step of what is older than 100,000 steps."
            )
    return checked


def kept(steps: NDArray[np.int64], thin: Rules, last_step: int) -> NDArray[np.bool_]:
    """Return which steps stay."""
    result = np.ones(len(steps), dtype=bool)
    for age, every in thin:
        result &= (steps >= last_step - age) | (steps % every == 0)
    return result


def due(parts: Sequence[Part], thin: Rules) -> Sequence[Part]:
    """Return the oldest part of spectra that a rule still has to be applied to."""
    if not thin or not parts or parts[0].kind != "spectra":
        return ()
    last_step = max(part.max_step for part in parts)
    for part in parts:
        if _applied(part, thin, last_step) > part.generation:
            return [part]
    return ()


def generation(parts: Sequence[Part], thin: Rules, all_parts: Sequence[Part]) -> int:
    """Return the generation of a part merged from `parts`."""
    if parts[0].kind != "spectra" or not thin:
        return max(part.generation for part in parts)
    last_step = max(part.max_step for part in all_parts)
    applied = min(_applied(part, thin, last_step) for part in parts)
    # One part rewritten keeps its range, so its generation must grow for it to cover what it replaces.
    return max(applied, parts[0].generation + 1) if len(parts) == 1 else applied


def _applied(part: Part, thin: Rules, last_step: int) -> int:
    """Return how many rules apply to all of a part."""
    return sum(part.max_step < last_step - age for age, _ in thin)
