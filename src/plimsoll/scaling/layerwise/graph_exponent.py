"""The exponent of a tensor that bears no mark, read from the autograd graph behind it.

Marks are a cache; the graph is the truth. Between two `Shift` nodes every gradient carries the same power of two, so
what lies behind a tensor, up to the nearest ones, must agree: else gradients of different scales are added up somewhere
that could not be seen, and the result would be wrong.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from plimsoll.scaling.layerwise.edge_marks import OUTSIDE, Edge, edge_of


def behind(x: Tensor) -> dict[int, int]:
    """The exponents found behind a tensor, each with a unit that has it; 0 for a leaf without a `Shift` between."""
    found: dict[int, int] = {}
    for edge in _nearest(x.grad_fn):
        found.setdefault(edge.exponent if edge else 0, edge.unit if edge else OUTSIDE)
    return found


def _nearest(start: Any) -> Iterator[Edge | None]:
    """The nearest edges behind a node; None for each leaf that is reached without one."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        edge = edge_of(node)
        if edge is not None or hasattr(node, "variable"):
            yield edge
            continue
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
