"""Rules of products: with weights, between activations, convolutions, look-ups."""

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import fx

from plimsoll.unit.capture.gradient_graph import shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.factors import formulas
from plimsoll.unit.rules.contraction import Contraction, of_einsum, of_linear, of_matmul
from plimsoll.unit.rules.measured import left
from plimsoll.unit.rules.operation import Ideal, Rule, Site, following, times


def _node(argument: object) -> fx.Node:
    return cast("fx.Node", argument)


def _product(site: Site, found: Contraction, ports: Sequence[Port], why: str) -> Ideal:
    """The factors of a contraction whose operands come in at `ports`, each against the others' second moments."""
    moments = [site.moment(node) for node, _ in found.operands]
    all_ = math.prod(moments)
    gradients = {
        port: times(found.backward(operand), moments[operand] / all_)
        for operand, port in enumerate(ports) if port in site.ports
    }  # fmt: skip
    return Ideal(operation=site.operation, why=why, output=times(found.forward, 1 / all_), gradients=gradients)


def _with_bias(ideal: Ideal, port: Port | None, rows: Factor) -> Ideal:
    if port is not None:
        ideal.gradients[port] = rows
    return ideal


def _linear(site: Site) -> Ideal:
    x = _node(site.node.args[0])
    found = of_linear(x, _node(site.argument(1, "weight")))
    ports: list[Port] = [0, 1 if len(site.node.args) > 1 else "weight"]
    ideal = _product(site, found, ports, "fan_in^-1/2; fan_out^-1/2, rows^-1/2")
    rows = following(x, range(len(shape_of(x)) - 1), -0.5)
    return _with_bias(ideal, site.port(2, "bias"), rows)


def _matmul(site: Site) -> Ideal:
    found = of_matmul(_node(site.node.args[0]), _node(site.node.args[1]))
    return _product(site, found, (0, 1), "n^-1/2 of what each sums over")


def _addmm(site: Site) -> Ideal:
    """A product and a bias, in one."""
    x, other = _node(site.node.args[1]), _node(site.node.args[2])
    ideal = _product(site, of_matmul(x, other), (1, 2), "n^-1/2 of what each sums over")
    bias = _node(site.node.args[0])
    if 0 not in site.ports:
        return ideal
    if len(shape_of(bias)) > 1 or not site.is_parameter(0):
        return left(site, "the term that is added to the product is no bias")
    return _with_bias(ideal, 0, following(x, range(len(shape_of(x)) - 1), -0.5))


def _einsum(site: Site) -> Ideal:
    equation, operands = cast("tuple[str, list[fx.Node]]", site.node.args[:2])
    found = of_einsum(equation, operands)
    if found is None:
        return left(site, "a letter stands twice in one operand")
    return _product(site, found, [(1, member) for member in range(len(operands))], "n^-1/2 of what each sums over")


def _convolution(site: Site) -> Ideal:
    x, weight = _node(site.node.args[0]), _node(site.argument(1, "weight"))
    transposed = "transpose" in site.operation
    first, second, *kernel = shape_of(weight)
    groups = cast("int", site.argument(6, "groups", 1))
    outer, inner = (second, first // groups) if transposed else (first // groups, second)
    area, step = math.prod(kernel), math.prod(_spread(site.argument(3, "stride", 1), len(kernel)))
    ideal = formulas.convolution(inner * area, outer * area, step)
    places = following(x, (0, *range(2, len(shape_of(x)))), -0.5, 1.0 if transposed else step**0.5)
    if transposed:  # a stride leaves gaps between the inputs: fewer meet in one output
        ideal = formulas.Factors(output=formulas.root(inner * area / step), inputs=(formulas.root(outer * area),))
    moment = site.moment(x)
    gradients: dict[Port, Factor] = {0: Factor(value=ideal.inputs[0])} if 0 in site.ports else {}
    own = site.port(1, "weight")
    if own is not None:
        gradients[own] = times(places, 1 / moment)
    why = "fan_in^-1/2; fan_out^-1/2, places^-1/2"
    output = Factor(value=ideal.output / moment)
    made = Ideal(operation=site.operation, why=why, output=output, gradients=gradients)
    outputs = times(places, step**-0.5) if transposed else places
    return _with_bias(made, site.port(2, "bias"), outputs)


def _spread(given: Any, dims: int) -> tuple[int, ...]:
    numbers: tuple[int, ...] = tuple(cast("list[int]", given)) if isinstance(given, (list, tuple)) else (given,)
    return numbers * dims if len(numbers) == 1 else numbers


def _embedding(site: Site) -> Ideal:
    if 0 not in site.ports:
        return left(site, "the table carries no gradient")
    indices = _node(site.argument(1, "indices"))
    vocabulary = shape_of(site.ports[0])[0]
    table = following(indices, range(len(shape_of(indices))), -0.5, vocabulary**0.5)
    return Ideal(operation="embedding", why="(vocabulary / tokens)^1/2", gradients={0: table}, rigid=True)


PRODUCTS: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    "addmm": _addmm,
    "einsum": _einsum,
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolution
    ),
    "embedding": _embedding,
}
