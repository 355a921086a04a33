"""Rules of additions, of products with numbers and between tensors, of means and sums over dimensions.

Which additions are residual ones is found by `analysis.residuals`; here an addition of n terms weighs each n^-1/2.
"""

import math
from typing import cast

from torch import fx

from plimsoll.unit.capture.gradient_graph import shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.rules.operation import Ideal, Rule, Site, following, parameter_behind, skipped, times


def broadcast(site: Site, source: fx.Node) -> Factor:
    """The factor of a gradient that sums over what an operand is broadcast along."""
    shape, own = shape_of(site.node), shape_of(source)
    padded = (1,) * (len(shape) - len(own)) + own
    dims = [dim for dim, (whole, one) in enumerate(zip(shape, padded, strict=True)) if one == 1 and whole != 1]
    others = [one for one in site.node.all_input_nodes if shape_of(one) == shape]
    if not dims or not others:
        return Factor(value=math.prod(shape[dim] for dim in dims) ** -0.5)
    return following(others[0], dims, -0.5)


def is_bias(site: Site, port: Port) -> bool:
    """Whether a parameter of at most one dimension comes in at a port: it starts at zero and is no term."""
    source = site.ports[port]
    return parameter_behind(source, site.flow) is not None and sum(size != 1 for size in shape_of(source)) <= 1


def _addition(site: Site) -> Ideal:
    name = site.operation
    gradients = {port: broadcast(site, source) for port, source in site.ports.items()}
    terms = [port for port in site.ports if not is_bias(site, port)]
    alpha = site.argument(2, "alpha", 1)
    weights: dict[Port, float] = {}
    if len(terms) == 2 and shape_of(site.node) and alpha == 1:
        counts = [_terms(site.ports[port], site) for port in terms]
        weights = {port: (count / sum(counts)) ** 0.5 for port, count in zip(terms, counts, strict=True)}
    mean = sum(weights.get(port, 1.0) * site.mean(site.ports[port]) for port in terms)
    why = "n^-1/2 for n terms"
    return Ideal(operation=name, why=why, gradients=gradients, weights=weights, mean=mean, rigid=True)


def _terms(node: fx.Node, site: Site) -> int:
    """How many terms an operand is the sum of: those of additions that nothing else uses."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "add.Tensor" or len(node.users) > 1:
        return 1
    own = [one for one in node.all_input_nodes if one.name in site.flow.nodes]
    own = [one for one in own if parameter_behind(one, site.flow) is None or sum(s != 1 for s in shape_of(one)) > 1]
    return sum(_terms(one, site) for one in own) if shape_of(node) else 1


def _multiplication(site: Site) -> Ideal:
    other = site.argument(1, "other")
    if isinstance(other, (int, float)):
        if not shape_of(site.node) or other == 0:
            return Ideal(operation=site.operation, why="a loss's weight, kept", rigid=True)
        factor = Factor(value=1 / abs(other) if site.operation == "mul" else abs(other))
        mean = math.copysign(1.0, other) * site.mean(site.node.args[0])
        why, gradients = "a constant, undone", dict.fromkeys(site.ports, factor)
        return Ideal(operation=site.operation, why=why, output=factor, gradients=gradients, mean=mean)
    if site.operation == "div" and 1 in site.ports:
        return skipped(site, "a quotient of two tensors that both depend on parameters")
    return _gate(site)


def _gate(site: Site) -> Ideal:
    """A product of tensors value by value: each at its own second moment."""
    moments = {port: site.moment(source) for port, source in site.ports.items() if not is_bias(site, port)}
    whole = math.prod(moments.values())
    gradients = {
        port: times(broadcast(site, source), moments.get(port, 1.0) / whole) for port, source in site.ports.items()
    }
    mean = math.prod(site.mean(site.ports[port]) for port in moments)
    if len(moments) < 2:  # by a gain, which starts at one, or by what carries no gradient
        why = "a gain"
        return Ideal(operation=site.operation, why=why, gradients=gradients, mean=mean if moments else 0.0, rigid=True)
    why, output = "a product at unit second moments", Factor(value=1 / whole)
    rigid = whole == 1.0
    return Ideal(operation=site.operation, why=why, output=output, gradients=gradients, mean=mean / whole, rigid=rigid)


def _reduction(site: Site) -> Ideal:
    """A mean or a sum; to a single number, it is a loss's."""
    source = cast("fx.Node", site.node.args[0])
    shape = shape_of(source)
    is_mean = site.operation in ("mean", "avg_pool1d", "avg_pool2d", "avg_pool3d") or "adaptive" in site.operation
    if not shape_of(site.node):
        incoming = following(source, range(len(shape)), 1.0) if is_mean and shape else Factor()
        why = "a loss, kept; its gradient that of a sum"
        return Ideal(operation=site.operation, why=why, incoming=incoming, rigid=True)
    n = max(math.prod(shape) / max(math.prod(shape_of(site.node)), 1), 1.0)
    # The squared mean of what is summed stays; its variance is divided by n.
    off_centre = site.moment(source) ** 2 - 1
    scale = (off_centre + 1 / n) ** 0.5 * (1 if is_mean else n)
    back = n if is_mean else 1.0
    why, output = "n^1/2 for a mean of n, n^-1/2 for a sum", Factor(value=1 / scale)
    return Ideal(operation=site.operation, why=why, output=output, gradients={0: Factor(value=back)})


def _expansion(site: Site) -> Ideal:
    source = cast("fx.Node", site.node.args[0])
    n = max(math.prod(shape_of(site.node)) / max(math.prod(shape_of(source)), 1), 1.0)
    gradients: dict[Port, Factor] = {0: Factor(value=n**-0.5)} if 0 in site.ports else {}
    why = "n^-1/2 for n copies"
    return Ideal(operation=site.operation, why=why, gradients=gradients, mean=site.mean(source), rigid=True)


_REDUCTIONS = (
    "mean", "sum", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
)  # fmt: skip
_EXPANSIONS = (
    "expand", "expand_as", "repeat", "repeat_interleave", "broadcast_to", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "tile",
)  # fmt: skip

SUMS: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "rsub"), _addition),
    **dict.fromkeys(("mul", "div", "true_divide"), _multiplication),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_EXPANSIONS, _expansion),
}
