"""Experiment `unit-factors` (U2): operations' ideal factors, and measured ones.

Measured are torch's own operations, on normal inputs and gradients: the factor is one over the scale that comes out.
The bound is Student's, of the standard error over independent runs, which one of a million sound rows exceeds; to it
comes the share that a formula is known to leave out (borders; that an attention's key depends on its weight).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (as everyone calls it)

from plimsoll.errors import ArgumentError
from plimsoll.unit import formulas
from plimsoll.unit.formulas import (
    Factors,
    along,
    attention_curves,
    largest as largest_of_normals,
    nonlinear,
    softmax_curves,
)
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Claim, Measured
from plimsoll_lab.statistics import largest
from plimsoll_lab.study import Experiment

# What a lambda takes, where any number of tensors may come, is unknown to pyright.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """A tensor of an operation: name, formula in words, its value, share left out."""

    name: str
    formula: str
    factor: float
    left_out: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one shape: torch's function, tensors' shapes, directions.

    They are first its output, then each gradient. A direction of None has no factor to measure: a loss, or a norm, that
    is left as it is.
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
    ideal: Factors = formulas.maximum_pool(largest_of_normals(4), 4)
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


RUNS, FULL_RUNS = 96, 960
_DOUBT = 1e-6  # how often a sound row exceeds its bound
_WIDEST = 0.1  # a bound above this would show nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One factor: the formula's, the measured one, and their allowed distance."""

    case: Case
    direction: Direction
    measured: float
    bound: float

    @property
    def off(self) -> float:
        """The distance of the two factors, as a share of the formula's."""
        return abs(self.measured / self.direction.factor - 1)

    @property
    def of_bound(self) -> float:
        """The distance in units of the bound."""
        return self.off / self.bound

    def __str__(self) -> str:
        d, holds = self.direction, "" if self.of_bound <= 1 else "  NOT WITHIN"
        where = f"{self.case.operation:<14}{self.case.shape:<15}{d.name:<7}"
        return f"{where}{d.formula:<21}{_four(d.factor):>7}{_four(self.measured):>8} {self.bound:6.2%}{holds}"


def _four(value: float) -> str:
    """Four digits, zeros at the end too."""
    return f"{value:#.4g}"


# In the columns of `Row`'s text: 79 signs, so that no terminal wraps them.
HEAD = f"{'operation':<14}{'shape':<15}{'of':<7}{'formula':<21}{'gives':>7}{'is':>8} {'within':>6}"


def measure(bench: Bench) -> Measured:
    """The table, and whether each operation's formulas hold."""
    chosen, runs = cases(), _runs(bench)
    bench.progress.begin("operations", len(chosen))
    rows: list[Row] = []
    for case in chosen:
        rows += measured_rows(case, runs, bench.seed, bench.device)
        bench.progress.advance()
    return Measured(trainings=(), claims=claims(rows), said=(HEAD, *(str(row) for row in rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A scale and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales of the output and of each input's gradient."""

    output: Scale
    inputs: tuple[Scale, ...]


def measure_scales(
    function: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    *,
    runs: int,
    seed: int = 0,
    inputs: Callable[[Sequence[int]], Tensor] = torch.randn,
) -> Scales:
    """Return the scales of a function of tensors.

    It runs on independent normal inputs, with an independent normal gradient (1 for a scalar result). Forward, its
    scale is the standard deviation of all output values. Backward, it is the root of the second moment of each input's
    gradient. Torch's random generator is restored afterwards.
    """
    outputs: list[Tensor] = []
    gradients: list[list[Tensor]] = [[] for _ in shapes]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in range(runs):
            drawn = [inputs(shape).requires_grad_() for shape in shapes]
            out = function(*drawn)
            incoming = torch.randn_like(out) if out.dim() else torch.ones_like(out)
            outputs.append(_means(out))
            for runs_of_input, gradient in zip(gradients, torch.autograd.grad(out, drawn, incoming), strict=True):
                runs_of_input.append(_means(gradient))
    return Scales(output=_scale(outputs, about_mean=True), inputs=tuple(_scale(means) for means in gradients))


def _means(x: Tensor) -> Tensor:
    """The means of the values and of their squares."""
    wide = x.detach().double()
    return torch.stack([wide.mean(), wide.square().mean()])


# The values within one run share their inputs and so are no independent samples, but the runs are. The variance of
# their mean squares, which contains the fourth moment, gives the standard error under any dependence inside.
def _scale(runs: list[Tensor], *, about_mean: bool = False) -> Scale:
    means, squares = torch.stack(runs).unbind(1)
    if about_mean:
        mean = means.mean()
        squares = squares - 2 * mean * means + mean**2
    value = squares.mean().clamp(min=0).sqrt()
    # d sqrt(s) = ds / (2 sqrt(s)), and the mean of n runs has their deviation over sqrt(n).
    error = squares.std() / math.sqrt(len(runs)) / (2 * value)
    return Scale(value=value.item(), error=error.item())


def measured_rows(case: Case, runs: int, seed: int, device: str = "cpu") -> list[Row]:
    """One operation measured."""

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, device=device)

    found = measure_scales(case.function, case.shapes, runs=runs, seed=seed, inputs=drawn)
    student = float(stats.t.ppf(1 - _DOUBT / 2, runs - 1))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    pairs = zip(case.directions, (found.output, *found.inputs), strict=True)
    return [_row(case, direction, scale, student) for direction, scale in pairs if direction is not None]


def _row(case: Case, direction: Direction, scale: Scale, student: float) -> Row:
    bound = student * scale.error / scale.value + direction.left_out + 1e-6  # float32's rounding
    return Row(case=case, direction=direction, measured=1 / scale.value, bound=bound)


def claims(rows: list[Row]) -> tuple[Claim, ...]:
    """One of each operation, and that the bounds are narrow enough to say so."""
    operations = dict.fromkeys(row.case.operation for row in rows)
    return (
        *(
            Claim(f"factors-{name.replace('_', '-')}", f"{name}: every factor by formula is the one measured",
                  largest(row.of_bound for row in rows if row.case.operation == name),
                  at_most=1.0, unit="of the bound")
            for name in operations
        ),
        Claim("bounds-narrow", "every bound is narrow enough for a wrong formula to exceed it",
              largest(row.bound for row in rows), at_most=_WIDEST, unit="of the factor"),
    )  # fmt: skip


def _runs(bench: Bench) -> int:
    return bench.steps or (FULL_RUNS if bench.full else RUNS)


def _settings(bench: Bench) -> Mapping[str, object]:
    runs = _runs(bench)
    if runs < 8:
        raise ArgumentError(
            f"unit-factors: expected 8 runs or more, for a standard error; got steps={runs}. Leave it out."
        )
    return {"runs": runs, "device": bench.device, "doubt": _DOUBT, "operations": len(cases())}


UNIT_FACTORS = Experiment(
    name="unit-factors",
    claim="Every operation's ideal factor, forward and backward, by formula is the one that measurement gives.",
    source="U2",
    settings=_settings,
    measure=measure,
)
