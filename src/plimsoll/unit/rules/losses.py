"""Rules of losses: their values stay, and their gradients start at unit scale."""

from typing import cast

from torch import fx

from plimsoll.unit.capture.gradient_graph import shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.factors import formulas
from plimsoll.unit.rules.operation import Ideal, Rule, Site, following

_MEAN = 1  # torch's number of the reduction, as ATen takes it


# A mean over n values divides every gradient by n. So the incoming gradient is multiplied by n first, and is never
# small. The rest of the loss's scale multiplies the gradient of its input.
def _loss(site: Site, own: float, dims: list[int], place: int) -> Ideal:
    x = cast("fx.Node", site.node.args[0])
    mean = site.argument(place, "reduction", _MEAN) == _MEAN
    incoming = following(x, dims, 1.0) if mean else Factor()
    gradients: dict[Port, Factor] = dict.fromkeys(site.ports, Factor(value=own))
    why = "its value kept; n backward, and its own scale"
    return Ideal(why=why, gradients=gradients, incoming=incoming, rigid=True)


def _classes(site: Site) -> tuple[int, list[int]]:
    shape = shape_of(cast("fx.Node", site.node.args[0]))
    axis = 1 if len(shape) > 1 else 0
    return shape[axis], [dim for dim in range(len(shape)) if dim != axis]


def _cross_entropy(site: Site) -> Ideal:
    classes, rows = _classes(site)
    return _loss(site, formulas.cross_entropy(classes), rows, 3)


def _nll(site: Site) -> Ideal:
    """Return the factors of a likelihood, with one gradient of -1 in a row."""
    classes, rows = _classes(site)
    return _loss(site, formulas.nll(classes), rows, 3)


def _elementwise(site: Site) -> Ideal:
    place, own = _ELEMENTWISE[site.operation]
    shape = shape_of(cast("fx.Node", site.node.args[0]))
    return _loss(site, own, list(range(len(shape))), place)


# Position of the reduction, and 1 / the scale of the gradient: (x - y) has variance 2.
_ELEMENTWISE: dict[str, tuple[int, float]] = {
    "mse_loss": (2, formulas.MSE),
    "l1_loss": (2, 1.0),
    "binary_cross_entropy_with_logits": (4, formulas.BINARY),
    "smooth_l1_loss": (2, 1.0),
    "huber_loss": (2, 1.0),
}

LOSSES: dict[str, Rule] = {
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(("nll_loss", "nll_loss_nd", "nll_loss2d"), _nll),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
}
