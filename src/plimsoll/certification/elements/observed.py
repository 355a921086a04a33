"""A cast of single values: the inputs that it is called with, and its results."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.certificate import Outcome
from plimsoll.certification.probing.arrays import CallFailedError, Mask, Values, deviation, held, same, shortest
from plimsoll.certification.probing.caller import Caller, OutOfTimeError
from plimsoll.certification.probing.conventions import CARRIERS, SIDE, Call
from plimsoll.formats import BF16, FP16, Format, get_element
from plimsoll.formats.codec import Rounding
from plimsoll.text import counted

# -- results, next to those of the format's codec ----------------------------------------------------------------------

# Formats that an implementation may round through on its way to a narrower one.
BETWEEN: dict[str, Format] = {"fp16": FP16, "bf16": BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one dtype that the function took, with its results."""

    carrier: str  # name of the inputs' dtype
    dtype: str  # name of the results' dtype
    bits: NDArray[Any]  # bit patterns of the inputs
    x: Values  # values of the inputs
    y: Values  # values of the results; NaN where there is none
    failed: Mask  # where the function raised an error
    error: str  # the error, of the last such inputs

    @property
    def format(self) -> Format:
        """The inputs' format."""
        return get_element(self.carrier, "certify")


class Observed:
    """Inputs and results of a cast to an element format, with neighbours of inputs."""

    def __init__(self, fmt: Format, batches: list[Batch]) -> None:
        self.fmt = fmt
        self.batches = batches
        self.x = np.concatenate([batch.x for batch in batches])
        self.y = np.concatenate([batch.y for batch in batches])
        self.failed = np.concatenate([batch.failed for batch in batches])
        self.batch: NDArray[np.intp] = np.repeat(np.arange(len(batches)), [len(batch.x) for batch in batches])
        self.bits = np.concatenate([batch.bits.astype(np.uint64) for batch in batches])
        self.nan = np.isnan(self.x)
        self.inf = np.isinf(self.x)
        self.magnitude = np.where(self.nan | self.inf, 0.0, np.abs(self.x))
        self.finite = ~(self.nan | self.inf)
        self.negative = np.signbit(self.x)

    # ------------------------------------------------------------------------------------------------- the neighbours

    @cached_property
    def _code(self) -> NDArray[np.int64]:
        return self.fmt.encode(np.minimum(self.magnitude, self.fmt.max), "toward_zero", saturate=True).astype(np.int64)

    @cached_property
    def lower(self) -> Values:
        """The largest magnitude of the format that is not above the input's."""
        return self.fmt.decode(self._code)

    @cached_property
    def upper(self) -> Values:
        """The next magnitude of the format; beyond the largest, the one to follow it."""
        values = self.fmt.decode(np.arange(self.fmt.max_code + 1))
        step = 2.0 ** (self.fmt.max_exponent - self.fmt.mantissa_bits)
        return np.append(values, self.fmt.max + step)[self._code + 1]

    @cached_property
    def fraction(self) -> Values:
        """The input's exact distance from `lower` over that of `upper`: above 1 far beyond the largest value."""
        return (self.magnitude - self.lower) / (self.upper - self.lower)

    @cached_property
    def lower_is_even(self) -> Mask:
        """True where the code of `lower` is even."""
        return self._code % 2 == 0

    # ------------------------------------------------------------------------------------------ the classes of inputs

    @cached_property
    def in_range(self) -> Mask:
        """Finite inputs within the format's range, whose lower end may not be zero."""
        lowest = 0.0 if self.fmt.signed else self.fmt.smallest_normal
        signs = True if self.fmt.signed else ~self.negative
        return self.finite & (self.magnitude <= self.fmt.max) & (self.magnitude >= lowest) & signs

    @cached_property
    def normal(self) -> Mask:
        """Inputs in the range of the format's normal values."""
        return self.in_range & (self.magnitude >= self.fmt.smallest_normal)

    @cached_property
    def subnormal(self) -> Mask:
        """Inputs below the smallest normal value that are not zero."""
        return self.in_range & (self.magnitude < self.fmt.smallest_normal) & (self.magnitude > 0)

    @cached_property
    def exact(self) -> Mask:
        """Inputs that are values of the format."""
        return self.in_range & (self.fraction == 0)

    @cached_property
    def tie(self) -> Mask:
        """Inputs half-way between two values."""
        return self.in_range & (self.fraction == 0.5)

    @cached_property
    def beside_tie(self) -> Mask:
        """Inputs that rounding to float32's next value, BF16 or FP16 moves onto a tie."""
        middle = (self.lower + self.upper) / 2
        exponent = np.maximum(np.frexp(self.magnitude)[1] - 1, -126)
        near = np.abs(self.magnitude - middle) <= np.ldexp(1.0, exponent - 23)
        for between in BETWEEN.values():
            if between.mantissa_bits > self.fmt.mantissa_bits:
                near |= between.decode(between.encode(self.magnitude)) == middle
        signs = True if self.fmt.signed else ~self.negative
        return near & self.finite & (self.magnitude != middle) & (self.fraction < 1) & signs

    @cached_property
    def top(self) -> Mask:
        """Inputs above the largest value that rounding to nearest still brings back to it."""
        beyond = self.finite & (self.magnitude > self.fmt.max)
        below_threshold = self.magnitude < self.fmt.overflow_threshold
        at_threshold = (self.magnitude == self.fmt.overflow_threshold) & (not self.fmt.overflow_at_threshold)
        return beyond & (below_threshold | at_threshold) & self._signed

    @cached_property
    def overflow(self) -> Mask:
        """Finite inputs that rounding to nearest takes beyond the largest value."""
        return self.finite & (self.magnitude > self.fmt.max) & ~self.top & self._signed

    def beyond(self, rounding: Rounding) -> Mask:
        """Return the finite inputs that a rounding mode's overflow rule decides."""
        if rounding == "stochastic":  # one spacing beyond the largest value both neighbours are out of range
            return self.overflow & (self.fraction >= 1)
        return self.overflow if rounding.startswith("nearest") else self.finite & (self.magnitude > self.fmt.max)

    @property
    def _signed(self) -> Mask | bool:
        return True if self.fmt.signed else ~self.negative

    @cached_property
    def tiny_input(self) -> Mask:
        """Inputs that are subnormal in their own dtype and not zero."""
        limit = np.array([batch.format.smallest_normal for batch in self.batches])[self.batch]
        return self.finite & (self.magnitude > 0) & (self.magnitude < limit)

    # -------------------------------------------------------------------------------------------------- the comparison

    def expected(self, rounding: Rounding, saturate: bool) -> Values:
        """Return the codec's results in the results' dtypes; NaN for NaN."""
        return self._encoded(np.where(self.nan, 0.0, self.x), rounding, saturate, self.nan)

    def side_lost(self, saturate: bool) -> Mask:
        """Return where the result is the neighbouring tie's, and the input's is another."""
        middle = np.copysign((self.lower + self.upper) / 2, self.x)
        tied = self._encoded(middle, "nearest_even", saturate, ~self.beside_tie)
        # A zero may have been flushed: it says nothing of rounding.
        return (
            self.beside_tie & (self.y != 0) & same(self.y, tied) & ~same(tied, self.expected("nearest_even", saturate))
        )

    def _encoded(self, x: Values, rounding: Rounding, saturate: bool, nan: Mask) -> Values:
        values = self.fmt.decode(self.fmt.encode(x if self.fmt.signed else np.abs(x), rounding, saturate))
        return self.as_returned(np.where(nan, np.nan, values))

    def as_returned(self, values: Values) -> Values:
        """Return values as an input's own dtype has them, if it is narrower."""
        parts = [values[self.batch == index] for index in range(len(self.batches))]
        narrow = [batch.dtype == batch.carrier for batch in self.batches]
        return np.concatenate(
            [held(part, batch.dtype) if own else part
             for part, batch, own in zip(parts, self.batches, narrow, strict=True)]
        )  # fmt: skip

    def compare(self, where: Mask, expected: Values, *, sign_of_zero: bool = True) -> Outcome:
        """Return how the results compare with what is expected of the inputs in the mask."""
        right = same(self.y, expected)
        if not sign_of_zero:
            right |= (self.y == 0) & (expected == 0)
        return self.judge(where, right, expected)

    def judge(self, where: Mask, right: Mask, expected: Values) -> Outcome:
        """Return how many of the inputs at `where` are wrong, and the simplest of them."""
        tried = int(np.count_nonzero(where))
        wrong = np.flatnonzero(where & (~right | self.failed))
        if not len(wrong):
            return Outcome(tried=tried)
        index = self.simplest(wrong)
        error = self.batches[int(self.batch[index])].error if self.failed[index] else ""
        got = error or float(self.y[index])
        outcome = deviation(
            float(self.x[index]), float(expected[index]), got, self.note(index), tried=tried, wrong=len(wrong)
        )
        return replace(outcome, refused=error) if np.all(self.failed[wrong]) else outcome

    def simplest(self, indices: NDArray[np.intp]) -> int:
        """Return the input that is shortest to write; of NaN a quiet one without payload."""
        mantissa_bits = np.array([batch.format.mantissa_bits for batch in self.batches], np.uint64)[self.batch[indices]]
        one = np.uint64(1)
        quiet = one << (mantissa_bits - one)
        payload = np.bitwise_count(self.bits[indices] & ((quiet << one) - one) ^ quiet) * self.nan[indices]
        return int(indices[shortest(self.x[indices], payload, self.batch[indices], self.bits[indices])])

    def note(self, index: int) -> str:
        """Return the dtype of an input and its bits in hexadecimal."""
        batch = self.batches[int(self.batch[index])]
        digits = 8 if batch.carrier == "float32" else 4
        return f"{batch.carrier} 0x{int(self.bits[index]):0{digits}x}"


# -- inputs ------------------------------------------------------------------------------------------------------------

# Boundaries come with their neighbours. A cast is called with all of them, in parts where it refuses some, and with a
# sample where it is slow.

_FEWEST = 256  # a smaller sample of a dtype would say nothing
_SHARE = 0.25  # of the time left, for one dtype
_NAN_PATTERNS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FA00000)  # quiet, signalling, all ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of one dtype."""

    carrier: str  # name of the dtype
    bits: NDArray[np.uint16] | NDArray[np.uint32]  # the bit patterns: uint16 or uint32
    values: Values  # what they stand for

    @property
    def format(self) -> Format:
        """The dtype's format."""
        return get_element(self.carrier, "certify")

    def tensor(self, chosen: NDArray[np.intp], columns: int) -> Tensor:
        """Return the chosen inputs in rows of so many columns, filled up with ones."""
        bits = self.bits[chosen]
        padding = np.float32(1.0).view(np.uint32) if bits.dtype == np.uint32 else self._one
        rows = -(-len(bits) // columns)
        full = np.full(rows * columns, padding, bits.dtype)
        full[: len(bits)] = bits
        word = torch.uint32 if bits.dtype == np.uint32 else torch.uint16
        return torch.from_numpy(full).view(word).view(getattr(torch, self.carrier)).reshape(rows, columns)

    @property
    def _one(self) -> int:
        return int(self.format.encode(1.0))


def inputs(fmt: Format, carrier: str, limit: float = np.inf) -> Inputs:
    """Return the inputs in a dtype up to `limit`: all of it up to 16 bits, else the boundaries."""
    if carrier == "float32":
        bits = np.concatenate([boundaries(fmt).view(np.uint32), np.array(_NAN_PATTERNS, np.uint32)])
        values = _as_float64(bits.view(np.float32))
    else:
        bits = np.arange(1 << 16, dtype=np.uint16)
        values = get_element(carrier, "certify").decode(bits)
    within = np.abs(values) <= limit if np.isfinite(limit) else np.ones(len(bits), np.bool_)
    return Inputs(carrier=carrier, bits=bits[within], values=values[within])


def boundaries(fmt: Format) -> NDArray[np.float32]:
    """Return the float32 values at which a cast can go wrong, of both signs, no NaN.

    They are each value of the format, each half-way point, where overflow begins, one float32 step to either side of
    all these, and float32's own ends.
    """
    values = fmt.decode(np.arange(fmt.max_code + 1))
    step = fmt.max - float(values[-2]) if fmt.max_code else fmt.max
    upper = np.append(values[1:], fmt.max + step)
    largest = float(np.finfo(np.float32).max)
    wanted = np.concatenate([values, (values + upper) / 2, [fmt.max + step, 2 * fmt.max, 3 * fmt.max, 1e3 * fmt.max]])
    exact = wanted[wanted <= largest].astype(np.float32)
    info = np.finfo(np.float32)
    own = np.array([0.0, info.tiny, info.smallest_subnormal, info.tiny - info.smallest_subnormal, info.max, np.inf])
    positive = np.concatenate([exact, own.astype(np.float32)])
    with np.errstate(over="ignore", under="ignore"):
        near = [np.nextafter(positive, np.float32(0.0)), np.nextafter(positive, np.float32(np.inf))]
    positive = np.unique(np.concatenate([positive, *near]))
    return np.concatenate([positive, -positive])


def _as_float64(values: NDArray[np.float32]) -> Values:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float64)


def observe(caller: Caller, call: Call, fmt: Format, limit: float = np.inf) -> tuple[Observed, list[str]]:
    """Try inputs up to `limit` in every dtype that the function takes; return results, and what was not tried."""
    batches: list[Batch] = []
    refused: dict[str, str] = {}
    skipped: list[str] = []
    for carrier in CARRIERS:
        tried = inputs(fmt, carrier, limit)
        try:
            call(tried.tensor(_ordinary(tried)[:SIDE], SIDE))
        except CallFailedError as error:
            refused[carrier] = str(error)
            continue
        chosen, reason = _chosen(caller, tried, fmt)
        if reason:
            skipped.append(reason)
        if len(chosen):
            batches.append(_in_parts(call, tried, chosen))
    if not batches:
        raise OutOfTimeError(" ".join(skipped))
    skipped += [f"{carrier} inputs: the function refuses them ({error})." for carrier, error in refused.items()]
    return Observed(fmt, batches), skipped


def _ordinary(tried: Inputs) -> NDArray[np.intp]:
    """Inputs that any cast takes: positive, finite, between 1 and 2."""
    return np.flatnonzero((tried.values >= 1) & (tried.values <= 2))


def _chosen(caller: Caller, tried: Inputs, fmt: Format) -> tuple[NDArray[np.intp], str]:
    """Return the inputs that there is time for, boundaries first, and a sentence if these are not all."""
    count = len(tried.bits)
    affordable = caller.affordable(count, _SHARE)
    if affordable >= count:
        return np.arange(count), ""
    cost = f"a value takes {1e3 * caller.seconds_per_value:.2g} ms, and the limit is {caller.limit:g} s"
    if affordable < _FEWEST:
        return np.arange(0), f"{tried.carrier} inputs: {cost}."
    edges = np.isin(tried.values, np.concatenate([_edges(fmt), -_edges(fmt)])) | ~np.isfinite(tried.values)
    spread = np.zeros(count, np.bool_)
    spread[:: max(1, 2 * count // affordable)] = True
    wanted = np.concatenate([np.flatnonzero(spread), np.flatnonzero(edges & ~spread)])
    chosen = np.sort(wanted[:affordable])
    return chosen, f"{tried.carrier} inputs: {len(chosen):,} of {counted(count, 'value')} were tried, since {cost}."


def _edges(fmt: Format) -> Values:
    values = fmt.decode(np.arange(fmt.max_code + 1))
    return np.concatenate([values, (values[1:] + values[:-1]) / 2, [0.0, fmt.overflow_threshold, np.inf]])


def _in_parts(call: Call, tried: Inputs, chosen: NDArray[np.intp]) -> Batch:
    """Call the function with the chosen inputs; if it raises, class by class."""
    values = tried.values[chosen]
    y = np.full(len(chosen), np.nan)
    failed = np.zeros(len(chosen), np.bool_)
    error, dtype = "", ""
    try:
        y, dtype = _called(call, tried, chosen)
    except CallFailedError:
        size = np.abs(values)
        tiny = (size < tried.format.smallest_normal) & (size > 0)
        ordinary = np.isfinite(values) & ~tiny & (size > 0)
        positive = values > 0
        zero, infinite, nan = size == 0, np.isinf(values), np.isnan(values)
        classes = (ordinary & positive, ordinary & ~positive, tiny, zero, infinite, nan)
        for members in classes:
            where = np.flatnonzero(members)
            if not len(where):
                continue
            try:
                y[where], dtype = _called(call, tried, chosen[where])
            except CallFailedError as reason:
                failed[where], error = True, str(reason)
    return Batch(
        carrier=tried.carrier, dtype=dtype, bits=tried.bits[chosen], x=values, y=y, failed=failed, error=error
    )  # fmt: skip


def _called(call: Call, tried: Inputs, chosen: NDArray[np.intp]) -> tuple[Values, str]:
    result = call(tried.tensor(chosen, SIDE))
    return result.values.reshape(-1)[: len(chosen)], result.dtype
