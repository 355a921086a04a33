"""Rules of additions and of products with numbers. Which additions are residual ones is found by `_residuals`."""

import math

from torch import fx

from plimsoll.unit._changes import Factor, Port
from plimsoll.unit._graph import base_name, shape_of
from plimsoll.unit._ideal import Ideal, Rule, Site, rows_of


def _broadcast(site: Site, source: fx.Node) -> Factor:
    """The factor of a gradient that sums over what an operand was broadcast to."""
    shape, own = shape_of(site.node), shape_of(source)
    padded = (1,) * (len(shape) - len(own)) + own
    dims = [dim for dim, (all_, one) in enumerate(zip(shape, padded, strict=True)) if one == 1 and all_ != 1]
    other = next((one for one in site.ports.values() if shape_of(one) == shape), None)
    if other is None or not dims:
        return Factor(value=math.prod(shape[dim] for dim in dims) ** -0.5)
    return rows_of(other, dims, -0.5)


def _is_bias(source: fx.Node) -> bool:
    return source.op == "placeholder" and len([size for size in shape_of(source) if size != 1]) <= 1


def _addition(site: Site) -> Ideal:
    name = base_name(site.node)
    gradients = {port: _broadcast(site, source) for port, source in site.ports.items()}
    terms = [port for port, source in site.ports.items() if not (site.is_parameter(port) and _is_bias(source))]
    weights: dict[Port, float] = {}
    if len(terms) == 2 and shape_of(site.node):
        weights = dict.fromkeys(terms, 0.5**0.5)
    return Ideal(operation=name, why="n^-1/2 for n terms", gradients=gradients, weights=weights, rigid=True)


def _multiplication(site: Site) -> Ideal:
    name = base_name(site.node)
    other = site.argument(1, "other")
    if isinstance(other, int | float) and shape_of(site.node):
        factor = Factor(value=1 / abs(other) if name == "mul" else abs(other))
        return Ideal(operation=name, why="a constant, undone", output=factor, gradients=dict.fromkeys(site.ports, factor))  # fmt: skip
    gradients = {port: _broadcast(site, source) for port, source in site.ports.items()}
    return Ideal(operation=name, why="a product of two tensors at unit scale", gradients=gradients, rigid=True)


SUMS: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), _addition),
    **dict.fromkeys(("mul", "div"), _multiplication),
}
