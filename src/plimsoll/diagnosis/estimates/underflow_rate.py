"""The underflow rate: one definition for every printed share of gradients.

It is the share of values that became zero in a format narrower than FP32, of all its values that would not be zero. The
values are those of all tensors of the collection in a step range, taken together. A shadow step counts them. At other
steps the rate is estimated by the tail of the remaining values (`format_losses`). Tensors in FP32 or BF16 do not count.
"""

from dataclasses import dataclass

import numpy as np

from plimsoll.diagnosis.finding import value_words
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.view import View
from plimsoll.text import percent, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderflowRate:
    """A share of a collection's values from one sampled step to another."""

    collection: str
    share: float
    first_step: int
    last_step: int

    @property
    def words(self) -> str:
        """Return the share with what it is of: "58 % of parameter gradient values"."""
        return f"{percent(self.share)} of {value_words(self.collection)}"

    @property
    def words_with_steps(self) -> str:
        """Return the same with the sampled steps that it is of."""
        return f"{self.words} at {steps(self.first_step, self.last_step)}"


def underflow_rate(
    view: View, collection: str, since_step: int | None = None, until_step: int | None = None
) -> UnderflowRate | None:
    """Return the underflow rate over the samples of these steps, both ends included.

    None where the collection was not recorded then, or never in a format that can lose values.
    """
    at, lost, represented = _counted(view, collection)
    chosen = np.ones(len(at), dtype=bool)
    chosen &= at >= (at[:1].sum() if since_step is None else since_step)
    chosen &= at <= (at[-1:].sum() if until_step is None else until_step)
    if not chosen.any():
        return None
    flushed, would_be = float(lost[chosen].sum()), float((lost + represented)[chosen].sum())
    inside = at[chosen]
    return UnderflowRate(
        collection=collection, share=flushed / would_be if would_be else 0.0, first_step=int(inside[0]),
        last_step=int(inside[-1]),
    )  # fmt: skip


def underflow_by_step(view: View, collection: str) -> tuple[Ints, Floats]:
    """Return the sampled steps, and the underflow rate at each."""
    at, lost, represented = _counted(view, collection)
    return at, lost / np.maximum(lost + represented, 1.0)


def _counted(view: View, collection: str) -> tuple[Ints, Floats, Floats]:
    """Return the steps, and numbers of values lost and kept in narrow formats."""
    narrow = view.narrow(collection)
    if narrow is None or not narrow.censors.any():
        return np.empty(0, dtype=np.int64), np.empty(0), np.empty(0)
    cells = narrow.cells
    counts = cells.total(narrow.censors.astype(np.int64)) > 0  # by layer and step
    lost = np.where(counts, np.nan_to_num(narrow.lost_of_cell), 0.0).sum(axis=0)
    represented = np.where(counts, np.nan_to_num(cells.total(np.where(narrow.censors, cells.nonzero, 0))), 0.0).sum(
        axis=0
    )
    return cells.steps, lost, represented
