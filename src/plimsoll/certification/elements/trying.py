"""Calls of a cast with all inputs, in parts where it refuses some, and with a sample where it is slow."""

import numpy as np
from numpy.typing import NDArray

from plimsoll.certification.elements.inputs import Inputs, inputs
from plimsoll.certification.elements.observed import Batch, Observed
from plimsoll.certification.probing.arrays import CallFailedError, Values
from plimsoll.certification.probing.caller import Caller, OutOfTimeError
from plimsoll.certification.probing.conventions import CARRIERS, SIDE, Call
from plimsoll.formats import Format
from plimsoll.text import counted

_FEWEST = 256  # a smaller sample of a dtype would say nothing
_SHARE = 0.25  # of the time left, for one dtype


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
    """The inputs that there is time for, the boundaries of the format first, and a sentence if they are not all."""
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
    """Call the function with all chosen inputs; where it raises, with one class of them after the other."""
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
        classes = (
            ordinary & (values > 0),
            ordinary & (values < 0),
            tiny,
            size == 0,
            np.isinf(values),
            np.isnan(values),
        )
        for members in classes:
            where = np.flatnonzero(members)
            if not len(where):
                continue
            try:
                y[where], dtype = _called(call, tried, chosen[where])
            except CallFailedError as reason:
                failed[where], error = True, str(reason)
    return Batch(
        carrier=tried.carrier, dtype=dtype, bits=tried.bits[chosen], x=values, y=y, failed=failed, error=error,
        smallest_normal=tried.format.smallest_normal,
        mantissa_bits=tried.format.mantissa_bits,
    )  # fmt: skip


def _called(call: Call, tried: Inputs, chosen: NDArray[np.intp]) -> tuple[Values, str]:
    tensor = tried.tensor(chosen, SIDE)
    result = call(tensor)
    if result.values.size != tensor.numel():
        raise CallFailedError(f"it returns {result.values.size} values for {tensor.numel()}")
    return result.values.reshape(-1)[: len(chosen)], result.dtype
