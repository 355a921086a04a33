"""`fp8_cast`: every 16-bit pattern against the format's own encoder; all backends alike, layouts, counts."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from plimsoll import kernels, row_layout
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.formats import E4M3, E5M2
from plimsoll.kernels import backend as _backend, fp8_cast
from tests.support.cases import each
from tests.support.spectra import assert_same_rows

DTYPES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
CODES = list(DTYPES)
INPUTS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["torch", "numba", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    found = _backend.status(request.param)
    if not found.available:
        pytest.skip(found.detail)
    with kernels.use(request.param):
        yield request.param


def patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(64, 1024)


def values(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-30, 20, (rows, columns), generator=generator).float())
    edges = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448.0, 464.0, 2.0**-10, 61440.0, 2.0**-17])
    x.flatten()[: len(edges)] = edges[: x.numel()]
    return x.to(dtype)


def as_bytes(codes: Tensor | None) -> Tensor:
    assert codes is not None
    return codes.view(torch.uint8)


def expected_codes(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """By the format's encoder, which works on numpy's float64; a NaN's code is 0x7F."""
    scaled = x.float() * scale
    found = DTYPES[dtype].encode(scaled.nan_to_num(0.0, torch.inf, -torch.inf).double().numpy(), saturate=True)
    return torch.where(scaled.isnan(), 0x7F, torch.from_numpy(found))


@each("scale", [1.0, 0.3, 2.0**-12])
@each("dtype", CODES, ids=str)
@each("source", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern(backend: str, source: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    x = patterns(source)
    rows, columns = fp8_cast(x, dtype, torch.tensor(scale))
    expected = expected_codes(x, dtype, scale)
    assert torch.equal(as_bytes(rows), expected)
    assert torch.equal(as_bytes(columns), expected.t())
    assert not rows.float().isinf().any() and torch.equal(rows.isnan(), (x.float() * scale).isnan())


@pytest.mark.parametrize("dtype", CODES, ids=str)
@each("source", INPUTS, ids=str)
def test_layouts_sizes_and_counts(backend: str, source: torch.dtype, dtype: torch.dtype) -> None:
    x = values(source, 70, 90)
    for part in (x, x.t(), x[:, 3:50], x[::2], x[:1], x[:, :1], x[2:3, :1].expand(40, 50), x[:16, :32]):
        expected = torch.zeros(-(-part.shape[0] // 16) * 16, -(-part.shape[1] // 16) * 16, dtype=torch.uint8)
        expected[: part.shape[0], : part.shape[1]] = expected_codes(part, dtype, 0.7)
        bank, counted = kernels.new_bank(3) + 5, kernels.new_bank(1)
        both = fp8_cast(part, dtype, 0.7, bank=bank, row=1)
        assert torch.equal(as_bytes(both[0]), expected) and torch.equal(as_bytes(both[1]), expected.t())
        assert both[0].is_contiguous() and both[1].is_contiguous()
        rows, nothing = fp8_cast(part, dtype, 0.7, "rows")
        assert nothing is None and torch.equal(as_bytes(rows), expected)
        nothing, columns = fp8_cast(part, dtype, 0.7, "columns", bank, 2)
        assert nothing is None and torch.equal(as_bytes(columns), expected.t())
        with kernels.use("torch"):
            kernels.measure_into([part], counted, [0])
        assert torch.equal(bank[0], torch.full_like(bank[0], 5))
        for row in bank[1:]:
            assert_same_rows(row, counted[0])


@each("shape", [(0, 32), (32, 0), (0, 0)])
def test_empty(backend: str, shape: tuple[int, int]) -> None:
    bank = kernels.new_bank(1) + 3
    rows, columns = fp8_cast(torch.empty(shape), torch.float8_e5m2, bank=bank)
    assert rows is not None and columns is not None
    assert rows.shape == shape and columns.shape == shape[::-1]
    assert not bank.any()


def test_threads_share_a_large_matrix_and_count_it_once() -> None:
    x = values(torch.float32, 1500, 700)
    one, many = kernels.new_bank(1), kernels.new_bank(1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = fp8_cast(x, torch.float8_e4m3fn, bank=one)
        torch.set_num_threads(4)
        found = fp8_cast(x, torch.float8_e4m3fn, bank=many)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))
    assert_same_rows(many[0], one[0])
    assert int(many[0, row_layout.COUNT]) == x.numel()


def test_schema_fake_and_graph() -> None:
    operator = torch.ops.plimsoll.fp8_cast
    x, bank = torch.randn(20, 40), kernels.new_bank(2)
    for arguments in (
        (x, torch.float8_e4m3fn, 1.0, None, 2, None, 0),
        (x.bfloat16().t(), torch.float8_e5m2, 1.0, torch.tensor(2.0), 0, bank, 1),
        (x, torch.float8_e5m2, 3.0, None, 1, bank, 0),
    ):
        torch.library.opcheck(operator, arguments)  # raises where a check fails


def test_compiled_without_a_break_it_is_the_same() -> None:
    def step(x: Tensor, bank: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return fp8_cast(torch.relu(x) * 3, torch.float8_e4m3fn, 0.5, "both", bank, 1)

    x = torch.randn(50, 33)
    eager, compiled = kernels.new_bank(2), kernels.new_bank(2)
    expected = step(x, eager)
    found = torch.compile(step, fullgraph=True)(x, compiled)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))
    assert torch.equal(eager, compiled) and int(eager[1, 0]) == x.numel()


def test_what_it_refuses() -> None:
    x, dtype = torch.ones(4, 4), torch.float8_e4m3fn
    for wrong in (x[0], x.double(), x.int(), x.to(dtype), x.to_sparse()):
        with pytest.raises(UnsupportedTensorError, match="fp8_cast: expected a strided matrix of float32, bfloat16 or"):
            fp8_cast(wrong, dtype)
    with pytest.raises(ArgumentError, match="expected dtype float8_e4m3fn or float8_e5m2; got torch.float8_e4m3fnuz"):
        fp8_cast(x, torch.float8_e4m3fnuz)
    for scale in (torch.ones(2), torch.tensor(1.0, dtype=torch.float64)):
        with pytest.raises(ArgumentError, match="expected the scale to be one float32 number on cpu"):
            fp8_cast(x, dtype, scale)
    for row in (-1, 2):
        with pytest.raises(ArgumentError, match=f"expected a row of a bank on cpu; got row={row} of one with shape"):
            fp8_cast(x, dtype, bank=kernels.new_bank(2), row=row)
