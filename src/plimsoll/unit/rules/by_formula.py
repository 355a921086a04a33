"""Rules by formula: products, pointwise operations, sums and losses."""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from plimsoll.unit import formulas
from plimsoll.unit.capture.gradient_graph import is_open, shape_of
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.formulas import off_centre, root
from plimsoll.unit.functional.convolutions import per_dimension
from plimsoll.unit.rules.operation import VIEWS, Ideal, Rule, Site, following, parameter_behind, skipped, times

# -- products: with weights, between activations, convolutions, look-ups -----------------------------------------------

# Products are sums over named dimensions, with one formula for linear, matmul, bmm, addmm and einsum.

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
    """Return a contraction's factors, each over the other operands' second moments."""
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
    area, step = math.prod(kernel), math.prod(per_dimension(cast("Any", site.argument(3, "stride", 1)), len(kernel)))
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

# -- activations, normalizations, and operations that keep a scale -----------------------------------------------------


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

# -- additions, products by value, means and sums over dimensions ------------------------------------------------------

# `analysis.residuals` finds the residual additions. Another addition of n terms weighs each by n^-1/2.


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

# -- losses: their values stay, and their gradients start at unit scale ------------------------------------------------

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
