"""Inputs of block formats: adversarial blocks, and single values at a known scale."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.probing.arrays import Result, Values
from plimsoll.certification.probing.conventions import SIDE, Call, CastConvention
from plimsoll.formats import BlockFormat, Format

# ordinary: far from a power of two and from where a rule's choice changes. edge: at such a place or one step off it.
# range: where the scale would leave its format, or the largest magnitude is subnormal.
BlockClass = Literal["ordinary", "edge", "range"]
_TINY = 4  # binades of the smallest values of a block
_SPREAD = np.random.default_rng(19).integers(1, 128, (64, 64)) / 128.0  # parts of the largest magnitude, in 7 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of one dtype, each in a row."""

    carrier: str  # name of the dtype
    x: Values  # the values, which the dtype holds exactly
    classes: NDArray[np.str_]  # the class of each block

    @property
    def absmax(self) -> Values:
        """Largest magnitude of each block."""
        return np.max(np.abs(self.x), axis=1)


def blocks(fmt: BlockFormat, carrier: str) -> Blocks:
    """Return the blocks to try in a dtype."""
    info = torch.finfo(getattr(torch, carrier))
    made = _for_a_mantissa(fmt) if fmt.scale.signed else _for_powers_of_two(fmt, info)
    largest = np.array([value for values in made.values() for value in values])
    classes = np.repeat(list(made), [len(values) for values in made.values()])
    represented = _held(largest, carrier)
    usable = (represented > 0) & np.isfinite(represented) & (np.abs(represented - largest) <= np.spacing(largest))
    return Blocks(carrier=carrier, x=_filled(represented[usable], fmt, carrier), classes=classes[usable])


def _for_powers_of_two(fmt: BlockFormat, info: torch.finfo) -> dict[BlockClass, list[float]]:
    """Largest magnitudes for a scale that is a power of two."""
    ulp = info.eps
    significand = fmt.element.max / 2.0**fmt.element.max_exponent  # above it the largest element is exceeded
    tie = 2 - 2.0 ** -(fmt.element.mantissa_bits + 1)  # from here on "even" rounds up
    edges = {1.0, 1 + ulp, 2 - ulp, significand, significand - ulp, significand + ulp, tie, tie - ulp, tie + ulp}
    ordinary = [1.0 + k / 16 for k in range(1, 16) if all(abs(1 + k / 16 - edge) > 1 / 64 for edge in edges)]
    lowest, highest = int(math.log2(info.smallest_normal)), int(math.log2(info.max))
    inside = [k for k in (*range(-12, 13), *range(lowest + 1, highest - 1, 9)) if _in_range(fmt, k, lowest, highest)]
    ends = [k for k in (lowest, lowest + 1, highest) if not _in_range(fmt, k, lowest, highest)]
    tiny = info.smallest_normal * info.eps
    return {
        "ordinary": [m * 2.0**k for k in inside for m in ordinary],
        "edge": [m * 2.0**k for k in inside for m in sorted(edges) if m < 2],
        "range": [
            *(m * 2.0**k for k in ends for m in (1.0, 1.25, 1.75)),
            *(tiny * part for part in (1.0, 2.0, 3.0, 0.5 / info.eps, 0.75 / info.eps)),
        ],
    }


def _in_range(fmt: BlockFormat, exponent: int, lowest: int, highest: int) -> bool:
    """Return True if each rule's scale is in E8M0's range, with normal elements."""
    scale = exponent - fmt.element.max_exponent
    spread = fmt.element.max_exponent - fmt.element.min_exponent + _TINY + 7
    return scale - 1 >= -126 and exponent - spread > lowest and exponent < highest - 1


def _for_a_mantissa(fmt: BlockFormat) -> dict[BlockClass, list[float]]:
    """Return largest magnitudes for an E4M3 scale, under a tensor scale of 1, if any."""
    scales = fmt.scale.decode(np.arange(1, fmt.scale.max_code + 1))
    ties = (scales[1:] + scales[:-1]) / 2
    quarters = np.concatenate([scales[:-1] + part * (scales[1:] - scales[:-1]) for part in (0.25, 0.75)])
    # An implementation multiplies by reciprocals or divides, so an exact tie is left out: both are allowed to miss it.
    beside = np.concatenate([ties * (1 - 2.0**-6), ties * (1 + 2.0**-6)])
    lowest = fmt.scale.smallest_normal
    return {
        "ordinary": [fmt.element.max * s for s in (*scales[scales >= lowest], *quarters[quarters > lowest])],
        "edge": [fmt.element.max * s for s in beside[beside > lowest]],
        "range": [fmt.element.max * s for s in (*scales[scales < lowest], *beside[beside < lowest])],
    }


def _held(values: Values, carrier: str) -> Values:
    with np.errstate(over="ignore"):
        return torch.from_numpy(values).to(getattr(torch, carrier)).double().numpy()


def _filled(largest: Values, fmt: BlockFormat, carrier: str) -> Values:
    """Return blocks with these largest magnitudes, among smaller values."""
    count, block = len(largest), fmt.block
    parts = np.resize(_SPREAD, (count, block))
    depth = fmt.element.max_exponent - fmt.element.min_exponent
    # Some are so small that they are subnormal at their block's scale: these show which scale it was.
    parts[:, 1::4] *= 2.0 ** -(depth + np.arange(parts[:, 1::4].shape[1]) % _TINY)
    signs = np.where(np.arange(count * block).reshape(count, block) % 3 == 0, -1.0, 1.0)
    x = np.minimum(_held(largest[:, None] * parts, carrier), largest[:, None]) * signs
    place = np.arange(count) * 7 % block
    x[np.arange(count), place] = largest * np.where(np.arange(count) % 2, -1.0, 1.0)
    return x


def ordinary_blocks(fmt: BlockFormat, count: int) -> Values:
    """Return blocks of multiples of 1/8 up to 2, one a row."""
    places = np.arange(count * fmt.block)
    values = (places * 7 % 16 + 1) / 8.0 * np.where(places % 2, -1.0, 1.0)
    return values.reshape(count, fmt.block)


# -- single values in blocks of known scale ----------------------------------------------------------------------------

# So a block format's elements are tried like any other cast. In an MX block the anchor is the largest power of two of
# the element format, at which all four rules give the scale 1. In an NVFP4 block it is the largest element. One more
# row then has the largest scale, which makes the tensor's scale 1.


def element_call(convention: CastConvention, fmt: Format | BlockFormat) -> tuple[Call, float]:
    """Return a call that rounds single values, and the largest magnitude it can try."""
    if not isinstance(fmt, BlockFormat):
        return convention.sized, math.inf
    block, limit = fmt.block, fmt.element.max if fmt.scale.signed else 2.0**fmt.element.max_exponent

    def anchored(x: Tensor) -> Result:
        count = x.numel()
        blocks = -(-count // (block - 1))
        rows = -(-blocks * block // (SIDE * SIDE)) * SIDE + SIDE  # whole multiples, with room for the largest scale
        room = torch.ones(rows * SIDE // block, block - 1, dtype=x.dtype)
        room.view(-1)[:count] = x.reshape(-1)
        # Values of a block format are put into blocks with the scale 1, and their magnitude must not change it.
        anchor = torch.full((room.shape[0], 1), limit, dtype=x.dtype)
        matrix = torch.cat([anchor, room], dim=1).reshape(rows, SIDE)
        if fmt.tensor_scale:
            matrix[-1, -block:] = fmt.element.max * fmt.scale.max
        result = convention.sized(matrix)
        elements = result.values.reshape(-1, block)[:, 1:].reshape(-1)[:count]
        return Result(values=elements.reshape(tuple(x.shape)), dtype=result.dtype)

    return anchored, limit
