"""The estimate of what overflows in blocks, against the values themselves, for several shapes of distribution."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import plimsoll as pl
from plimsoll.spectrum import measure
from tests.support.cases import each

TENSORS = 24
# Where rounding passes the largest value, over the start of its binade, and whether that place itself overflows.
POINTS = {
    "mxfp8_e4m3": (464 / 256, False),
    "mxfp8_e5m2": (61440 / 32768, True),
    "mxfp6_e3m2": (30 / 16, True),
    "mxfp6_e2m3": (7.75 / 4, True),
    "mxfp4": (7 / 4, True),
}
SHAPES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda rows, g: torch.randn(rows, 128, generator=g),
    "bf16": lambda rows, g: torch.randn(rows, 128, generator=g).bfloat16().float(),
    "laplace": lambda rows, g: torch.log1p(-torch.rand(rows, 128, generator=g)),
    "student": lambda rows, g: (
        torch.randn(rows, 128, generator=g) / torch.randn(3, rows, 128, generator=g).square().mean(0).sqrt()
    ),
    "lognormal": lambda rows, g: torch.exp(2 * torch.randn(rows, 128, generator=g)),
    "sparse": lambda rows, g: torch.randn(rows, 128, generator=g) * (torch.rand(rows, 128, generator=g) < 0.05).float(),
    "relu": lambda rows, g: torch.randn(rows, 128, generator=g).relu(),
    "products": lambda rows, g: torch.randn(rows, 128, generator=g) * torch.randn(rows, 128, generator=g),
    "rows": lambda rows, g: torch.randn(rows, 128, generator=g) * torch.exp(1.5 * torch.randn(rows, 1, generator=g)),
}


def share_beyond(x: Tensor, name: str) -> float:
    """The part of the nonzero values that the format cannot hold, by the floor rule (OCP MX 1.0, section 6.3)."""
    point, itself = POINTS[name]
    blocks = x.abs().double().reshape(-1, 32)
    largest = torch.frexp(blocks.amax(dim=1, keepdim=True)).exponent - 1
    placed = torch.ldexp(blocks, -largest)
    beyond = (placed >= point) if itself else (placed > point)
    return int(beyond.sum()) / int((x != 0).sum())


@each("name", POINTS)
@each("shape", SHAPES)
def test_the_estimate_of_overflow_is_near_the_truth(name: str, shape: str) -> None:
    """Seeded. Measured: medians from 0.71 to 1.31, where an even spread over the binade gave 1.4 to 6."""
    g = torch.Generator().manual_seed(7)
    ratios: list[float] = []
    for _ in range(TENSORS):
        x = SHAPES[shape](256, g) * 2.0 ** float(torch.rand(1, generator=g))
        truth, found = share_beyond(x, name), measure(x, block=32).fit(name).overflow
        assert found.low - 1e-12 <= truth <= found.high + 1e-12
        assert found.low <= found.estimate <= found.high
        ratios.append(found.estimate / truth)
    assert 0.6 < np.median(ratios) < 1.5


@each("name", POINTS)
def test_bounds_hold_where_the_tail_ends_at_once(name: str) -> None:
    g = torch.Generator().manual_seed(8)
    for _ in range(TENSORS):
        x = (torch.rand(16, 128, generator=g) - 0.5) * 2.0 ** float(torch.rand(1, generator=g))
        truth, found = share_beyond(x, name), measure(x, block=32).fit(name).overflow
        assert found.low - 1e-12 <= truth <= found.high + 1e-12
        assert found.low <= found.estimate <= found.high


def test_the_points_are_those_of_the_casts() -> None:
    for name, (point, itself) in POINTS.items():
        top = pl.formats.get(name).element
        x = torch.tensor([[point * 2.0**top.max_exponent, 1.0] + [0.0] * 30])
        x = torch.nextafter(x, torch.tensor(0.0)) if itself else x
        assert float(pl.cast(x, name)[0, 0]) == top.max
        assert share_beyond(x, name) == 0


def test_no_value_overflows_below_the_largest_that_there_is() -> None:
    x = torch.full((4, 32), 1.5)
    assert measure(x, block=32).fit("mxfp8_e4m3").overflow.estimate < 0.05
    x = torch.linspace(0.1, 1.7, 128).reshape(4, 32)
    assert measure(x[-1:], block=32).fit("mxfp4").overflow.estimate == 0
    coarse = torch.tensor([[1.0, 1.5, -1.25, 0.5] * 8])  # on a grid without a number beyond the point
    assert measure(coarse.to(torch.float8_e5m2), block=32).fit("mxfp8_e4m3").overflow.high == 0


@each("x", [torch.tensor([[1.9] + [0.0] * 31]), torch.full((1, 32), 1.9), torch.tensor(2.0)])
def test_one_block_gives_an_estimate_in_its_interval(x: Tensor) -> None:
    found = measure(x, block=32).fit("mxfp4").overflow
    assert 0 <= found.low <= found.estimate <= found.high <= 1
