"""Rules of additions, products by value, means and sums over dimensions.

`analysis.residuals` finds the residual additions. Another addition of n terms weighs each by n^-1/2.
"""

import math
from typing import cast

from torch import fx

from plimsoll.unit.capture.gradient_graph import shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.rules.operation import Ideal, Rule, Site, following, parameter_behind, skipped, times


def broadcast(site: Site, source: fx.Node) -> Factor:
    """Return the factor of a gradient that sums over broadcast dimensions."""
    shape, own = shape_of(site.node), shape_of(source)
    padded = (1,) * (len(shape) - len(own)) + own
    dims = [dim for dim, (whole, size) in enumerate(zip(shape, padded, strict=True)) if size == 1 and whole != 1]
    others = [node for node in site.node.all_input_nodes if shape_of(node) == shape]
    if not dims or not others:
        return Factor(value=math.prod(shape[dim] for dim in dims) ** -0.5)
    return following(others[0], dims, -0.5)


def is_bias(site: Site, port: Port) -> bool:
    """Return whether a port gets a bias: a parameter of at most one dimension."""
    source = site.ports[port]
    # A bias starts at zero, so it does not count as a term.
    return parameter_behind(source, site.flow) is not None and sum(size != 1 for size in shape_of(source)) <= 1


def _addition(site: Site) -> Ideal:
    gradients = {port: broadcast(site, source) for port, source in site.ports.items()}
    terms = [port for port in site.ports if not is_bias(site, port)]
    alpha = site.argument(2, "alpha", 1)
    weights: dict[Port, float] = {}
    if len(terms) == 2 and shape_of(site.node) and alpha == 1:
        counts = [_terms(site.ports[port], site) for port in terms]
        weights = {port: (count / sum(counts)) ** 0.5 for port, count in zip(terms, counts, strict=True)}
    mean = sum(weights.get(port, 1.0) * site.mean(site.ports[port]) for port in terms)
    why = "n^-1/2 for n terms"
    return Ideal(why=why, gradients=gradients, weights=weights, mean=mean, rigid=True)


def _terms(node: fx.Node, site: Site) -> int:
    """Return the number of terms of an operand, in additions that it alone uses."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "add.Tensor" or len(node.users) > 1:
        return 1
    own = [term for term in node.all_input_nodes if term.name in site.flow.nodes]
    own = [term for term in own if parameter_behind(term, site.flow) is None or sum(s != 1 for s in shape_of(term)) > 1]
    return sum(_terms(term, site) for term in own) if shape_of(node) else 1


def _multiplication(site: Site) -> Ideal:
    other = site.argument(1, "other")
    if isinstance(other, (int, float)):
        if not shape_of(site.node) or other == 0:
            return Ideal(why="a loss's weight, kept", rigid=True)
        factor = Factor(value=1 / abs(other) if site.operation == "mul" else abs(other))
        mean = math.copysign(1.0, other) * site.mean(site.node.args[0])
        why, gradients = "a constant, undone", dict.fromkeys(site.ports, factor)
        return Ideal(why=why, output=factor, gradients=gradients, mean=mean)
    if site.operation == "div" and 1 in site.ports:
        return skipped("a quotient of two tensors that both depend on parameters")
    return _gate(site)


def _gate(site: Site) -> Ideal:
    """Return the factors of a product by value, at the second moments."""
    moments = {port: site.moment(source) for port, source in site.ports.items() if not is_bias(site, port)}
    whole = math.prod(moments.values())
    gradients = {
        port: times(broadcast(site, source), moments.get(port, 1.0) / whole) for port, source in site.ports.items()
    }
    mean = math.prod(site.mean(site.ports[port]) for port in moments)
    if len(moments) < 2:  # by a gain, which starts at one, or by a tensor without gradient
        why = "a gain"
        return Ideal(why=why, gradients=gradients, mean=mean if moments else 0.0, rigid=True)
    why, output = "a product at unit second moments", Factor(value=1 / whole)
    rigid = whole == 1.0
    return Ideal(why=why, output=output, gradients=gradients, mean=mean / whole, rigid=rigid)


def _reduction(site: Site) -> Ideal:
    """Return the factors of a mean or a sum. To a single number it is a loss's."""
    source = cast("fx.Node", site.node.args[0])
    shape = shape_of(source)
    is_mean = site.operation in ("mean", "avg_pool1d", "avg_pool2d", "avg_pool3d") or "adaptive" in site.operation
    if not shape_of(site.node):
        incoming = following(source, range(len(shape)), 1.0) if is_mean and shape else Factor()
        why = "a loss, kept; its gradient that of a sum"
        return Ideal(why=why, incoming=incoming, rigid=True)
    n = max(math.prod(shape) / max(math.prod(shape_of(site.node)), 1), 1.0)
    # The terms' squared mean stays, and their variance is divided by n.
    off_centre = site.moment(source) ** 2 - 1
    scale = (off_centre + 1 / n) ** 0.5 * (1 if is_mean else n)
    back = n if is_mean else 1.0
    why, output = "n^1/2 for a mean of n, n^-1/2 for a sum", Factor(value=1 / scale)
    return Ideal(why=why, output=output, gradients={0: Factor(value=back)})


def _expansion(site: Site) -> Ideal:
    source = cast("fx.Node", site.node.args[0])
    n = max(math.prod(shape_of(site.node)) / max(math.prod(shape_of(source)), 1), 1.0)
    gradients: dict[Port, Factor] = {0: Factor(value=n**-0.5)} if 0 in site.ports else {}
    why = "n^-1/2 for n copies"
    return Ideal(why=why, gradients=gradients, mean=site.mean(source), rigid=True)


_REDUCTIONS = tuple(
    """
    mean sum avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    """.split()
)
_EXPANSIONS = tuple(
    """
    expand expand_as repeat repeat_interleave broadcast_to upsample_nearest1d upsample_nearest2d upsample_nearest3d
    tile
    """.split()
)

SUMS: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), _addition),
    **dict.fromkeys(("mul", "div", "true_divide"), _multiplication),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_EXPANSIONS, _expansion),
}
