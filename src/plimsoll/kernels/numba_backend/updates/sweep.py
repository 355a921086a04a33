"""Sweep of `measuring.sweep` over float32 differences, which are never written.

Each group of 256 values is subtracted into a kilobyte of scratch, tested against the window there, and counted from
there; the three inputs are read once.
"""

# ruff: noqa: ARG001  (an intrinsic names its arguments for its callers; what generates it takes them as a list)

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from plimsoll import row_layout
from plimsoll.kernels.numba_backend.measuring.sweep import (
    DOUBLE,
    GROUP,
    LONG,
    SINGLES,
    WORD,
    WORDS,
    Exponents,
    ExtremesAndZeros,
    Moments,
    Vectors,
)


class _Moves:
    """Count the values that were pushed, and those of them that have not moved."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.held = [vectors.variable(vectors.fill(0)) for _ in range(2)]
        self.group: list[Any] = []

    def begin_group(self) -> None:
        self.group = [self.vectors.builder.load(held) for held in self.held]

    def add(self, push: Any, difference: Any) -> None:
        vectors, builder, zero = self.vectors, self.vectors.builder, self.vectors.fill(0)
        pushed = builder.icmp_unsigned("!=", vectors.magnitude(push), zero)
        unmoved = builder.and_(pushed, builder.icmp_unsigned("==", vectors.magnitude(difference), zero))
        self.group = [
            builder.add(count, builder.zext(found, WORDS))
            for count, found in zip(self.group, (pushed, unmoved), strict=True)
        ]

    def end_group(self) -> None:
        for held, count in zip(self.held, self.group, strict=True):
            self.vectors.builder.store(count, held)

    def end(self, address: Any) -> None:
        """Adds them to what is in memory."""
        vectors, builder = self.vectors, self.vectors.builder
        for index, held in zip((row_layout.PUSHED, row_layout.UNMOVED), self.held, strict=True):
            place = vectors.at(address, LONG, index)
            found = builder.zext(vectors.reduce(builder.load(held), builder.add), LONG)
            builder.store(builder.add(builder.load(place), found), place)


class _Squares:
    """The sum of squares in float64, in two registers."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.held = [vectors.no_doubles() for _ in range(2)]

    def add(self, pointer: Any) -> None:
        """Adds sixteen values."""
        builder = self.vectors.builder
        for part, value in enumerate(self.vectors.doubles(pointer)):
            held = self.held[part % 2]
            builder.store(self.vectors.multiply_add(value, value, builder.load(held)), held)

    def end(self, place: Any) -> None:
        """Adds it to what is in memory."""
        vectors, builder = self.vectors, self.vectors.builder
        both = builder.fadd(*(builder.load(held) for held in self.held))
        builder.store(builder.fadd(builder.load(place), vectors.reduce(both, builder.fadd)), place)


@intrinsic
def sweep_updates(
    _: Any, old: Any, new: Any, push: Any, groups: Any, top: Any, planes: Any, extremes: Any, moments: Any, moves: Any
) -> Any:
    """Sweep as `sweep`, over ``new - old``, which is 0 if both are the same value.

    It adds to the row of `moves` how many pushes are not zero, how many of these left their value the same, and the
    squares of the old values.
    """

    def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
        old, new, push, groups, top, planes, extremes, moments, moves = arguments
        vectors = Vectors(builder)
        counting, ends, sums = Exponents(vectors), ExtremesAndZeros(vectors, top), Moments(vectors)
        moved, squares = _Moves(vectors), _Squares(vectors)
        scratch = cgutils.alloca_once(builder, ir.ArrayType(WORD, GROUP))
        scratch.align = 64
        scratch = builder.gep(scratch, [ir.Constant(LONG, 0), ir.Constant(LONG, 0)])
        firsts = [vectors.at(address, WORD) for address in (old, new, push)]
        done = vectors.variable(groups)
        with cgutils.for_range(builder, groups) as loop:
            shift = builder.mul(loop.index, ir.Constant(LONG, GROUP))
            starts = [builder.gep(first, [shift]) for first in firsts]
            ends.begin_group()
            moved.begin_group()
            streams = zip(*(vectors.group(start) for start in (scratch, *starts)), strict=True)
            for (place, _), (_, before), (_, after), (_, pushed) in streams:
                difference = builder.fsub(builder.bitcast(after, SINGLES), builder.bitcast(before, SINGLES))
                difference = builder.bitcast(difference, WORDS)
                builder.store(difference, builder.bitcast(place, WORDS.as_pointer()), align=64)
                ends.add(difference)
                moved.add(pushed, difference)

            def leave() -> None:
                builder.store(loop.index, done)
                loop.do_break()

            ends.test_group(leave)
            ends.end_group()
            moved.end_group()
            for (place, value), (before, _) in zip(vectors.group(scratch), vectors.group(starts[0]), strict=True):
                counting.add(value)
                sums.add(place)
                squares.add(before)
            counting.end_group()
        counting.end(planes)
        ends.end(extremes)
        sums.end(moments, onto=True)
        moved.end(moves)
        squares.end(vectors.at(moves, DOUBLE, row_layout.OLD_SUMSQ))
        return builder.load(done)

    return types.int64(*[types.int64] * 9), generate
