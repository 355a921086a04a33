"""Block quantization with one planted fault each, in plain torch; the right form is checked against the reference."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.certification.casts import TableCast
from tests.support.formats.scalar_reference import CATALOGUE, decode


def floor_exponent(absmax: Tensor) -> Tensor:
    """The exponent of each positive number, from its bits."""
    return torch.frexp(absmax)[1] - 1


@dataclass(frozen=True, kw_only=True)
class BlockCast:
    """An MX or NVFP4 quantizer: right by default, wrong in the fields that are changed.

    `scale_of(absmax)` gives the blocks' scales, `element` rounds what is divided by them, `poison` says whether a NaN
    makes its block NaN, `pad` fills up a last short block, `tensor_scale` is of NVFP4.
    """

    element: TableCast
    block: int = 32
    scale_of: Callable[[Tensor], Tensor]
    tensor_scale: Callable[[Tensor], Tensor] | None = None
    poison: bool = True
    pad: bool = True

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Elements in the shape of x, scales of blocks, and the tensor's scale."""
        values = x.double()
        ragged = -x.shape[-1] % self.block
        if ragged and not self.pad:
            raise ValueError("the last dimension must be whole blocks")
        blocks = torch.nn.functional.pad(values, (0, ragged)).unflatten(-1, (-1, self.block))
        bad = ~blocks.isfinite().all(-1)
        clean = torch.where(blocks.isfinite(), blocks, 0.0)
        over = self.tensor_scale(clean) if self.tensor_scale and x.numel() else torch.tensor(1.0, dtype=torch.float64)
        scales = self.scale_of(clean.abs().amax(-1) / over)
        quotient = torch.where(scales[..., None] > 0, clean / (scales[..., None] * over), 0.0)
        elements = self.element(quotient.float() if self.element.name != "fp64" else quotient).double()
        elements = torch.where(quotient == 0, torch.copysign(quotient, blocks), elements)
        if self.poison:
            scales = torch.where(bad, math.nan, scales)
        return elements.flatten(-2)[..., : x.shape[-1]], scales, over

    def __call__(self, x: Tensor) -> Tensor:
        elements, scales, over = self.parts(x)
        spread = scales.repeat_interleave(self.block, -1)[..., : x.shape[-1]]
        return (elements * spread * over).to(x.dtype)


def floor_scale(largest_exponent: int, rule: Callable[[Tensor], Tensor] = floor_exponent) -> Callable[[Tensor], Tensor]:
    """The power of two of OCP MX 1.0, 6.3."""

    def scale(absmax: Tensor) -> Tensor:
        exponent = torch.where(absmax > 0, rule(torch.where(absmax > 0, absmax, 1.0)) - largest_exponent, -127)
        return torch.ldexp(torch.ones_like(absmax), exponent.clamp(-127, 127))

    return scale


def nearest_scale(absmax: Tensor) -> Tensor:
    """NVFP4's scale of a block, E4M3."""
    return TableCast(overflow=448.0, infinities=448.0)(absmax / 6).double()


def whole_tensor(clean: Tensor) -> Tensor:
    """NVFP4's scale of the tensor."""
    largest = clean.abs().max() / 2688
    return torch.where(largest > 0, largest, 1.0).float().double()


E2M1 = TableCast(name="e2m1", overflow=6.0, infinities=6.0)
E4M3 = TableCast(overflow=448.0, infinities=448.0)
MXFP4 = BlockCast(element=E2M1, scale_of=floor_scale(2))
MXFP8 = BlockCast(element=E4M3, scale_of=floor_scale(8))
NVFP4 = BlockCast(element=E2M1, block=16, scale_of=nearest_scale, tensor_scale=whole_tensor)


def packed(cast: BlockCast, x: Tensor, *, high_first: bool = False) -> tuple[Tensor, ...]:
    """Codes (two a byte for E2M1), scales and, of NVFP4, the tensor's scale."""
    elements, scales, over = cast.parts(x)
    table = torch.tensor(_magnitudes(cast.element.name), dtype=torch.float64)
    codes = torch.searchsorted(table, elements.abs().contiguous()).to(torch.uint8)
    bits = CATALOGUE[cast.element.name].bits
    codes = codes | (elements.signbit().to(torch.uint8) << (bits - 1))
    if bits == 4:
        first, second = codes[..., 0::2], codes[..., 1::2]
        second = torch.nn.functional.pad(second, (0, first.shape[-1] - second.shape[-1]))
        codes = (second | first << 4) if high_first else (first | second << 4)
    if cast.tensor_scale is None:
        exponents = torch.frexp(torch.where(scales > 0, scales, 1.0))[1] - 1
        return codes, torch.where(scales.isnan(), 255, exponents + 127).to(torch.uint8)
    return codes, scales.float(), over.float()


def _magnitudes(name: str) -> list[float]:
    spec = CATALOGUE[name]
    values = [decode(spec, code) for code in range(2 ** (spec.bits - 1))]
    return [value for value in values if math.isfinite(value)]
