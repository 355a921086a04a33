"""Inputs of a cast: all 16-bit values, and in FP32 the format's boundaries.

Boundaries come with their neighbours. A cast is called with all of them, in parts where it refuses some, and with a
sample where it is slow.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.elements.observed import Batch, Observed
from plimsoll.certification.probing.arrays import CallFailedError, Values
from plimsoll.certification.probing.caller import Caller, OutOfTimeError
from plimsoll.certification.probing.conventions import CARRIERS, SIDE, Call
from plimsoll.formats import Format, get_element
from plimsoll.text import counted

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
    """Return the inputs in a dtype: all of it up to 16 bits, else the boundaries.

    Args:
        fmt: The format of the results.
        carrier: Name of the dtype.
        limit: Largest magnitude to try. Default: any, and Inf and NaN too.
    """
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
    """Try all inputs in every dtype that the function takes.

    Args:
        caller: The function under test.
        call: A call of it that returns values of the format.
        fmt: The format.
        limit: Largest magnitude to try. Default: any, and Inf and NaN too.

    Returns:
        What was observed, and sentences on what was not tried.

    Raises:
        OutOfTimeError: There is no time for enough inputs of any dtype.
    """
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
    """Return the inputs that there is time for, boundaries first, and a sentence.

    The sentence is empty if they are all.
    """
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
