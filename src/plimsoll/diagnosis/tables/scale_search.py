"""Search for a loss scale at a training's start: skipped steps are no fault.

A scaler starts high on purpose (GradScaler at 2^16) and halves the scale at each overflow until the gradients fit.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from plimsoll.diagnosis.view import View

_CLEAN = 10  # steps without a skip, after which the search has ended


def searching(view: View, first: int) -> set[int]:
    """Return the steps that the search for a scale skipped, from step `first` on."""
    skips = sorted(event.step for event in view.events if event.kind == "skip")
    skipped = _chain(skips, first)
    # The search ends with ten clean steps. A run that never has so many, or whose scale did not fall, did not search:
    # its scale is too high. It has no such steps.
    if not skipped or view.last_step - skipped[-1] < _CLEAN:
        return set()
    before, after = view.scale_at(np.array([skipped[0], skipped[-1] + _CLEAN])).tolist()
    return set(skipped) if after < before else set()


def sentences(searches: tuple[set[int], set[int]]) -> Iterator[str]:
    """Return a sentence for each run that skipped steps which the other one took.

    >>> print(*sentences(({0}, {0, 1, 2})))
    B skipped 2 steps that A took (1 to 2) while its scaler searched for a loss scale: these are not compared.
    """
    for which, other, alone in (("A", "B", searches[0] - searches[1]), ("B", "A", searches[1] - searches[0])):
        if alone:
            steps = f"{len(alone)} step{'s' * (len(alone) > 1)}"
            span = f"{min(alone):,} to {max(alone):,}" if len(alone) > 1 else f"step {min(alone):,}"
            yield (
                f"{which} skipped {steps} that {other} took ({span}) while its scaler searched for a loss scale: "
                "these are not compared."
            )


def _chain(skips: Iterable[int], first: int) -> list[int]:
    """Return the skips up to the first range of clean steps.

    >>> _chain([0, 1, 4, 30], 0)
    [0, 1, 4]
    >>> _chain([10], 0)
    []
    """
    chain, clean_since = list[int](), first
    for step in skips:
        if step - clean_since >= _CLEAN:
            break
        chain.append(step)
        clean_since = step + 1
    return chain
