"""Conventions of a function, found by calling it: torch or NumPy, and the half byte of the first of two codes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from plimsoll.certification.certificate import Kind
from plimsoll.certification.probing.arrays import CallFailedError, Result, element_of, read_values
from plimsoll.certification.probing.caller import Caller, refusal
from plimsoll.certification.probing.packed import HalfOrder, read_packed
from plimsoll.formats import BlockFormat, Format

CARRIERS = ("bfloat16", "float16", "float32")  # dtypes of inputs, in the order in which they are tried
SIDE = 128  # rows and columns of most inputs, since kernels for matrices often take multiples of it only
_FEW_ROWS = 8
_EXACT = (1.0, -0.5, 0.0, 2.0, -1.0, 1.5, 4.0, -3.0)  # values of every element format, no two neighbours alike

Call = Callable[[Tensor], Result]


class CastConvention:
    """Calls of a cast or a pack. A function that takes no matrix of any dtype is an `ArgumentError`."""

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
        """Return the values that the function makes of a tensor, in its shape.

        Raises:
            CallFailedError: It raises an error, or returns something else.
        """
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
        """Read pairs of 4-bit codes as they give the values back, and keep the order of the parts."""
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
