"""Rows of errors on every backend, against sums of Python's own numbers."""

import math

import pytest
import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.errors import ArgumentError
from plimsoll.kernels.dtypes import EIGHT_BIT
from tests.support.cases import each

BACKENDS = [status.name for status in kernels.report() if status.available]
SUMS = (row_layout.ERROR, row_layout.ERRORSQ, row_layout.REFERENCE, row_layout.REFERENCESQ, row_layout.ERROR_REFERENCE)


def compared(backend: str, values: Tensor, reference: Tensor, row: Tensor | None = None) -> Tensor:
    row = torch.zeros(row_layout.ERRORS, dtype=torch.float64) if row is None else row
    with kernels.use(backend):
        kernels.compare_into(values, reference, row)
    return row


def expected(values: Tensor, reference: Tensor) -> tuple[list[float], list[float]]:
    """The row by scalar arithmetic, sums rounded once, and the bound on the error of each sum."""
    pairs = list(zip(values.double().flatten().tolist(), reference.double().flatten().tolist(), strict=True))
    finite = [(y, x) for y, x in pairs if math.isfinite(y) and math.isfinite(x)]
    errors = [y - x for y, x in finite]
    columns = [
        errors,
        [e * e for e in errors],
        [x for _, x in finite],
        [x * x for _, x in finite],
        [e * x for e, (_, x) in zip(errors, finite, strict=True)],
    ]
    row = [0.0] * row_layout.ERRORS
    row[row_layout.COMPARED] = len(finite)
    for place, column in zip(SUMS, columns, strict=True):
        row[place] = math.fsum(column)
    row[row_layout.LARGEST_ERROR] = max(map(abs, errors), default=0.0)
    row[row_layout.MADE_NONFINITE] = sum(math.isfinite(x) and not math.isfinite(y) for y, x in pairs)
    row[row_layout.REFERENCE_NONFINITE] = sum(not math.isfinite(x) for _, x in pairs)
    row[row_layout.UNDERFLOWED] = sum(y == 0 and (x < 0 or x > 0) for y, x in pairs)
    row[row_layout.STRUCTURAL] = sum(y == 0 and x == 0 for y, x in pairs)
    # n additions and one product each, in float64, of numbers that add up to so much without their signs.
    bounds = [(len(finite) + 2) * 2.0**-52 * math.fsum(map(abs, column)) for column in columns]
    return row, bounds


def assert_row(row: Tensor, values: Tensor, reference: Tensor) -> None:
    wanted, bounds = expected(values, reference)
    found = row.tolist()
    for place, bound in zip(SUMS, bounds, strict=True):
        assert abs(found[place] - wanted[place]) <= bound, place
    largest = row_layout.LARGEST_ERROR
    assert found[largest] == pytest.approx(wanted[largest], rel=2.0**-23)  # of a difference in float32
    rest = set(range(row_layout.ERRORS)) - {*SUMS, largest}
    assert {place: found[place] for place in rest} == {place: wanted[place] for place in rest}


def pair(count: int, dtype: torch.dtype, wide: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Values and a reference with NaN, Inf and zeros on either side and on both."""
    reference = torch.randn(count, dtype=wide) * torch.logspace(-6, 6, count, base=2, dtype=wide)
    values = (reference * (1 + 2.0**-6 * torch.randn(count))).to(dtype)
    for start, value in ((0, math.nan), (5, math.inf), (7, 0.0), (11, -0.0)):
        reference[start::97] = value
        if dtype not in EIGHT_BIT:
            values[start + 1 :: 89] = value
            values[start::101] = value
    return values, reference


@each("backend", BACKENDS)
@each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
@each("count", [0, 1, 1023, 1025, 5000])
def test_a_row_is_that_of_scalar_arithmetic(backend: str, dtype: torch.dtype, count: int) -> None:
    values, reference = pair(count, dtype)
    assert_row(compared(backend, values, reference), values, reference)


@each("backend", BACKENDS)
def test_rows_add_up_but_for_the_largest_error(backend: str) -> None:
    values, reference = pair(3000, torch.float32, torch.float64)
    row = compared(backend, values[:1700], reference[:1700])
    compared(backend, values[1700:], reference[1700:], row)
    assert_row(row, values, reference)


@each("backend", BACKENDS)
def test_tensors_that_lie_otherwise_in_memory(backend: str) -> None:
    values, reference = (x.reshape(50, 60) for x in pair(3000, torch.bfloat16))
    assert_row(compared(backend, values.t(), reference.t().contiguous()), values.t(), reference.t())
    some = values[:, ::3], reference[:, ::3]
    assert_row(compared(backend, *some), *some)


@pytest.mark.parametrize("threads", [1, 3])
def test_shares_of_several_threads_add_up(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if "numba" not in BACKENDS:
        pytest.skip("no Numba here")
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads.SMALLEST_SHARE", 1 << 10)
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads._FINE_SHARE", 1 << 10)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    values, reference = pair(10_001, torch.float32)
    assert_row(compared("numba", values, reference), values, reference)


def test_tensors_of_two_shapes_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"expected a reference of the values' shape .* got values of \(3,\)"):
        kernels.compare_into(torch.ones(3), torch.ones(4), torch.zeros(row_layout.ERRORS, dtype=torch.float64))
