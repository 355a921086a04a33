"""Rules of activations, normalisations, dropout, softmax and attention."""

from typing import cast

from torch import fx

from plimsoll.unit._changes import Factor, Port
from plimsoll.unit._graph import base_name, shape_of
from plimsoll.unit._ideal import Ideal, Rule, Site, rows_of
from plimsoll.unit._nonlinear import nonlinear


def _activation(site: Site) -> Ideal:
    name = base_name(site.node)
    if name == "gelu" and site.argument(1, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    ideal = nonlinear(name)
    gradients: dict[Port, Factor] = dict.fromkeys(site.ports, Factor(value=ideal.inputs[0]))
    return Ideal(operation=base_name(site.node), why="by integration under the normal density", output=Factor(value=ideal.output), gradients=gradients)  # fmt: skip


def _norm(site: Site) -> Ideal:
    x = cast("fx.Node", site.node.args[0])
    name = base_name(site.node)
    shape = shape_of(x)
    position = {"layer_norm": 2, "rms_norm": 2, "group_norm": 2, "batch_norm": 1, "instance_norm": 1}[name]
    if name in ("layer_norm", "rms_norm"):
        kept = len(cast("list[int]", site.node.args[1]))
        dims = tuple(range(len(shape) - kept))
    else:
        dims = (0, *range(2, len(shape)))
    gradients: dict[Port, Factor] = {}
    for place, keyword in ((position, "weight"), (position + 1, "bias")):
        port = site.port(place, keyword)
        if port is not None:
            gradients[port] = rows_of(x, dims, -0.5)
    return Ideal(operation=name, why="at unit scale itself; parameters rows^-1/2", gradients=gradients, rigid=True)


def _neutral(site: Site) -> Ideal:
    return Ideal(operation=base_name(site.node), why="keeps the scale", rigid=True)


POINTWISE: dict[str, Rule] = {
    **dict.fromkeys(("gelu", "relu", "silu", "tanh", "sigmoid"), _activation),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"), _norm),
    **dict.fromkeys(("dropout", "feature_dropout", "masked_fill"), _neutral),
}
