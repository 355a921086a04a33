"""The operations of `unit-factors`: torch's own, with the factors that the formulas give for their shapes."""

# What a lambda takes, where any number of tensors may come, is unknown to pyright.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (torch's custom)

from plimsoll.unit.factors import formulas
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.factors.nonlinear import largest, nonlinear
from plimsoll.unit.factors.softmax_moments import along, attention_curves, softmax_curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One tensor of an operation: its name, the formula in words, what it gives, and the share that it leaves out."""

    name: str
    formula: str
    factor: float
    left_out: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one shape: torch's function, the shapes of its tensors; first its output, then each gradient.

    A direction of None has no factor to measure: a loss, or a norm, that is left as it is.
    """

    operation: str
    shape: str
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    directions: tuple[Direction | None, ...]


def cases() -> tuple[Case, ...]:
    """All of them."""
    return (
        *(_product(b, m, n) for b, m, n in ((256, 64, 128), (32, 300, 48))),
        *(_convolution(channels, stride) for channels, stride in ((16, 1), (8, 2))),
        *(_pointwise(name, mult) for name in _POINTWISE for mult in (1.0, 2.0)),
        *(_softmax(n) for n in (4, 64, 1024)),
        *(_attention(s, width, causal) for s, width, causal in ((128, 64, False), (128, 64, True), (32, 16, True))),
        _layer_norm(), _embedding(), _sum(), _dropout(), _maximum(),
        *(_cross_entropy(classes) for classes in (2, 10, 1000)), _squared_error(),
    )  # fmt: skip


def _product(b: int, m: int, n: int) -> Case:
    ideal = formulas.linear(m, n)
    directions = (
        Direction(name="output", formula="m^-1/2", factor=ideal.output),
        Direction(name="input", formula="n^-1/2", factor=ideal.inputs[0]),
        Direction(name="weight", formula="b^-1/2", factor=formulas.root(b)),
    )
    return Case(
        operation="linear",
        shape=f"{b}, {m} to {n}",
        function=F.linear,
        shapes=((b, m), (n, m)),
        directions=directions,
    )


def _convolution(channels: int, stride: int) -> Case:
    side, out = 33, 2 * channels
    ideal = formulas.convolution(9 * channels, 9 * out, stride**2)
    places = 4 * ((side - 3) // stride + 1) ** 2
    directions = (
        Direction(name="output", formula="fan_in^-1/2", factor=ideal.output),
        # Next to the border a gradient has fewer terms: 31 of 33 a dimension.
        Direction(name="input", formula="(out/stride)^-1/2", factor=ideal.inputs[0], left_out=0.07),
        Direction(name="weight", formula="positions^-1/2", factor=formulas.root(places)),
    )
    return Case(
        operation="conv2d", shape=f"{channels} to {out}, /{stride}",
        function=lambda x, w: F.conv2d(x, w, stride=stride),
        shapes=((4, channels, side, side), (out, channels, 3, 3)), directions=directions,
    )  # fmt: skip


_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
}  # fmt: skip


def _pointwise(name: str, mult: float) -> Case:
    ideal, function = nonlinear(name, mult), _POINTWISE[name]
    directions = (
        Direction(name="output", formula="1 / std f(mx)", factor=ideal.output),
        Direction(name="input", formula="1 / rms m f'(mx)", factor=ideal.inputs[0]),
    )
    return Case(
        operation=name,
        shape=f"m = {mult:g}",
        function=lambda x: function(mult * x),
        shapes=((128, 128),),
        directions=directions,
    )


def _softmax(n: int) -> Case:
    spread, slope, _ = (along(curve, n) for curve in softmax_curves(1.0))
    ideal = formulas.softmax(n, 1.0, spread, slope)
    directions = (
        Direction(name="output", formula="~ n (e - 1)^-1/2", factor=ideal.output, left_out=3e-4),
        Direction(name="input", formula="~ n e^-1/2", factor=ideal.inputs[0], left_out=3e-4),
    )
    return Case(
        operation="softmax",
        shape=f"n = {n}",
        function=lambda x: torch.softmax(x, -1),
        shapes=((16384 // n, n),),
        directions=directions,
    )


def _attention(s: int, width: int, causal: bool) -> Case:
    squares, slope, weighted = (along(curve, s) for curve in attention_curves(1.0, width, causal))
    ideal = formulas.attention(width**-0.5, width, 1.0, 1.0, squares, slope, weighted)
    # A key is not independent of its own weight, which the formula for the query's gradient leaves out.
    known = (("query", "1 / rms of slopes", 0.02), ("key", "likewise", 2e-3), ("value", "as the output", 2e-3))
    directions = (
        Direction(name="output", formula="(E sum p^2)^-1/2", factor=ideal.output, left_out=2e-3),
        *(Direction(name=n, formula=f, factor=x, left_out=o) for (n, f, o), x in zip(known, ideal.inputs, strict=True)),
    )
    return Case(
        operation="attention", shape=f"{s}x{width}{' causal' if causal else ''}",
        function=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        shapes=((2, 4, s, width),) * 3, directions=directions,
    )  # fmt: skip


def _layer_norm() -> Case:
    rows = formulas.root(512)
    directions = (
        Direction(name="output", formula="1", factor=1.0, left_out=1e-4),
        Direction(name="input", formula="1", factor=1.0, left_out=0.02),
        Direction(name="weight", formula="b^-1/2", factor=rows, left_out=0.01),
        Direction(name="bias", formula="b^-1/2", factor=rows),
    )

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (128,), 1 + w - w.detach(), b - b.detach())

    return Case(
        operation="layer_norm",
        shape="(512, 128)",
        function=plain,
        shapes=((512, 128), (128,), (128,)),
        directions=directions,
    )


def _embedding() -> Case:
    factor = formulas.embedding(500, 400)

    def plain(table: Tensor) -> Tensor:
        return F.embedding(torch.randint(500, (400,), device=table.device), table)

    directions = (
        Direction(name="output", formula="1", factor=1.0),
        Direction(name="table", formula="(vocab/tokens)^1/2", factor=factor),
    )
    return Case(operation="embedding", shape="400 of 500", function=plain, shapes=((500, 64),), directions=directions)


def _sum() -> Case:
    directions = (
        Direction(name="output", formula="n^-1/2", factor=formulas.root(3)),
        *(Direction(name="term", formula="1", factor=1.0) for _ in range(3)),
    )
    return Case(
        operation="sum",
        shape="3 terms",
        function=lambda x, y, z: x + y + z,
        shapes=((128, 128),) * 3,
        directions=directions,
    )


def _dropout() -> Case:
    factor = formulas.dropout(0.3)
    directions = tuple(Direction(name=name, formula="(1 - p)^1/2", factor=factor) for name in ("output", "input"))
    return Case(
        operation="dropout",
        shape="p = 0.3",
        function=lambda x: F.dropout(x, 0.3),
        shapes=((128, 128),),
        directions=directions,
    )


def _maximum() -> Case:
    ideal: Factors = formulas.maximum_pool(largest(4), 4)
    directions = (
        Direction(name="output", formula="1 / std of largest", factor=ideal.output),
        Direction(name="input", formula="stride^1/2", factor=ideal.inputs[0]),
    )
    return Case(
        operation="max_pool2d",
        shape="2x2",
        function=lambda x: F.max_pool2d(x, 2),
        shapes=((4, 16, 32, 32),),
        directions=directions,
    )


def _cross_entropy(classes: int) -> Case:
    def plain(x: Tensor) -> Tensor:
        labels = torch.randint(classes, (x.shape[0],), device=x.device)
        return F.cross_entropy(x * 1e-3, labels, reduction="sum") * 1e3

    logits = Direction(name="logits", formula="s (s - 1)^-1/2", factor=formulas.cross_entropy(classes), left_out=1e-5)
    return Case(
        operation="cross_entropy",
        shape=f"{classes} alike",
        function=plain,
        shapes=((4000 // classes, classes),),
        directions=(None, logits),
    )


def _squared_error() -> Case:
    def plain(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y, reduction="sum")

    both = (Direction(name=name, formula="8^-1/2", factor=formulas.MSE) for name in ("input", "target"))
    return Case(
        operation="mse_loss",
        shape="(128, 128)",
        function=plain,
        shapes=((128, 128),) * 2,
        directions=(None, *both),
    )
