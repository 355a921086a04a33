"""Where values come from: the order of sources, what they censor, and their grids."""

import itertools
import math
import pickle

import pytest
import torch

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import E4M3, Format
from plimsoll.spectrum import Grid, Source
from plimsoll.spectrum.source_format import narrowest
from tests.support.cases import each

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2", "e4m3fnuz", "e5m0", "e8m0")
SOURCES = [None, *(Source(f, scale) for f in FORMATS for scale in (1.0, 1024.0, 1e-300, 3.0))]


def test_any_name_of_a_format_is_the_format() -> None:
    assert Source("Half") == Source(torch.float16) == Source("e5m10", 1) == Source("fp16")
    assert Source(E4M3).format == "e4m3" and type(Source("fp16", 2).scale) is float
    assert pickle.loads(pickle.dumps(Source("fp16", 8.0))) == Source("fp16", 8.0)


@each("scale", [0.0, -1.0, math.inf, math.nan, "much", None, 10**400])
def test_a_scale_is_positive_and_finite(scale: object) -> None:
    with pytest.raises(ArgumentError, match=r"Source: expected a positive, finite scale; got scale="):
        Source("fp16", scale)  # type: ignore[arg-type]


def test_a_source_is_an_element_format_with_a_name() -> None:
    with pytest.raises(FormatError, match="Source: expected an element format; got the block format mxfp4"):
        Source("mxfp4")
    mine = Format(name="mine", exponent_bits=4, mantissa_bits=4, bias=3)
    with pytest.raises(FormatError, match="expected a format that plimsoll.formats.get finds by name"):
        Source(mine)
    with pytest.raises(FormatError, match="expected a format that plimsoll.formats.get finds by name"):
        Source(Format(name="fp16", exponent_bits=4, mantissa_bits=4, bias=3))


def test_the_narrowest_is_associative_commutative_and_idempotent() -> None:
    for a, b in itertools.product(SOURCES, SOURCES):
        assert narrowest(a, b) == narrowest(b, a)
        assert narrowest(a, b) in (a, b)
        assert narrowest(a, narrowest(a, b)) == narrowest(a, b)
    for a, b, c in itertools.product(SOURCES[::3], repeat=3):
        assert narrowest(narrowest(a, b), c) == narrowest(a, narrowest(b, c))


@each(
    ("narrow", "wide"),
    [
        (Source("fp16"), Source("fp32")),
        (Source("fp16"), Source("bf16")),
        (Source("fp16"), Source("fp16", 2.0)),
        (Source("e5m2"), Source("fp16")),  # 2^-16 against 2^-24
        (Source("bf16"), Source("tf32")),
        (Source("fp16"), None),
        (Source("e5m2", 2.0**-8), Source("fp16", 2.0**-16)),  # the same smallest value: the smaller largest one
    ],
)
def test_what_is_narrower(narrow: Source, wide: Source | None) -> None:
    assert narrowest(narrow, wide) == narrowest(wide, narrow) == narrow


@each(
    ("source", "censors"),
    [
        (Source("fp16"), True), (Source("fp16", 2.0**65), True), (Source("e4m3"), True), (Source("e5m2"), True),
        (Source("bf16"), False), (Source("fp32"), False), (Source("tf32"), False), (Source("fp64"), False),
        (Source("bf16", 2.0**-7), False), (Source("bf16", 2.0**-8), True), (Source("fp16", 2.0**102), False),
    ],
)  # fmt: skip
def test_what_censors(source: Source, censors: bool) -> None:
    assert source.censors is censors


def test_grids() -> None:
    assert Source("fp16", 1024.0).grid == Grid(10, -34)
    assert Source("fp16", 3.0).grid is None
    grid = Grid(10, -24)
    assert all(grid.holds(x) for x in (0.0, -1.0, 2.0**-24, 65504.0, 1 + 2.0**-10, 1e300 * 0))
    assert not any(grid.holds(x) for x in (2.0**-25, 1 + 2.0**-11, 1.5 * 2.0**-24, 65503.0))
    assert grid.union(Grid(7, -133)) == Grid(10, -133)
    assert grid.intersection(Grid(7, -133)) == Grid(7, -24)
    assert grid.shifted(-3) == Grid(10, -27)
