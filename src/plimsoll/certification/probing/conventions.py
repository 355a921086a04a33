"""Conventions of a cast or pack, found by calls: torch or NumPy, and packed parts."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.certificate import Kind
from plimsoll.certification.probing.arrays import (
    CallFailedError,
    Result,
    Values,
    element_of,
    read_codes,
    read_values,
)
from plimsoll.certification.probing.caller import Caller, refusal
from plimsoll.formats import BlockFormat, Format
from plimsoll.rounding import Packed

CARRIERS = ("bfloat16", "float16", "float32")  # dtypes of inputs, in the order in which they are tried
SIDE = 128  # rows and columns of most inputs, since kernels for matrices often take multiples of it only
_FEW_ROWS = 8
_EXACT = (1.0, -0.5, 0.0, 2.0, -1.0, 1.5, 4.0, -3.0)  # values of every element format, no two neighbours alike

Call = Callable[[Tensor], Result]
Role = Literal["codes", "scales", "tensor scale"]
HalfOrder = Literal["low", "high"]  # the half byte of the first of two 4-bit codes


class CastConvention:
    """Calls of a cast or pack; `ArgumentError` if it takes no matrix of any dtype."""

    def __init__(self, caller: Caller, kind: Kind, fmt: Format | BlockFormat) -> None:
        self.caller = caller
        self.kind: Kind = kind
        self.fmt = fmt
        self.first: HalfOrder = "low"  # half byte of the first of two 4-bit codes
        self.order: tuple[str, ...] = ()  # roles of the parts of a packed result; none for a cast and a `Packed`
        self.rows = _FEW_ROWS  # rows of a matrix that the function takes
        self.carrier = self._settled()  # the first dtype that the function takes
        if kind == "pack":
            self._find_half_order()

    def __call__(self, x: Tensor) -> Result:
        """Return the values that the function makes of a tensor, in its shape; CallFailedError if it does not."""
        returned = self.caller(x)
        if self.kind == "cast":
            return read_values(returned)
        return read_packed(returned, self.fmt, tuple(x.shape), self.first, self.order)

    def sized(self, x: Tensor) -> Result:
        """Return the values that the function makes of a tensor, as many as it has."""
        result = self(x)
        if result.values.size != x.numel():
            raise CallFailedError(f"it returns {result.values.size} values for a tensor of shape {tuple(x.shape)}")
        return result

    @property
    def parts(self) -> str:
        """The parts of a packed result, in words."""
        named = ", ".join(self.order)
        return f"({named})" if len(self.order) > 1 else named or "Packed"

    def _settled(self) -> str:
        errors: dict[str, str] = {}
        for self.rows in (_FEW_ROWS, SIDE):  # a slow function gets few rows first
            for numpy in (False, True):
                self.caller.numpy = numpy
                for carrier in CARRIERS:
                    x = _exact_matrix(self.rows, carrier)
                    try:
                        self(x)
                        self.sized(x)  # again: the first call may have compiled something, and the time counts
                    except CallFailedError as error:
                        errors.setdefault(f"{carrier} as an array" if numpy else carrier, str(error))
                    else:
                        return carrier
        wanted = "the rounded values" if self.kind == "cast" else "a Packed, codes, or codes and scales"
        raise refusal(f"a function of one tensor that returns {wanted}", errors)

    def _find_half_order(self) -> None:
        """Read pairs of 4-bit codes by the values that they give, and keep their order."""
        x = _exact_matrix(SIDE, self.carrier)
        returned = self.caller(x)
        right: dict[HalfOrder, int] = {}
        orders: tuple[HalfOrder, ...] = ("low", "high")
        for first in orders:
            read = read_packed(returned, self.fmt, (SIDE, SIDE), first)
            right[first] = int(np.count_nonzero(np.isclose(read.values, x.double().numpy())))
            self.order = read.parts
        if element_of(self.fmt).bits == 4 and right["high"] > right["low"]:
            self.first = "high"


def _exact_matrix(rows: int, carrier: str) -> Tensor:
    values = np.resize(np.array(_EXACT), (rows, SIDE))
    return torch.from_numpy(values.copy()).to(getattr(torch, carrier))


def read_packed(
    returned: Any,
    fmt: Format | BlockFormat,
    shape: tuple[int, ...],
    first: HalfOrder = "low",
    order: tuple[str, ...] = (),
) -> Result:
    """Return what a packed tensor stands for.

    That is a `Packed`, a tensor of codes, or codes, scales and tensor scale in a tuple, list or dictionary, in any
    order: without `order`, their roles are found by size. `first`: half byte of the first of two 4-bit codes.
    """
    element = element_of(fmt)
    roles, order = _roles(returned, fmt, shape, order)
    codes = _one_a_value(read_codes(roles["codes"]), element, shape, first)
    values = element.decode(codes & ((1 << element.bits) - 1))
    if not isinstance(fmt, BlockFormat):
        return Result(values=values, dtype="codes", parts=order)
    scales = _scales(roles["scales"], fmt, shape)
    if "tensor scale" in roles:
        scales = scales * read_values(roles["tensor scale"]).values.reshape(-1)[:1]
    with np.errstate(invalid="ignore"):  # Inf times a scale of zero
        values = values * np.repeat(scales, fmt.block, axis=-1)[..., : shape[-1]]
    return Result(values=values, dtype="codes", scales=scales, parts=order)


# Roles of the parts are found by size in a matrix where no two are alike: as many codes as values or half as many
# bytes, one scale a block, one number a tensor. So `(codes, scales)` and `(scales, codes)` are both understood.
def _roles(
    returned: Any, fmt: Format | BlockFormat, shape: tuple[int, ...], order: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parts by their roles, and the roles in their order."""
    if isinstance(returned, Packed):
        parts = {"codes": returned.codes, "scales": returned.scales, "tensor scale": returned.tensor_scale}
        roles: dict[str, Any] = {role: part for role, part in parts.items() if part is not None}
        order = ()
    elif order and len(_items(returned)) == len(order):
        roles = dict(zip(order, _items(returned), strict=True))
    elif isinstance(fmt, BlockFormat):
        roles = {}
        for part in _items(returned):
            role = _role(part, fmt, shape)
            if role is not None:
                roles.setdefault(role, part)
        order = tuple(roles)
    else:
        roles, order = {"codes": _items(returned)[0]} if _items(returned) else {}, ("codes",)
    needed = ("codes", "scales") if isinstance(fmt, BlockFormat) else ("codes",)
    missing = [role for role in needed if role not in roles]
    if missing:
        raise CallFailedError(
            f"of what it returns no part has the size of {' or '.join(missing)} for a tensor of shape {shape}; "
            "expected are a Packed, or a tuple of codes and scales"
        )
    return roles, order


def _items(returned: Any) -> list[Any]:
    if isinstance(returned, dict):
        return list(cast("dict[Any, Any]", returned).values())
    if isinstance(returned, (tuple, list)):
        return list(cast("Iterable[Any]", returned))
    return [returned]


def _role(part: Any, fmt: BlockFormat, shape: tuple[int, ...]) -> Role | None:
    if isinstance(part, (int, float)):
        return "tensor scale" if fmt.tensor_scale else None
    if not isinstance(part, (Tensor, np.ndarray)):
        return None
    size = int(np.prod(tuple(cast("Tensor", part).shape), dtype=np.int64))
    values = int(np.prod(shape, dtype=np.int64))
    rows = values // shape[-1] if shape and shape[-1] else 0
    if size in (values, _halves(fmt.element, shape)):
        return "codes"
    if shape and size == rows * -(-shape[-1] // fmt.block):
        return "scales"
    return "tensor scale" if size == 1 and fmt.tensor_scale else None


def _halves(element: Format, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of codes in pairs, -1 for formats of other widths."""
    if element.bits != 4 or not shape:
        return -1
    return int(np.prod(shape[:-1], dtype=np.int64)) * -(-shape[-1] // 2)


def _one_a_value(
    codes: NDArray[np.int64], element: Format, shape: tuple[int, ...], first: HalfOrder
) -> NDArray[np.int64]:
    size = int(np.prod(shape, dtype=np.int64))
    if element.bits == 4 and codes.size == _halves(element, shape) and (codes.size != size or _is_pairs(codes, shape)):
        pairs = (codes & 15, (codes >> 4) & 15)
        both = np.stack(pairs if first == "low" else pairs[::-1], axis=-1)
        return both.reshape(*shape[:-1], -1)[..., : shape[-1]]
    if codes.size != size:
        raise CallFailedError(f"it returns {codes.size} codes for a tensor of shape {shape}")
    return codes.reshape(shape)


def _is_pairs(codes: NDArray[np.int64], shape: tuple[int, ...]) -> bool:
    """Return True if as many bytes as values hold pairs: rows of one value each."""
    return bool(shape) and shape[-1] == 1 and bool((codes > 15).any())


def _scales(part: Any, fmt: BlockFormat, shape: tuple[int, ...]) -> Values:
    """Return scales as values: integers are codes, floats over 8 bits are values."""
    dtype = str(getattr(part, "dtype", ""))
    is_code = dtype.removeprefix("torch.") in ("uint8", "int8") or (
        isinstance(part, Tensor) and part.dtype.itemsize == 1
    )
    values = fmt.scale.decode(read_codes(part) & 255) if is_code else read_values(part).values
    blocks = (*shape[:-1], -(-shape[-1] // fmt.block))
    if values.size != np.prod(blocks, dtype=np.int64):
        raise CallFailedError(f"it returns {values.size} scales for a tensor of shape {shape}")
    return values.reshape(blocks)
