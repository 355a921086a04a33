"""A sum or a matrix product as one thing: a function that adds up terms.

A term of a sum is an element. A term of a product is the product of two operands, so its range is twice as wide. Terms
of many sums go into one matrix product: row r of the left operand and column r of the right one hold those of sum r.
"""

import math
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.certificate import Kind
from plimsoll.certification.probing.arrays import CallFailedError, Result, Values, format_of_dtype, read_values
from plimsoll.certification.probing.caller import Caller, refusal
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.formats import Format, get_element

_TRIED = 2  # random sums that show which places of a product are computed alike


class Reducer:
    """A sum of a vector, or a product of two matrices, under test."""

    def __init__(self, caller: Caller, kind: Kind, fmt: Format) -> None:
        self.caller = caller
        self.kind: Kind = kind
        self.fmt = fmt
        self.seconds_per_call = math.inf
        self._alike: dict[int, NDArray[np.intp]] = {}
        self.dtype, self.result = self._settled()

    # Inputs have the format's own dtype if the function takes it, else float32. A function that takes neither is an
    # `ArgumentError`.
    def _settled(self) -> tuple[str, str]:
        own = [self.fmt.torch_dtype] if self.fmt.torch_dtype and hasattr(torch, self.fmt.torch_dtype) else []
        errors: dict[str, str] = {}
        for numpy in (False, True):
            self.caller.numpy = numpy
            for dtype in dict.fromkeys([*own, "float32"]):
                self.dtype = dtype
                try:
                    return dtype, self._trial().dtype
                except CallFailedError as error:
                    errors.setdefault(dtype, str(error))
        wanted = {
            "sum": "a function of a vector that returns its sum",
            "matmul": "a function of two matrices, of shapes (M, K) and (K, N), that returns their product",
        }[self.kind]
        raise refusal(wanted, errors)

    def _trial(self) -> Result:
        """Call the function twice, since the first may compile, and time the second."""
        ones = np.ones((SIDE, SIDE))
        call = (lambda: self.product(ones, ones)) if self.kind == "matmul" else (lambda: self.total(ones[0]))
        call()
        start = time.perf_counter()
        result = call()
        self.seconds_per_call = time.perf_counter() - start
        if format_of_dtype(result.dtype) is None:
            raise CallFailedError(f"it returns {result.dtype}, which is no floating dtype")
        return result

    # ---------------------------------------------------------------------------------------------------- single calls

    def tensor(self, values: Values) -> Tensor:
        """Return values of the format as a tensor that the function takes."""
        exact = torch.from_numpy(np.array(values, np.float64))
        dtype = getattr(torch, self.dtype)
        if dtype.itemsize > 1:
            return exact.to(dtype)
        # By the codec: torch's own cast to 8 bits may be under test.
        return torch.from_numpy(self.fmt.encode(values).astype(np.uint8)).view(dtype)

    def product(self, left: Values, right: Values) -> Result:
        """Return the product of two matrices of values of the format."""
        return self.read(self.tensor(left), self.tensor(right), shape=(left.shape[0], right.shape[1]))

    def total(self, values: Values) -> Result:
        """Return the sum of a vector of values of the format."""
        return self.read(self.tensor(values), shape=())

    def read(self, *tensors: Tensor, shape: tuple[int, ...]) -> Result:
        """Return the result for tensors, in the shape that it must have; CallFailedError without such a result."""
        result = read_values(self.caller(*tensors))
        if result.values.size != int(np.prod(shape, dtype=np.int64)):
            raise CallFailedError(f"it returns shape {result.values.shape} where {shape} was expected")
        return Result(values=result.values.reshape(shape), dtype=result.dtype)

    # ------------------------------------------------------------------------------------------------------ many sums

    @property
    def highest(self) -> int:
        """Exponent of the largest term that is a power of two."""
        return self.fmt.max_exponent * self._operands

    @property
    def lowest(self) -> int:
        """Exponent of the smallest term."""
        return int(np.log2(self.fmt.smallest_subnormal)) * self._operands

    @property
    def _operands(self) -> int:
        return 2 if self.kind == "matmul" else 1

    @property
    def result_format(self) -> Format:
        """Format of the results."""
        return get_element(self.result, "certify")

    def sums(self, terms: Values) -> Values:
        """Return the sum of each row of terms: the format's significands times powers.

        The powers are of two.
        """
        if self.kind == "sum":
            return np.array([float(self.total(row).values) for row in terms])
        left, right = self._factors(terms)
        return self.sums_of_products(left, right)

    def sums_of_products(self, left: Values, right: Values) -> Values:
        """Return for each row the sum of the products of two rows of operands."""
        sums: list[Values] = []
        places = self._places(left.shape[1])
        for begin in range(0, len(left), len(places)):
            rows = left[begin : begin + len(places)]
            used = places[: len(rows)]
            a, b = np.zeros((SIDE, left.shape[1])), np.zeros((SIDE, left.shape[1]))
            a[used], b[used] = rows, right[begin : begin + len(rows)]
            sums.append(np.diagonal(self.product(a, b.T).values)[used])
        return np.concatenate(sums)

    # A library may compute some columns of a product otherwise than others: numpy.dot on a Zen processor rounds the
    # products of some before it adds them. Sums of both kinds together show an order and a rounding that neither has.
    def _places(self, length: int) -> NDArray[np.intp]:
        """Return the diagonal places computed as the first one is; all if these are few."""
        if length not in self._alike:
            alike = np.ones(SIDE, dtype=bool)
            for left, right in np.random.default_rng(length).standard_normal((_TRIED, 2, length)):
                sums = np.diagonal(self.product(np.tile(left, (SIDE, 1)), np.tile(right, (SIDE, 1)).T).values)
                alike &= sums == sums[0]
            places = np.flatnonzero(alike)
            self._alike[length] = places if len(places) >= SIDE // 8 else np.arange(SIDE)
        return self._alike[length]

    def _factors(self, terms: Values) -> tuple[Values, Values]:
        """Split each term into an operand with its significand and a power of two."""
        significand, exponent = np.frexp(terms)
        exponent = exponent - 1
        half = np.clip(exponent // 2, int(np.log2(self.fmt.smallest_subnormal)), self.fmt.max_exponent)
        rest = np.clip(exponent - half, int(np.log2(self.fmt.smallest_subnormal)), self.fmt.max_exponent)
        return np.ldexp(2 * significand, exponent - rest), np.where(terms == 0, 0.0, np.ldexp(1.0, rest))
