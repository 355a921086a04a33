"""Rules of products: with weights, between activations, convolutions, look-ups.

Products are sums over named dimensions, with one formula for linear, matmul, bmm, addmm and einsum.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from plimsoll.unit.capture.gradient_graph import is_open, shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import root
from plimsoll.unit.rules.operation import Ideal, Rule, Site, following, skipped, times

Place = tuple[fx.Node, int]
_BY_TERMS = "n^-1/2 for the n terms of each sum"


@dataclass(frozen=True, slots=True)
class Contraction:
    """Operands with a letter for each of their dimensions, and the result's.

    A product sums over the dimensions that its result lacks: n^-1/2 for n terms. The gradient of an operand sums over
    the dimensions that the operand lacks and the other tensors have. An operand lacks the dimensions along which it is
    broadcast.
    """

    operands: tuple[tuple[fx.Node, str], ...]
    result: str

    @property
    def forward(self) -> Factor:
        """Factor of the result."""
        return self._summed(self._letters() - set(self.result))

    def backward(self, operand: int) -> Factor:
        """Return the factor of an operand's gradient."""
        return self._summed(self._letters() - self._of(operand))

    def _of(self, operand: int) -> set[str]:
        node, letters = self.operands[operand]
        return {letter for letter, size in zip(letters, shape_of(node), strict=True) if size != 1}

    def _letters(self) -> set[str]:
        return set[str]().union(*(self._of(operand) for operand in range(len(self.operands))))

    def _summed(self, letters: set[str]) -> Factor:
        """Return n^-1/2 over some letters.

        It follows the sizes at run time if one tensor has all open ones. Otherwise it is that of the example's sizes.
        """
        places = {letter: self._place(letter) for letter in letters}
        opened = {letter for letter, (node, dim) in places.items() if is_open(node, dim)}
        fixed = math.prod(shape_of(node)[dim] for letter, (node, dim) in places.items() if letter not in opened)
        for node, own in self.operands:
            if opened <= set(own):
                return following(node, [own.index(letter) for letter in sorted(opened)], -0.5, root(fixed))
        return Factor(
            value=root(fixed * math.prod(shape_of(places[letter][0])[places[letter][1]] for letter in opened))
        )

    def _place(self, letter: str) -> Place:
        all_places = [
            (node, letters.index(letter))
            for operand, (node, letters) in enumerate(self.operands)
            if letter in self._of(operand)
        ]
        return next((place for place in all_places if is_open(*place)), all_places[0])


def of_matmul(left: fx.Node, right: fx.Node) -> Contraction:
    """Return the contraction of ``left @ right``, for any dimensions."""
    rows, columns = len(shape_of(left)), len(shape_of(right))
    batch = string.ascii_lowercase[: max(rows, columns, 2) - 2]
    first = "K" if rows == 1 else batch[len(batch) - rows + 2 :] + "MK"
    second = "K" if columns == 1 else batch[len(batch) - columns + 2 :] + "KN"
    result = batch + ("M" if rows > 1 else "") + ("N" if columns > 1 else "")
    return Contraction(((left, first), (right, second)), result)


def of_linear(x: fx.Node, weight: fx.Node) -> Contraction:
    """Return the contraction of ``x @ weight.T``."""
    batch = string.ascii_lowercase[: len(shape_of(x)) - 1]
    return Contraction(((x, batch + "K"), (weight, "NK" if len(shape_of(weight)) == 2 else "K")), batch + "N")


def of_einsum(equation: str, operands: Sequence[fx.Node]) -> Contraction | None:
    """Return the contraction of an einsum, or None for a diagonal."""
    inputs, _, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    extra = max(len(shape_of(node)) - len(term.replace("...", "")) for node, term in zip(operands, terms, strict=True))
    dots = "".join(chr(0x3B1 + i) for i in range(extra))
    spelled = [
        term.replace("...", dots[len(dots) - (len(shape_of(node)) - len(term) + 3) :] if "..." in term else "")
        for node, term in zip(operands, terms, strict=True)
    ]
    if "->" not in equation:
        letters = "".join(terms).replace("...", "")
        result = ("..." if "..." in inputs else "") + "".join(
            sorted({letter for letter in letters if letters.count(letter) == 1})
        )
    if any(len(set(term)) != len(term) for term in spelled):
        return None
    return Contraction(tuple(zip(operands, spelled, strict=True)), result.replace("...", dots))


def _node(argument: object) -> fx.Node:
    return cast("fx.Node", argument)


def _product(site: Site, contraction: Contraction, ports: Sequence[Port], why: str) -> Ideal:
    """Return the factors of a contraction whose operands are at `ports`.

    Each is divided by the other operands' second moments.
    """
    moments = [site.moment(node) for node, _ in contraction.operands]
    product = math.prod(moments)
    gradients = {
        port: times(contraction.backward(operand), moments[operand] / product)
        for operand, port in enumerate(ports)
        if port in site.ports
    }
    return Ideal(why=why, output=times(contraction.forward, 1 / product), gradients=gradients)


def _with_bias(ideal: Ideal, port: Port | None, rows: Factor) -> Ideal:
    if port is not None:
        ideal.gradients[port] = rows
    return ideal


def _linear(site: Site) -> Ideal:
    x = _node(site.node.args[0])
    contraction = of_linear(x, _node(site.argument(1, "weight")))
    ports: list[Port] = [0, 1 if len(site.node.args) > 1 else "weight"]
    ideal = _product(site, contraction, ports, "fan_in^-1/2; fan_out^-1/2, rows^-1/2")
    rows = following(x, range(len(shape_of(x)) - 1), -0.5)
    return _with_bias(ideal, site.port(2, "bias"), rows)


def _matmul(site: Site) -> Ideal:
    contraction = of_matmul(_node(site.node.args[0]), _node(site.node.args[1]))
    return _product(site, contraction, (0, 1), _BY_TERMS)


def _addmm(site: Site) -> Ideal:
    x, other = _node(site.node.args[1]), _node(site.node.args[2])
    ideal = _product(site, of_matmul(x, other), (1, 2), _BY_TERMS)
    bias = _node(site.node.args[0])
    if 0 not in site.ports:
        return ideal
    if len(shape_of(bias)) > 1 or not site.is_parameter(0):
        return skipped("the term that is added to the product is no bias")
    return _with_bias(ideal, 0, following(x, range(len(shape_of(x)) - 1), -0.5))


def _einsum(site: Site) -> Ideal:
    equation, operands = cast("tuple[str, list[fx.Node]]", site.node.args[:2])
    contraction = of_einsum(equation, operands)
    if contraction is None:
        return skipped("an operand has a letter twice")
    return _product(site, contraction, [(1, member) for member in range(len(operands))], _BY_TERMS)


def _convolution(site: Site) -> Ideal:
    x, weight = _node(site.node.args[0]), _node(site.argument(1, "weight"))
    transposed = "transpose" in site.operation
    first, second, *kernel = shape_of(weight)
    groups = cast("int", site.argument(6, "groups", 1))
    outer, inner = (second, first // groups) if transposed else (first // groups, second)
    area, step = math.prod(kernel), math.prod(_spread(site.argument(3, "stride", 1), len(kernel)))
    ideal = formulas.convolution(inner * area, outer * area, step)
    places = following(x, (0, *range(2, len(shape_of(x)))), -0.5, 1.0 if transposed else step**0.5)
    if transposed:  # a stride leaves gaps between the inputs, so an output has fewer terms
        ideal = formulas.Factors(output=formulas.root(inner * area / step), inputs=(formulas.root(outer * area),))
    moment = site.moment(x)
    gradients: dict[Port, Factor] = {0: Factor(value=ideal.inputs[0])} if 0 in site.ports else {}
    own = site.port(1, "weight")
    if own is not None:
        gradients[own] = times(places, 1 / moment)
    why = "fan_in^-1/2; fan_out^-1/2, places^-1/2"
    output = Factor(value=ideal.output / moment)
    product = Ideal(why=why, output=output, gradients=gradients)
    outputs = times(places, step**-0.5) if transposed else places
    return _with_bias(product, site.port(2, "bias"), outputs)


def _spread(sizes: Any, dims: int) -> tuple[int, ...]:
    numbers: tuple[int, ...] = tuple(cast("list[int]", sizes)) if isinstance(sizes, (list, tuple)) else (sizes,)
    return numbers * dims if len(numbers) == 1 else numbers


def _embedding(site: Site) -> Ideal:
    if 0 not in site.ports:
        return skipped("the table carries no gradient")
    indices = _node(site.argument(1, "indices"))
    vocabulary = shape_of(site.ports[0])[0]
    table = following(indices, range(len(shape_of(indices))), -0.5, vocabulary**0.5)
    return Ideal(why="(vocabulary / tokens)^1/2", gradients={0: table}, rigid=True)


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
