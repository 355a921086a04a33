"""Rules of activations, normalizations, and operations that keep a scale."""

from typing import cast

from torch import fx

from plimsoll.unit.capture.gradient_graph import shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.factors.nonlinear import off_centre
from plimsoll.unit.rules.operation import VIEWS, Ideal, Rule, Site, following


def _activation(site: Site) -> Ideal:
    name = site.operation
    if name == "gelu" and site.argument(1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    ideal, mean = off_centre(name, site.mean(site.node.args[0]))
    gradients: dict[Port, Factor] = dict.fromkeys(site.ports, Factor(value=ideal.inputs[0]))
    why = "by integration under the normal density"
    return Ideal(why=why, output=Factor(value=ideal.output), gradients=gradients, mean=mean)


def _norm(site: Site) -> Ideal:
    """Return the factors of a norm. Its parameters' gradients are sums over rows."""
    x = cast("fx.Node", site.node.args[0])
    dims = len(shape_of(x))
    if site.operation in ("layer_norm", "rms_norm"):
        rows, position = tuple(range(dims - len(cast("list[int]", site.node.args[1])))), 2
    else:
        rows, position = (0, *range(2, dims)), 2 if site.operation == "group_norm" else 1
    gradients: dict[Port, Factor] = {}
    for place, keyword in ((position, "weight"), (position + 1, "bias")):
        port = site.port(place, keyword)
        if port is not None:
            gradients[port] = following(x, rows, -0.5)
    return Ideal(why="at unit scale itself; rows^-1/2", gradients=gradients, rigid=True)


def _keeping(site: Site) -> Ideal:
    means = [site.mean(source) for source in site.ports.values()]
    mean = sum(means) / len(means) * (-1 if site.operation == "neg" else 1)
    return Ideal(why="keeps the scale", mean=mean, rigid=True)


_KEEPING = tuple(
    """
    dropout feature_dropout alpha_dropout masked_fill where cat stack neg pad constant_pad_nd slice_scatter
    select_scatter reflection_pad2d replication_pad2d nan_to_num
    """.split()
)

POINTWISE: dict[str, Rule] = {
    **dict.fromkeys(("gelu", "relu", "silu", "tanh", "sigmoid"), _activation),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"), _norm),
    **dict.fromkeys(VIEWS, _keeping),
    **dict.fromkeys(_KEEPING, _keeping),
}
