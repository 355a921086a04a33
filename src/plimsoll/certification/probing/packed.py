"""Packed results: which part is codes, which scales, and the values that they stand for.

Roles are found by size in a matrix where no two are alike: as many codes as values or half as many bytes, one scale a
block, one number a tensor. So ``(codes, scales)`` and ``(scales, codes)`` are both understood.
"""

from collections.abc import Iterable
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.probing.arrays import CallFailedError, Result, Values, element_of, read_codes, read_values
from plimsoll.formats import BlockFormat, Format
from plimsoll.rounding import Packed

Role = Literal["codes", "scales", "tensor scale"]
HalfOrder = Literal["low", "high"]  # the half byte of the first of two 4-bit codes


def read_packed(
    returned: Any,
    fmt: Format | BlockFormat,
    shape: tuple[int, ...],
    first: HalfOrder = "low",
    order: tuple[str, ...] = (),
) -> Result:
    """Return what a packed tensor stands for.

    Args:
        returned: A `Packed`, a tensor of codes, or a tuple, list or dictionary of codes, scales and tensor scale in
            any order.
        fmt: The format.
        shape: Shape of the tensor that was packed.
        first: Half byte of the first of two 4-bit codes. Default: "low".
        order: Roles of the parts, where they are known. Default: they are found by size.

    Raises:
        CallFailedError: The parts cannot be told apart, or do not fit the shape.
    """
    element = element_of(fmt)
    found, order = _roles(returned, fmt, shape, order)
    codes = _one_a_value(read_codes(found["codes"]), element, shape, first)
    values = element.decode(codes & ((1 << element.bits) - 1))
    if not isinstance(fmt, BlockFormat):
        return Result(values=values, dtype="codes", parts=order)
    scales = _scales(found["scales"], fmt, shape)
    if "tensor scale" in found:
        scales = scales * read_values(found["tensor scale"]).values.reshape(-1)[:1]
    with np.errstate(invalid="ignore"):  # Inf times a scale of zero
        values = values * np.repeat(scales, fmt.block, axis=-1)[..., : shape[-1]]
    return Result(values=values, dtype="codes", scales=scales, parts=order)


def _roles(
    returned: Any, fmt: Format | BlockFormat, shape: tuple[int, ...], order: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parts by their roles, and the roles in their order."""
    if isinstance(returned, Packed):
        parts = {"codes": returned.codes, "scales": returned.scales, "tensor scale": returned.tensor_scale}
        found: dict[str, Any] = {role: part for role, part in parts.items() if part is not None}
        order = ()
    elif order and len(_items(returned)) == len(order):
        found = dict(zip(order, _items(returned), strict=True))
    elif isinstance(fmt, BlockFormat):
        found = {}
        for part in _items(returned):
            role = _role(part, fmt, shape)
            if role is not None:
                found.setdefault(role, part)
        order = tuple(found)
    else:
        found, order = {"codes": _items(returned)[0]} if _items(returned) else {}, ("codes",)
    needed = ("codes", "scales") if isinstance(fmt, BlockFormat) else ("codes",)
    missing = [role for role in needed if role not in found]
    if missing:
        raise CallFailedError(
            f"of what it returns no part has the size of {' or '.join(missing)} for a tensor of shape {shape}; "
            "expected are a Packed, or a tuple of codes and scales"
        )
    return found, order


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
    """Return the number of bytes of codes packed in pairs, -1 for formats of another width."""
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
    """Whether as many bytes as values hold pairs all the same: rows of one value each."""
    return bool(shape) and shape[-1] == 1 and bool((codes > 15).any())


def _scales(part: Any, fmt: BlockFormat, shape: tuple[int, ...]) -> Values:
    """Return the scales as values: integers are codes, floats of more than 8 bits are the values themselves."""
    dtype = str(getattr(part, "dtype", ""))
    is_code = dtype.removeprefix("torch.") in ("uint8", "int8") or (
        isinstance(part, Tensor) and part.dtype.itemsize == 1
    )
    values = fmt.scale.decode(read_codes(part) & 255) if is_code else read_values(part).values
    blocks = (*shape[:-1], -(-shape[-1] // fmt.block))
    if values.size != np.prod(blocks, dtype=np.int64):
        raise CallFailedError(f"it returns {values.size} scales for a tensor of shape {shape}")
    return values.reshape(blocks)
