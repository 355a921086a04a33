"""`pack` and `unpack`: codes and scales of a tensor, and their values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.formats import BlockFormat, Format
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING
from plimsoll.kernels.operators.checks import check_tensor
from plimsoll.kernels.torch_backend import from_codes, to_carrier
from plimsoll.rounding import arguments
from plimsoll.rounding.arguments import Generator
from plimsoll.rounding.casting import from_rows, is_sharded, rows_of, tensor_scale

_WIDEST_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Codes of a tensor.

    Attributes:
        codes: Codes in the tensor's shape with the axis of blocks last, uint8 for up to 8 bits and uint16 above.
            Formats of 4 bits have two codes in a byte, the first in the low half, and an odd row ends in a half byte
            of zero. The codes of a scalar have no dimension.
        scales: For block formats, the code of each block's scale (uint8), with blocks along the last axis. A scalar is
            one block. Otherwise None.
        tensor_scale: NVFP4's FP32 scale, otherwise None.
        scale: The scale that values were multiplied by. None for 1.
        format: Format of the codes.
        shape: Shape of the packed tensor.
        axis: Axis along which blocks run.
        dtype: Dtype of the packed tensor.
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None
    scale: float | Tensor | None
    format: Format | BlockFormat
    shape: torch.Size
    axis: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes of codes and scales."""
        parts = (self.codes, self.scales, self.tensor_scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def single_codes(self) -> Tensor:
        """Return one code per element, with the axis of blocks last."""
        if self._element.bits != 4:
            return self.codes
        if not self.shape:
            return self.codes & 15
        pairs = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        return pairs.flatten(-2)[..., : self.shape[self.axis]]

    @property
    def _element(self) -> Format:
        return self.format.element if isinstance(self.format, BlockFormat) else self.format


def pack(
    x: Tensor,
    fmt: object,
    *,
    rounding: str = "nearest_even",
    saturate: bool | None = None,
    scale: float | Tensor | None = None,
    scale_rule: str = "floor",
    axis: int = -1,
    generator: Generator = None,
) -> Packed:
    """Return the codes of a tensor, rounded as by `cast` with the same arguments.

    Args:
        x: A floating tensor. A block format keeps a NaN as a NaN scale, and the block's codes are then zero.
        fmt: A block format, or an element format of at most 16 bits.
        rounding: As for `cast`.
        saturate: As for `cast`.
        scale: As for `cast`; `unpack` divides by it.
        scale_rule: As for `cast`.
        axis: As for `cast`.
        generator: As for `cast`.

    Raises:
        ArgumentError: The format is too wide, has no code for a NaN in `x`, or an argument contradicts another.
        UnsupportedTensorError: `x` is no strided tensor of floating values, or a DTensor.

    >>> packed = pack(torch.tensor([1.0, 0.3, -7.0]), "mxfp4")
    >>> packed.single_codes(), packed.scales, packed.nbytes
    (tensor([ 2,  1, 15], dtype=torch.uint8), tensor([127], dtype=torch.uint8), 3)
    """
    check_tensor(x, "pack")
    if is_sharded(x):
        raise UnsupportedTensorError("pack: expected a plain tensor; got a DTensor. Pack x.to_local() on each rank.")
    plan = arguments.plan("pack", fmt, rounding=rounding, saturate=saturate, scale_rule=scale_rule, axis=axis)
    x, axis = x.detach(), plan.axis
    numbers = arguments.numbers("pack", x, plan, scale, generator)
    matrix = rows_of(x, axis, "pack")
    if isinstance(plan.format, BlockFormat):
        over = tensor_scale(matrix, plan.format, numbers.scale, numbers.scale_tensor)
        codes, scales = kernels.ops.block_pack(matrix, plan.ints, over, *numbers)
        over = over if plan.format.tensor_scale else None
        scales = _unflatten(scales, x.shape, axis) if x.shape else scales.reshape(1)
    else:
        _check_element(x, plan.format)
        over, scales = None, None
        codes = kernels.ops.pack(matrix, plan.ints, *numbers)
    return Packed(
        codes=_unflatten(codes, x.shape, axis),
        scales=scales,
        tensor_scale=over,
        scale=scale,
        format=plan.format,
        shape=x.shape,
        axis=axis,
        dtype=x.dtype,
    )


def unpack(packed: Packed, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of codes, which are those of `cast`.

    Args:
        packed: Codes that `pack` made.
        dtype: Dtype of the result. Default: None, that of the tensor that was packed.

    Raises:
        ArgumentError: `dtype` is no floating dtype.

    >>> import plimsoll
    >>> x = torch.randn(4, 100)
    >>> torch.equal(unpack(pack(x, "nvfp4")), plimsoll.cast(x, "nvfp4"))
    True
    """
    dtype = packed.dtype if dtype is None else dtype
    if dtype not in FLOATING and dtype not in EIGHT_BIT:
        raise ArgumentError(f"unpack: expected dtype to be a floating torch dtype of at most 64 bits; got {dtype}.")
    fmt = packed.format
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    values = _decode(packed.single_codes(), element)
    matrix = rows_of(values, -1, "unpack")
    if isinstance(fmt, BlockFormat) and packed.scales is not None:
        factors = _decode(rows_of(packed.scales, -1, "unpack"), fmt.scale)
        if packed.tensor_scale is not None:
            factors = factors * packed.tensor_scale.to(torch.float64)
        ragged = -matrix.shape[1] % fmt.block
        blocks = torch.nn.functional.pad(matrix, (0, ragged)).reshape(*factors.shape, fmt.block)
        matrix = (blocks * factors[..., None]).flatten(1)[:, : matrix.shape[1]]
    if packed.scale is not None:
        matrix = matrix / packed.scale
    return from_rows(to_carrier(matrix, dtype), packed.shape, packed.axis).contiguous()


def _decode(codes: Tensor, fmt: Format) -> Tensor:
    table = from_codes(torch.arange(1 << fmt.bits, device=codes.device), fmt)
    return table[codes.to(torch.int64)]


def _unflatten(matrix: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return rows in the leading dimensions, with the axis of blocks last."""
    if not shape:
        return matrix.reshape(())
    axis %= len(shape)
    return matrix.reshape([size for dim, size in enumerate(shape) if dim != axis] + [matrix.shape[1]])


def _check_element(x: Tensor, fmt: Format) -> None:
    if fmt.bits > _WIDEST_BITS:
        raise ArgumentError(
            f"pack: expected an element format of at most {_WIDEST_BITS} bits; got {fmt.name} ({fmt.bits} bits). "
            "Use cast, which returns values."
        )
    if fmt.has_nan or not x.numel() or x.is_meta:
        return
    bank = kernels.new_bank(1, device=x.device)
    kernels.measure_into([x], bank, [0])
    nans = int(bank[0, row_layout.NANS])
    if nans:
        raise ArgumentError(
            f"pack: expected no NaN for {fmt.name}, which has no code for it; got {nans} in {x.dtype}, "
            f"shape {tuple(x.shape)}. Use cast, which keeps NaN, or replace them with torch.nan_to_num."
        )
