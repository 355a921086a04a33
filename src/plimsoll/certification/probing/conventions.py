"""Conventions of a function, found by calling it: torch or NumPy, and the half byte of the first of two codes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plimsoll.certification.certificate import Kind
from plimsoll.certification.probing.arrays import CallFailedError, Result, Values, read_values
from plimsoll.certification.probing.caller import Caller
from plimsoll.certification.probing.packed import HalfOrder, Parts, Role, read_packed
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, Format

CARRIERS = ("bfloat16", "float16", "float32")  # dtypes of inputs, in the order in which they are tried
SIDE = 128  # rows and columns of most inputs, since kernels for matrices often take multiples of it only
_FEW_ROWS = 8
_EXACT = (1.0, -0.5, 0.0, 2.0, -1.0, 1.5, 4.0, -3.0)  # values of every element format, no two neighbours alike

Call = Callable[[Tensor], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlocks:
    """Blocks as a function returns them.

    Attributes:
        values: What they stand for.
        scales: Their scales; None where only values are returned.
        tensor_scale: The tensor's scale; 1 where there is none.
        dtype: Name of the results' dtype, "codes" for a packed result.
    """

    values: Values
    scales: Values | None
    tensor_scale: float
    dtype: str


class CastConvention:
    """How a cast or a pack is called.

    Args:
        caller: The function.
        kind: "cast" or "pack".
        fmt: The format.

    Attributes:
        carrier: The first dtype that the function takes.
        first: Half byte of the first of two 4-bit codes.
        order: Roles of the parts of a packed result in their order; none for a cast and a `Packed`.

    Raises:
        ArgumentError: The function takes no matrix of any dtype.
    """

    def __init__(self, caller: Caller, kind: Kind, fmt: Format | BlockFormat) -> None:
        self.caller = caller
        self.kind: Kind = kind
        self.fmt = fmt
        self.first: HalfOrder = "low"
        self.order: tuple[Role, ...] = ()
        self.carrier = self._settled()
        if kind == "pack":
            self._find_half_order()

    def __call__(self, x: Tensor) -> Result:
        """Return the values that the function makes of a tensor, in its shape.

        Raises:
            CallFailedError: It raises an error, or returns something else.
        """
        if self.kind == "cast":
            return read_values(self.caller(x))
        return Result(values=self.packed(x).values, dtype="codes")

    def blocks(self, x: Tensor) -> ReadBlocks:
        """Return the blocks of a tensor, along its last axis."""
        if self.kind == "cast":
            result = self(x)
            if result.values.size != x.numel():
                raise CallFailedError(f"it returns {result.values.size} values for a tensor of shape {tuple(x.shape)}")
            return ReadBlocks(values=result.values, scales=None, tensor_scale=1.0, dtype=result.dtype)
        parts = self.packed(x)
        return ReadBlocks(values=parts.values, scales=parts.scales, tensor_scale=parts.tensor_scale, dtype="codes")

    @property
    def parts(self) -> str:
        """The parts of a packed result, in words."""
        named = ", ".join(self.order)
        return f"({named})" if len(self.order) > 1 else named or "Packed"

    def packed(self, x: Tensor) -> Parts:
        """Return the parts of a packed tensor."""
        return read_packed(self.caller(x), self.fmt, tuple(x.shape), self.first, self.order)

    def _settled(self) -> str:
        errors: dict[str, str] = {}
        for rows in (_FEW_ROWS, SIDE):  # a slow function gets few rows first
            for numpy in (False, True):
                self.caller.numpy = numpy
                for carrier in CARRIERS:
                    x = _exact_matrix(rows, carrier)
                    try:
                        self(x)
                        result = self(x)  # again: the first call may have compiled something, and the time counts
                        if result.values.size == x.numel():
                            return carrier
                        error = f"it returns {result.values.size} values for a tensor of shape {tuple(x.shape)}"
                    except CallFailedError as reason:
                        error = str(reason)
                    errors.setdefault(f"{carrier} as an array" if numpy else carrier, error)
        raise ArgumentError(_refusal(self.kind, errors))

    def _find_half_order(self) -> None:
        """Read pairs of 4-bit codes as they give the values back, and keep the order of the parts."""
        element = self.fmt.element if isinstance(self.fmt, BlockFormat) else self.fmt
        x = _exact_matrix(SIDE, self.carrier)
        values = x.double().numpy()
        returned = self.caller(x)
        right: dict[HalfOrder, int] = {}
        orders: tuple[HalfOrder, ...] = ("low", "high")
        for first in orders:
            parts = read_packed(returned, self.fmt, (SIDE, SIDE), first)
            right[first] = int(np.count_nonzero(np.isclose(parts.values, values)))
            self.order = parts.order
        if element.bits == 4 and right["high"] > right["low"]:
            self.first = "high"


def _exact_matrix(rows: int, carrier: str) -> Tensor:
    values = np.resize(np.array(_EXACT), (rows, SIDE))
    return torch.from_numpy(values.copy()).to(getattr(torch, carrier))


def _refusal(kind: Kind, errors: dict[str, str]) -> str:
    wanted = {
        "cast": "a function of one tensor that returns the rounded values",
        "pack": "a function of one tensor that returns a Packed, codes, or codes and scales",
    }[kind]
    named = "; ".join(f"{carrier}: {error}" for carrier, error in errors.items())
    remedy = "Call it with device='cuda'" if "cuda" in named.lower() else "Wrap it in a function that does"
    return f"certify: expected {wanted}; got errors ({named}). {remedy}."
