"""Sweep over float32 values for all that a row holds, which may multiply them.

Written in LLVM's vectors, since what makes it fast is what a compiler's vectorizer does not find:

- *Exponents* are counted without memory. A value becomes the word with one bit set, at its exponent modulo 32, which is
  one rotation, and words are added up bit by bit: a carry-save adder takes three and gives two, their sums and their
  carries, in two instructions where the processor has three-way logic. The counts of a lane then stand across `PLANES`
  words, plane p holding bit p of each. This counts right as long as the exponents lie in one window of 32 binades,
  which each group of 256 values is tested for by its extremes. A zero is counted as exponent 0; how many there were is
  counted too: where products are written, only in groups that have one.
- *Moments* are float64, four lanes at a time: on a Zen 4 core that is faster than eight.
- *Products* take the group's place when all else is done, while it is in the first-level cache.
"""

# ruff: noqa: ARG001  (an intrinsic names its arguments for its callers; what generates it takes them as a list)

from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

# The arithmetic is the limit, not memory. Sixteen lanes are one register of AVX-512, two of AVX2, four of NEON.
LANES = 16
GROUP = 256  # values
MOST_GROUPS = 64  # of one call
PLANES = 16
MOST_VALUES = LANES * ((1 << PLANES) - 1)  # that planes in memory can count

MOMENTS = 4

_PLANES_OF_CALL = 11  # a lane's count is at most 16 * 64
_DOUBLES = 4  # lanes of float64
WORD, LONG = ir.IntType(32), ir.IntType(64)
SINGLE, DOUBLE = ir.FloatType(), ir.DoubleType()
WORDS, SINGLES = ir.VectorType(WORD, LANES), ir.VectorType(SINGLE, LANES)
_FEW_SINGLES, FEW_DOUBLES = ir.VectorType(SINGLE, _DOUBLES), ir.VectorType(DOUBLE, _DOUBLES)
_MAGNITUDE, _SIGN, _NOTHING = 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF


def has_feature(name: str) -> bool:
    """Return True if code is compiled for a processor that has the feature.

    That is this processor, or the one named in Numba's configuration.
    """
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return f"+{name}" in (config.CPU_FEATURES or "")
    return bool(llvmlite.binding.get_host_cpu_features().get(name))


class Vectors:
    """LLVM's builder, with the operations on vectors that a sweep takes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.ternary = has_feature("avx512f")

    def fill(self, number: int) -> Any:
        """A vector of one constant."""
        return ir.Constant(WORDS, [number] * LANES)

    def splat(self, value: Any) -> Any:
        """A vector of one value in all lanes."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        single = self.builder.insert_element(empty, value, ir.Constant(WORD, 0))
        return self.builder.shuffle_vector(single, empty, self.fill(0))

    def call(self, name: str, returns: Any, *arguments: Any) -> Any:
        """Calls an intrinsic of LLVM."""
        kind = ir.FunctionType(returns, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def variable(self, start: Any) -> Any:
        """A place on the stack that begins with a value."""
        return cgutils.alloca_once_value(self.builder, start)

    def at(self, address: Any, kind: Any, index: int = 0) -> Any:
        """The pointer to the index-th of this kind of value from an address on."""
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.gep(pointer, [ir.Constant(LONG, index)])

    def group(self, start: Any) -> Iterator[tuple[Any, Any]]:
        """Yield pointers to a group's sixteen vectors, and the vectors, loaded in turn."""
        same = ir.FunctionType(start.type, [start.type])
        # The compiler does not know that it has read there before: else it would keep a group's values, and spill them.
        start = self.builder.asm(same, "", "=r,0", [start], side_effect=False)
        for step in range(0, GROUP, LANES):
            pointer = self.builder.gep(start, [ir.Constant(LONG, step)])
            yield pointer, self.builder.load(self.builder.bitcast(pointer, WORDS.as_pointer()), align=4)

    def doubles(self, pointer: Any) -> Iterator[Any]:
        """Yield sixteen values from a pointer on, four by four as float64.

        A load and the conversion are one instruction.
        """
        builder = self.builder
        for part in range(0, LANES, _DOUBLES):
            place = builder.gep(pointer, [ir.Constant(LONG, part)])
            few = builder.load(builder.bitcast(place, _FEW_SINGLES.as_pointer()), align=4)
            yield builder.fpext(few, FEW_DOUBLES)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """``x * y + z`` of few doubles, rounded once where the processor can."""
        return self.call(f"llvm.fmuladd.v{_DOUBLES}f64", FEW_DOUBLES, x, y, z)

    def no_doubles(self) -> Any:
        """A variable of few doubles, zero at first."""
        return self.variable(ir.Constant(FEW_DOUBLES, [0.0] * _DOUBLES))

    def fetch(self, pointer: Any, values: int) -> None:
        """Prefetch the memory so many values further on for writing; there may be none."""
        place = self.builder.bitcast(self.builder.gep(pointer, [ir.Constant(LONG, values)]), ir.IntType(8).as_pointer())
        write, keep, data = (ir.Constant(WORD, number) for number in (1, 3, 1))
        self.call("llvm.prefetch.p0i8", ir.VoidType(), place, write, keep, data)

    def magnitude(self, value: Any) -> Any:
        """Bit patterns without their signs."""
        return self.builder.and_(value, self.fill(_MAGNITUDE))

    def any(self, lanes: Any) -> Any:
        """Return true if any lane is true."""
        bits = self.builder.bitcast(lanes, ir.IntType(LANES))
        return self.builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    def reduce(self, value: Any, operation: Callable[[Any, Any], Any]) -> Any:
        """All lanes into one number, by halves."""
        count = value.type.count
        while count > 1:
            count //= 2
            empty = ir.Constant(value.type, ir.Undefined)
            halves: list[Any] = []
            for start in (0, count):
                lanes = ir.Constant(ir.VectorType(WORD, count), list(range(start, start + count)))
                halves.append(self.builder.shuffle_vector(value, empty, lanes))
            value = operation(*halves)
        return self.builder.extract_element(value, ir.Constant(WORD, 0))

    def larger(self, x: Any, y: Any) -> Any:
        """Of each lane, as signed integers."""
        return self._choose("llvm.smax", x, y)

    def higher(self, x: Any, y: Any) -> Any:
        """The larger of each lane, as unsigned integers."""
        return self._choose("llvm.umax", x, y)

    def lower(self, x: Any, y: Any) -> Any:
        """The smaller of each lane, as unsigned integers."""
        return self._choose("llvm.umin", x, y)

    def _choose(self, name: str, x: Any, y: Any) -> Any:
        kind = f"v{x.type.count}i32" if isinstance(x.type, ir.VectorType) else "i32"
        return self.call(f"{name}.{kind}", x.type, x, y)

    def add_three(self, x: Any, y: Any, z: Any) -> tuple[Any, Any]:
        """Sum and carry, bit by bit."""
        builder = self.builder
        if self.ternary:
            name, parity, majority = (
                "llvm.x86.avx512.pternlog.d.512",
                ir.Constant(WORD, 0x96),
                ir.Constant(WORD, 0xE8),
            )
            return self.call(name, WORDS, x, y, z, parity), self.call(name, WORDS, x, y, z, majority)
        either = builder.xor(x, y)
        return builder.xor(either, z), builder.or_(builder.and_(x, y), builder.and_(either, z))


class Exponents:
    """Counts of exponents modulo 32."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.planes = [vectors.variable(vectors.fill(0)) for _ in range(_PLANES_OF_CALL)]
        self.waiting: list[tuple[int, Any]] = []  # words of a group that wait for another of their plane

    def add(self, value: Any) -> None:
        """Counts the exponents of a vector; they are written a few vectors later."""
        vectors, builder = self.vectors, self.vectors.builder
        one = vectors.fill(1)
        place = builder.lshr(value, vectors.fill(23))  # the sign is above what a rotation looks at
        self.waiting.append((0, vectors.call(f"llvm.fshl.v{LANES}i32", WORDS, one, one, place)))
        while len(self.waiting) > 1 and self.waiting[-1][0] == self.waiting[-2][0]:
            (level, second), (_, first) = self.waiting.pop(), self.waiting.pop()
            total, carry = vectors.add_three(builder.load(self.planes[level]), first, second)
            builder.store(total, self.planes[level])
            self.waiting.append((level + 1, carry))

    def end_group(self) -> None:
        """Adds the one word that a group leaves to the planes above."""
        builder = self.vectors.builder
        ((level, carry),) = self.waiting
        for plane in self.planes[level:]:
            old = builder.load(plane)
            builder.store(builder.xor(old, carry), plane)
            carry = builder.and_(old, carry)
        self.waiting.clear()

    def end(self, address: Any) -> None:
        """Adds the planes to those in memory."""
        builder, carry = self.vectors.builder, self.vectors.fill(0)
        for index in range(PLANES):
            place = self.vectors.at(address, WORDS, index)
            old = builder.load(place, align=4)
            if index < len(self.planes):
                total, carry = self.vectors.add_three(old, builder.load(self.planes[index]), carry)
            else:
                total, carry = builder.xor(old, carry), builder.and_(old, carry)
            builder.store(total, place, align=4)


class _Extremes:
    """Largest bits of either sign, smallest nonzero magnitude, and number of zeros."""

    def __init__(self, vectors: Vectors, top: Any) -> None:
        builder = vectors.builder
        self.vectors = vectors
        self.held = [vectors.variable(vectors.fill(start)) for start in (0, 0, _MAGNITUDE, 0)]
        self.smallest = vectors.variable(vectors.fill(0))  # of a group
        field = builder.shl(builder.trunc(top, WORD), ir.Constant(WORD, 23))
        self.lowest = vectors.splat(builder.sub(field, ir.Constant(WORD, 31 << 23)))
        self.highest = vectors.splat(builder.or_(field, ir.Constant(WORD, 0x7F_FFFF)))
        self.group: list[Any] = []

    def begin_group(self) -> None:
        self.group = [self.vectors.fill(start) for start in (0, 0, _MAGNITUDE)]

    def add(self, value: Any) -> None:
        vectors, (positive, negative, smallest) = self.vectors, self.group
        smallest = vectors.lower(smallest, vectors.magnitude(value))
        self.group = [vectors.larger(positive, value), vectors.higher(negative, value), smallest]

    def test_group(self, start: Any, leave: Callable[[], None]) -> None:
        """Leaves the loop unless all of the group is in the window, or zero."""
        vectors, builder = self.vectors, self.vectors.builder
        positive, negative, smallest = self.group
        builder.store(smallest, self.smallest)
        above = builder.or_(
            builder.icmp_signed(">", positive, self.highest),
            builder.icmp_unsigned(">", negative, builder.or_(self.highest, vectors.fill(_SIGN))),
        )
        below = builder.icmp_unsigned("<", smallest, self.lowest)
        with builder.if_then(vectors.any(builder.or_(above, below)), likely=False):
            nonzero, zeros = self._without_zeros(start)
            below = builder.icmp_unsigned("<", nonzero, self.lowest)
            with builder.if_then(vectors.any(builder.or_(above, below)), likely=False):
                leave()
            builder.store(nonzero, self.smallest)
            builder.store(zeros, self.held[3])

    def _without_zeros(self, start: Any) -> tuple[Any, Any]:
        """Return a group's smallest nonzero magnitude, and the zeros up to its end."""
        vectors, builder = self.vectors, self.vectors.builder
        before, zeros = vectors.fill(_NOTHING), builder.load(self.held[3])
        for _, value in vectors.group(start):
            magnitude = vectors.magnitude(value)
            before = vectors.lower(before, builder.sub(magnitude, vectors.fill(1)))  # at which zero wraps around
            zeros = builder.add(zeros, builder.zext(builder.icmp_unsigned("==", magnitude, vectors.fill(0)), WORDS))
        # A lane of zeros only has no smallest one: the largest of all stands for it.
        before = vectors.lower(before, vectors.fill(_MAGNITUDE - 1))
        return builder.add(before, vectors.fill(1)), zeros

    def end_group(self) -> None:
        vectors, builder = self.vectors, self.vectors.builder
        positive, negative, smallest, _ = self.held
        builder.store(vectors.larger(builder.load(positive), self.group[0]), positive)
        builder.store(vectors.higher(builder.load(negative), self.group[1]), negative)
        builder.store(vectors.lower(builder.load(smallest), builder.load(self.smallest)), smallest)

    def end(self, address: Any) -> None:
        vectors, builder = self.vectors, self.vectors.builder
        operations = (vectors.larger, vectors.higher, vectors.lower, builder.add)
        for index, (variable, operation) in enumerate(zip(self.held, operations, strict=True)):
            builder.store(vectors.reduce(builder.load(variable), operation), vectors.at(address, WORD, index))


class ExtremesAndZeros:
    """Largest bits by sign, smallest nonzero one less one, and zeros, in one look."""

    def __init__(self, vectors: Vectors, top: Any) -> None:
        builder = vectors.builder
        self.vectors = vectors
        starts = (*(vectors.fill(start) for start in (0, 0, _NOTHING)), ir.Constant(WORD, 0))
        self.held = [vectors.variable(start) for start in starts]
        field = builder.shl(builder.trunc(top, WORD), ir.Constant(WORD, 23))
        self.before = vectors.splat(builder.sub(field, ir.Constant(WORD, (31 << 23) + 1)))
        self.highest = vectors.splat(builder.or_(field, ir.Constant(WORD, 0x7F_FFFF)))
        self.group: list[Any] = []

    def begin_group(self) -> None:
        """Begins a group of vectors, whose extremes stay in registers."""
        self.group = [*(self.vectors.fill(start) for start in (0, 0, _NOTHING)), ir.Constant(WORD, 0)]

    def add(self, value: Any) -> None:
        """Takes a vector into the group's extremes and its count of zeros."""
        vectors, builder = self.vectors, self.vectors.builder
        positive, negative, before, zeros = self.group
        magnitude = vectors.magnitude(value)
        before = vectors.lower(before, builder.sub(magnitude, vectors.fill(1)))  # at which zero wraps around
        is_zero = builder.bitcast(builder.icmp_unsigned("==", magnitude, vectors.fill(0)), ir.IntType(LANES))
        zeros = builder.add(zeros, builder.zext(vectors.call(f"llvm.ctpop.i{LANES}", is_zero.type, is_zero), WORD))
        self.group = [vectors.larger(positive, value), vectors.higher(negative, value), before, zeros]

    def test_group(self, leave: Callable[[], None]) -> None:
        """Leaves the loop unless all of the group is in the window, or zero."""
        vectors, builder = self.vectors, self.vectors.builder
        positive, negative, before, _ = self.group
        above = builder.or_(
            builder.icmp_signed(">", positive, self.highest),
            builder.icmp_unsigned(">", negative, builder.or_(self.highest, vectors.fill(_SIGN))),
        )
        below = builder.icmp_unsigned("<", before, self.before)
        with builder.if_then(vectors.any(builder.or_(above, below)), likely=False):
            leave()

    def end_group(self) -> None:
        """Takes the group's extremes into those of the whole."""
        vectors, builder = self.vectors, self.vectors.builder
        positive, negative, before, zeros = self.held
        builder.store(vectors.larger(builder.load(positive), self.group[0]), positive)
        builder.store(vectors.higher(builder.load(negative), self.group[1]), negative)
        builder.store(vectors.lower(builder.load(before), self.group[2]), before)
        builder.store(builder.add(builder.load(zeros), self.group[3]), zeros)

    def end(self, address: Any) -> None:
        """Combines them with those in memory."""
        vectors, builder = self.vectors, self.vectors.builder
        operations = (vectors.larger, vectors.higher, vectors.lower, builder.add)
        for index, (variable, operation) in enumerate(zip(self.held, operations, strict=True)):
            place = vectors.at(address, WORD, index)
            found = builder.load(variable)
            if isinstance(found.type, ir.VectorType):
                found = vectors.reduce(found, operation)
            builder.store(operation(builder.load(place), found), place)


class Moments:
    """Float64 sums of values, magnitudes, squares, fourth powers, two registers each."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.held = [[vectors.no_doubles() for _ in range(2)] for _ in range(MOMENTS)]

    def add(self, pointer: Any) -> None:
        """Adds sixteen values, read again."""
        vectors, builder = self.vectors, self.vectors.builder
        for part, value in enumerate(vectors.doubles(pointer)):
            total, absolute, squares, fourths = (pair[part % 2] for pair in self.held)
            size = vectors.call(f"llvm.fabs.v{_DOUBLES}f64", FEW_DOUBLES, value)
            square = builder.fmul(value, value)  # exact: a float32 has 24 bits
            builder.store(builder.fadd(builder.load(total), value), total)
            builder.store(builder.fadd(builder.load(absolute), size), absolute)
            builder.store(vectors.multiply_add(value, value, builder.load(squares)), squares)
            builder.store(vectors.multiply_add(square, square, builder.load(fourths)), fourths)

    def end(self, address: Any, onto: bool = False) -> None:
        """Writes them to memory, or adds them to what is there."""
        builder = self.vectors.builder
        for index, (first, second) in enumerate(self.held):
            both = builder.fadd(builder.load(first), builder.load(second))
            found, place = self.vectors.reduce(both, builder.fadd), self.vectors.at(address, DOUBLE, index)
            builder.store(builder.fadd(builder.load(place), found) if onto else found, place)


@intrinsic
def sweep_and_multiply(
    _: Any, address: Any, groups: Any, top: Any, planes: Any, extremes: Any, moments: Any, factor: Any
) -> Any:
    """Sweep over groups and multiply them; return how many, up to one that is out.

    One is out if it has a value outside the window. The window is the 32 binades from exponent `top` down, and zero. Of
    the groups done, and of them alone, it writes four extremes (as `_Extremes` has them) and the moments, and
    multiplies them in place. It adds to the planes in memory the counts of these groups and of the one that it stopped
    at.
    """

    def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
        address, groups, top, planes, extremes, moments, factor = arguments
        vectors = Vectors(builder)
        counting, ends, sums = Exponents(vectors), _Extremes(vectors, top), Moments(vectors)
        first, factors = vectors.at(address, WORD), vectors.splat(factor)
        done = vectors.variable(groups)
        with cgutils.for_range(builder, groups) as loop:
            start = builder.gep(first, [builder.mul(loop.index, ir.Constant(LONG, GROUP))])
            ends.begin_group()
            for _, value in vectors.group(start):
                ends.add(value)
                counting.add(value)
            counting.end_group()

            def leave() -> None:
                builder.store(loop.index, done)
                loop.do_break()

            ends.test_group(start, leave)
            ends.end_group()
            for pointer, value in vectors.group(start):
                vectors.fetch(pointer, 4 * GROUP)
                sums.add(pointer)
                product = builder.fmul(builder.bitcast(value, SINGLES), factors)
                builder.store(product, builder.bitcast(pointer, SINGLES.as_pointer()), align=4)
        counting.end(planes)
        ends.end(extremes)
        sums.end(moments)
        return builder.load(done)

    return types.int64(*[types.int64] * 6, types.float32), generate


@intrinsic
def sweep(_: Any, address: Any, groups: Any, top: Any, planes: Any, extremes: Any, moments: Any) -> Any:
    """Sweep as `sweep_and_multiply`, only reading; does not count the last group.

    That is the one that it stopped at. What it finds it combines with what is in memory: planes, extremes (as
    `ExtremesAndZeros` has them) and moments. Zeros cost no second look, so that half of the values may be zero.
    """

    def generate(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
        address, groups, top, planes, extremes, moments = arguments
        vectors = Vectors(builder)
        counting, ends, sums = Exponents(vectors), ExtremesAndZeros(vectors, top), Moments(vectors)
        first, done = vectors.at(address, WORD), vectors.variable(groups)
        last = builder.sub(groups, ir.Constant(LONG, 1))
        ends.begin_group()
        for _, value in vectors.group(first):
            ends.add(value)
        # Extremes of the next group are taken while this one is counted: one after the other, the two more operations a
        # value of fourth powers would cost 15 % (float32, one thread of Zen 4).
        ahead = [vectors.variable(value) for value in ends.group]
        with cgutils.for_range(builder, groups) as loop:
            start = builder.gep(first, [builder.mul(loop.index, ir.Constant(LONG, GROUP))])
            ends.group = [builder.load(value) for value in ahead]

            def leave() -> None:
                builder.store(loop.index, done)
                loop.do_break()

            ends.test_group(leave)
            ends.end_group()
            more = builder.icmp_unsigned("<", loop.index, last)
            following = builder.add(loop.index, builder.zext(more, LONG))
            following = builder.gep(first, [builder.mul(following, ir.Constant(LONG, GROUP))])
            ends.begin_group()
            for (pointer, value), (_, next_value) in zip(vectors.group(start), vectors.group(following), strict=True):
                ends.add(next_value)
                counting.add(value)
                sums.add(pointer)
            counting.end_group()
            for place, value in zip(ahead, ends.group, strict=True):
                builder.store(value, place)
        counting.end(planes)
        ends.end(extremes)
        sums.end(moments, onto=True)
        return builder.load(done)

    return types.int64(*[types.int64] * 6), generate


@intrinsic
def half_to_single(_: Any, bits: Any) -> Any:
    """Return float32 bits of float16 bits, by a processor with the feature ``f16c``."""

    def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        half = builder.bitcast(builder.trunc(arguments[0], ir.IntType(16)), ir.HalfType())
        return builder.bitcast(builder.fpext(half, SINGLE), WORD)

    return types.uint32(types.uint32), generate


@intrinsic
def single_to_half(_: Any, bits: Any) -> Any:
    """Return float16 bits of float32 bits, to nearest even; needs ``f16c``."""

    def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        half = builder.fptrunc(builder.bitcast(arguments[0], SINGLE), ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.uint16(types.uint32), generate


@intrinsic
def ones_of_bit(_: Any, plane: Any, bit: Any) -> Any:
    """Count those of the sixteen words at a plane's address that have the bit set."""

    def generate(__: Any, builder: Any, ___: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        words = builder.load(vectors.at(arguments[0], WORDS), align=4)
        mask = vectors.splat(builder.shl(ir.Constant(WORD, 1), builder.trunc(arguments[1], WORD)))
        there = builder.icmp_unsigned("!=", builder.and_(words, mask), vectors.fill(0))
        bits = builder.bitcast(there, ir.IntType(LANES))
        return builder.zext(vectors.call(f"llvm.ctpop.i{LANES}", ir.IntType(LANES), bits), LONG)

    return types.int64(types.int64, types.int64), generate
