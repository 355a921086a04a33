"""The grid of the sweep: what a configuration is, which combinations there are, and which of them are a default run.

The published sweep has 2,092 trainings of small character models, over sequence layer, norm, residual scheme, optimizer
and learning rate, with and without unit scaling, in FP32 and FP16. This grid has the same axes, and depth.

Residual schemes, with x what comes into a branch f and l the branch's number, from 1, over the whole model:

- "none": f(x), no residual at all. "sum": x + f(x).
- "fixed": (x + f(x)) / sqrt(2).
- "running-mean": sqrt(1 - tau) x + sqrt(tau) f(x) with tau = 1 / (l + 1): all branches and the embedding count alike.

What is dropped since it would mean nothing (`meaningless` says so of each):

- A loss scale in FP32, which has the range of BF16: a power of two changes no digit there.
- A loss scale and unit scaling: they are two remedies of one thing.
- The plain sum at unit scale: there every addition is weighted (U2), so that it is one of the other two.
- The fixed sum in front of a norm, unscaled: the norm divides the factor out, and it is the plain sum.
- A norm behind a branch without a residual: the same layers in the same order as with one in front, but at the ends.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

Sequencer = Literal["attention", "convolution", "recurrent"]
Norm = Literal["pre", "post", "no"]
Residual = Literal["none", "sum", "fixed", "running-mean"]
Optimizer = Literal["adamw", "sgd"]
Precision = Literal["fp32", "fp16"]
Scaling = Literal["none", "static", "unit"]
DEPTHS = (2, 8)
RATES = 5  # learning rates of a configuration, a geometric row
DEFAULT_RATES = (1, 2, 3)  # the places of those in a default run


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Design:
    """A model and its optimizer, whatever it is computed in: trainings of one design are compared."""

    sequence: Sequencer
    norm: Norm
    residual: Residual
    optimizer: Optimizer
    depth: int

    def __str__(self) -> str:
        return f"{self.sequence}-{self.norm}norm-{self.residual}-{self.optimizer}-{self.depth}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """How a design is computed: in which precision, and what keeps its gradients in range."""

    precision: Precision
    scaling: Scaling

    def __str__(self) -> str:
        return f"{self.precision}-{self.scaling}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Configuration:
    """One training of the sweep; `rate`: the place of its learning rate in the row that its kind has, from 0."""

    design: Design
    way: Way
    rate: int

    @property
    def name(self) -> str:
        """One word, which no other configuration has."""
        return f"{self.design}-{self.way}-r{self.rate}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, flat."""
        return {**asdict(self.design), **asdict(self.way), "rate": self.rate}


WAYS = (
    Way(precision="fp32", scaling="none"),
    Way(precision="fp16", scaling="none"),
    Way(precision="fp16", scaling="static"),
    Way(precision="fp32", scaling="unit"),
    Way(precision="fp16", scaling="unit"),
)
FP32, FP16, STATIC, UNIT_FP32, UNIT_FP16 = WAYS


def meaningless(design: Design, way: Way) -> str | None:
    """Why a combination is no configuration of its own; None where it is one."""
    if way.precision == "fp32" and way.scaling == "static":
        return "FP32 needs no loss scale: a power of two changes none of its digits"
    if design.norm == "post" and design.residual == "none":
        return "without a residual a norm behind a branch is one in front of the next"
    if way.scaling == "unit" and design.residual == "sum":
        return "at unit scale every addition is weighted: it is another of the schemes"
    if way.scaling != "unit" and design.norm == "post" and design.residual == "fixed":
        return "a norm divides the fixed factor out: it is the plain sum"
    return None


def whole_grid() -> tuple[Configuration, ...]:
    """Every configuration, in a fixed order."""
    return tuple(
        Configuration(design=design, way=way, rate=rate)
        for design in designs()
        for way in every_way()
        if meaningless(design, way) is None
        for rate in range(RATES)
    )


def default_grid() -> tuple[Configuration, ...]:
    """The fixed part of the grid that a default run trains, in the grid's order, at the three middle learning rates.

    Every sequence with every norm, two layers deep, with AdamW, the residual schemes "running-mean" and "fixed" in
    turns as on a chessboard; every sequence once more with SGD; the plain sum, no residual, and eight layers once each.
    So each value of each axis occurs, and sequences and norms in all pairs.
    """
    chosen = {each for design in _default_designs() for each in (design, reference(design))}
    return tuple(each for each in whole_grid() if each.design in chosen and each.rate in DEFAULT_RATES)


def _default_designs() -> Iterator[Design]:
    for row, sequence in enumerate(get_args(Sequencer)):
        for column, norm in enumerate(get_args(Norm)):
            residual: Residual = "fixed" if (row + column) % 2 else "running-mean"
            design = Design(sequence=sequence, norm=norm, residual=residual, optimizer="adamw", depth=2)
            yield design
            if norm == "pre":
                yield replace(design, optimizer="sgd")
    yield Design(sequence="attention", norm="pre", residual="sum", optimizer="adamw", depth=2)
    yield Design(sequence="convolution", norm="no", residual="none", optimizer="adamw", depth=2)
    yield Design(sequence="convolution", norm="pre", residual="running-mean", optimizer="adamw", depth=8)


def designs() -> tuple[Design, ...]:
    """Every design, whether or not all ways fit it."""
    axes = itertools.product(get_args(Sequencer), get_args(Norm), get_args(Residual), get_args(Optimizer), DEPTHS)
    return tuple(
        Design(sequence=sequence, norm=norm, residual=residual, optimizer=optimizer, depth=depth)
        for sequence, norm, residual, optimizer, depth in axes
    )


def every_way() -> Iterable[Way]:
    """Each precision with each scaling, also where it means nothing."""
    pairs = itertools.product(get_args(Precision), get_args(Scaling))
    return (Way(precision=cast("Precision", one), scaling=cast("Scaling", other)) for one, other in pairs)


def reference(design: Design) -> Design:
    """The unscaled design that a unit-scaled one is held against: itself, or the sum that its norm makes it."""
    if design.norm == "post" and design.residual == "fixed":
        return replace(design, residual="sum")
    return design
