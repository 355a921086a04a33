"""Inputs of a cast: every 16-bit value, and in FP32 each boundary of the format with its neighbours."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.probing.arrays import Values
from plimsoll.formats import Format, get_element

_NAN_PATTERNS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FA00000)  # quiet, signalling, all ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of one dtype.

    Attributes:
        carrier: Name of the dtype.
        bits: The bit patterns: uint16 or uint32.
        values: What they stand for.
    """

    carrier: str
    bits: NDArray[np.uint16] | NDArray[np.uint32]
    values: Values

    @property
    def format(self) -> Format:
        """The dtype's format."""
        return get_element(self.carrier, "certify")

    def tensor(self, chosen: NDArray[np.intp], columns: int) -> Tensor:
        """Return the chosen inputs in rows of so many columns, filled up with ones."""
        bits = self.bits[chosen]
        one = np.float32(1.0).view(np.uint32) if bits.dtype == np.uint32 else self._one
        rows = -(-len(bits) // columns)
        full = np.full(rows * columns, one, bits.dtype)
        full[: len(bits)] = bits
        word = torch.uint32 if bits.dtype == np.uint32 else torch.uint16
        return torch.from_numpy(full).view(word).view(getattr(torch, self.carrier)).reshape(rows, columns)

    @property
    def _one(self) -> int:
        return int(self.format.encode(1.0))


def inputs(fmt: Format, carrier: str, limit: float = np.inf) -> Inputs:
    """Return what is tried in a dtype: all of it if it has 16 bits, else the format's boundaries.

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
    kept = np.abs(values) <= limit if np.isfinite(limit) else np.ones(len(bits), np.bool_)
    return Inputs(carrier=carrier, bits=bits[kept], values=values[kept])


def boundaries(fmt: Format) -> NDArray[np.float32]:
    """Return the float32 values at which a cast can go wrong, of both signs and without NaN.

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
