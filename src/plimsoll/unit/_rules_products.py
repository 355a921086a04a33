"""Rules of products: with weights, between activations, convolutions, look-ups."""

import math
from typing import Any, cast

from torch import fx

from plimsoll.unit import _formulas
from plimsoll.unit._changes import Factor, Port
from plimsoll.unit._graph import operation_of, shape_of
from plimsoll.unit._ideal import Ideal, Rule, Site, rows_of


def _linear(site: Site) -> Ideal:
    x, weight = cast("fx.Node", site.node.args[0]), cast("fx.Node", site.argument(1, "weight"))
    shape = shape_of(weight)
    fan_out, fan_in = shape if len(shape) == 2 else (1, shape[0])
    ideal = _formulas.linear(fan_in, fan_out)
    rows = rows_of(x, range(len(shape_of(x)) - 1), -0.5)
    gradients: dict[Port, Factor] = {0: Factor(value=ideal.inputs[0])}
    for position, name in ((1, "weight"), (2, "bias")):
        port = site.port(position, name)
        if port is not None:
            gradients[port] = rows
    return Ideal(operation="linear", why="fan_in^-1/2, fan_out^-1/2, rows^-1/2", output=Factor(value=ideal.output), gradients=gradients)  # fmt: skip


def _matmul(site: Site) -> Ideal:
    left, right = cast("fx.Node", site.node.args[0]), cast("fx.Node", site.node.args[1])
    inner = shape_of(left)[-1]
    sizes = math.prod(shape_of(left)), math.prod(shape_of(right)), math.prod(shape_of(site.node))
    ideal = _formulas.matmul(inner, *sizes)
    gradients: dict[Port, Factor] = {port: Factor(value=ideal.inputs[cast("int", port)]) for port in site.ports}
    if 1 in gradients and len(shape_of(right)) <= 2 and len(shape_of(left)) > 1:
        gradients[1] = rows_of(left, range(len(shape_of(left)) - 1), -0.5)
    return Ideal(operation="matmul", why="inner^-1/2, and of each gradient what it sums over", output=Factor(value=ideal.output), gradients=gradients)  # fmt: skip


def _convolution(site: Site) -> Ideal:
    x, weight = cast("fx.Node", site.node.args[0]), cast("fx.Node", site.argument(1, "weight"))
    out_channels, in_group, *kernel = shape_of(weight)
    dims = len(kernel)
    stride = _spread(site.argument(3, "stride", 1), dims)
    groups = cast("int", site.argument(6, "groups", 1))
    area = math.prod(kernel)
    ideal = _formulas.convolution(in_group * area, out_channels // groups * area, math.prod(stride))
    # Weights sum over the batch and the places of the output, which are those of the input by stride.
    rows = rows_of(x, (0, *range(2, 2 + dims)), -0.5, math.prod(stride) ** 0.5)
    gradients: dict[Port, Factor] = {0: Factor(value=ideal.inputs[0])}
    for position, name in ((1, "weight"), (2, "bias")):
        port = site.port(position, name)
        if port is not None:
            gradients[port] = rows
    return Ideal(operation=operation_of(site.node), why="fan_in^-1/2, (fan_out / stride)^-1/2, places^-1/2", output=Factor(value=ideal.output), gradients=gradients)  # fmt: skip


def _spread(given: Any, dims: int) -> tuple[int, ...]:
    numbers = tuple(given) if isinstance(given, list | tuple) else (given,)
    return numbers * dims if len(numbers) == 1 else numbers


def _embedding(site: Site) -> Ideal:
    indices = cast("fx.Node", site.argument(1, "indices"))
    vocabulary = shape_of(cast("fx.Node", site.node.args[0]))[0]
    table = rows_of(indices, range(len(shape_of(indices))), -0.5, vocabulary**0.5)
    return Ideal(operation="embedding", why="(vocabulary / tokens)^1/2", gradients={0: table}, rigid=True)


PRODUCTS: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "embedding": _embedding,
}
