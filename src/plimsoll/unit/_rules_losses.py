"""Rules of losses: their values stay, and their gradients begin at unit scale."""

from typing import cast

from torch import fx

from plimsoll.unit import _formulas
from plimsoll.unit._changes import Factor
from plimsoll.unit._graph import shape_of
from plimsoll.unit._ideal import Ideal, Rule, Site, rows_of

MEAN = 1  # torch's number of the reduction


def _cross_entropy(site: Site) -> Ideal:
    logits = cast("fx.Node", site.node.args[0])
    shape = shape_of(logits)
    axis = 1 if len(shape) > 1 else 0
    own = Factor(value=_formulas.cross_entropy(shape[axis]))
    mean = site.argument(3, "reduction", MEAN) == MEAN
    incoming = rows_of(logits, [dim for dim in range(len(shape)) if dim != axis], 1.0) if mean else Factor()
    return Ideal(operation="cross_entropy", why="rows and s / sqrt(s - 1) backward", gradients={0: own}, incoming=incoming, rigid=True)  # fmt: skip


LOSSES: dict[str, Rule] = {"cross_entropy_loss": _cross_entropy}
