"""Weight updates and non-finite values on every backend against the reference, and rows merged."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING
from tests.support.cases import each
from tests.support.spectra import assert_same_rows

DTYPES = (*FLOATING, *EIGHT_BIT)
FAST = [status.name for status in kernels.report() if status.available and status.name != "torch"]
SPECIAL = [
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-42,
    -1e-42,
    2e-42,
    1.0,
    1 + 2**-23,
    -1.0,
    3e38,
    -3e38,
    2.0**-126,
]


@pytest.fixture(params=FAST)
def backend(request):
    return request.param


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    """One or two threads, and shares so small that these tests' tensors are cut between them."""
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads.SMALLEST_SHARE", 1 << 10)
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads._FINE_SHARE", 1 << 12)
    monkeypatch.setattr("torch.get_num_threads", lambda: request.param)


def nonfinite(name: str, tensors: list[Tensor], index: int = 1) -> list[int]:
    counts = torch.tensor([7, 100, 9])
    with kernels.use(name):
        kernels.count_nonfinite_into(tensors, counts, index)
    return counts.tolist()


def assert_counts(name: str, tensors: list[Tensor]) -> None:
    expected = 100 + sum(int((~x.double().isfinite()).sum()) for x in tensors)
    assert nonfinite(name, tensors) == nonfinite("torch", tensors) == [7, expected, 9]


def some_values(count: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(count, dtype=torch.float64)
    values[::97], values[3::101], values[5::103], values[::5] = math.nan, math.inf, -math.inf, 0
    return values.to(dtype)


@each("dtype", DTYPES, ids=str)
def test_nonfinite_of_each_dtype(backend, dtype):
    assert_counts(backend, [some_values(count, dtype) for count in (1, 100, 4096, 4097, 9000)])
    assert_counts(backend, [torch.zeros(5000).to(dtype), torch.empty(0, 3).to(dtype), torch.tensor(math.nan).to(dtype)])


@each("dtype", [*EIGHT_BIT, torch.bfloat16, torch.float16], ids=str)
def test_nonfinite_of_each_code(backend, dtype):
    if dtype.itemsize == 1:
        codes = torch.arange(256, dtype=torch.uint8)
    else:
        codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)[:: 8 if backend == "triton" else 1]
    x = codes.view(dtype)
    assert_counts(backend, [x])
    for code in range(0, len(x), max(1, len(x) // 256)):  # each in a block of its own
        if backend == "numba":
            assert_counts(backend, [x[code : code + 1]])


def test_nonfinite_edges_of_wide_dtypes(backend):
    for dtype, integer, infinity in (
        (torch.float32, torch.int32, 0x7F80_0000),
        (torch.float64, torch.int64, 0x7FF0_0000_0000_0000),
    ):
        low = torch.iinfo(integer).min
        bits = [infinity - 1, infinity, infinity + 1, low + infinity - 1, low + infinity, low + infinity + 1, low, -1]
        for bit in bits:
            assert_counts(backend, [torch.tensor([bit], dtype=integer).view(dtype)])


def test_nonfinite_of_any_strides(backend):
    x = some_values(6 * 7 * 8, torch.float32).reshape(6, 7, 8)
    views = [
        x[::2],
        x.transpose(0, 2),
        x[:, 1:3],
        x[..., 5],
        x[:1].expand(5, 7, 8),
        x[0, :, :1].expand(7, 9),
        x.flatten()[3:],
    ]
    for view in views:
        assert_counts(backend, [view])
    assert_counts(backend, [*views, x.double(), x.half()])


def test_nonfinite_on_threads(threads):
    assert_counts("numba", [some_values(size, torch.float32) for size in (20, 100_003, 50, 7000, 30_000)])
    assert_counts("numba", [some_values(100_003, torch.float16), some_values(50_001, torch.float64)])


def test_nonfinite_refuses():
    counts = kernels.new_counts(3)
    for index in (-1, 3):
        with pytest.raises(ArgumentError, match=f"expected an index from 0 to 2 .*; got index={index}"):
            kernels.count_nonfinite_into([torch.ones(2)], counts, index)
    for name in FAST:
        with (
            kernels.use(name),
            pytest.raises(UnsupportedTensorError, match="expected floating tensors; got torch.int32"),
        ):
            kernels.count_nonfinite_into([torch.ones(2, dtype=torch.int32)], counts, 0)


def updated(
    name: str, old: list[Tensor], new: list[Tensor], pushes: list[Tensor], rows: list[int]
) -> tuple[Tensor, Tensor]:
    bank, moves = kernels.new_bank(max(rows) + 2), kernels.new_moves(max(rows) + 2)
    bank.fill_(3)
    moves.fill_(5)
    with kernels.use(name):
        kernels.update_into(old, new, pushes, bank, rows, moves)
    untouched = [row for row in range(len(bank)) if row not in rows]
    assert bool((bank[untouched] == 3).all()) and bool((moves[untouched] == 5).all())
    return bank[rows], moves[rows]


def assert_same_update(
    name: str, old: list[Tensor], new: list[Tensor], pushes: list[Tensor], rows: list[int] | None = None
) -> Tensor:
    rows = list(range(len(new))) if rows is None else rows
    found, expected = updated(name, old, new, pushes, rows), updated("torch", old, new, pushes, rows)
    moves = expected[1].clone()
    assert_same_rows(found[0], expected[0])
    norms = (part[1].view(torch.float64)[:, row_layout.OLD_SUMSQ] for part in (found, expected))
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0, equal_nan=True)
    found[1][:, row_layout.OLD_SUMSQ] = expected[1][:, row_layout.OLD_SUMSQ] = 0
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    return moves


def step(count: int, dtype: torch.dtype, push: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Old values, new values of which some are the same, and pushes of which some are zero."""
    old = torch.randn(count, dtype=torch.float64).to(dtype)
    new = (old.double() + torch.randn(count, dtype=torch.float64) * 1e-3).to(dtype)
    pushes = torch.randn(count, dtype=torch.float64)
    new[::3] = old[::3]
    pushes[::4] = 0
    pushes[4::8], pushes[1::50] = -0.0, math.nan
    return old, new, pushes.to(push or dtype)


@each("dtype", DTYPES, ids=str)
@each("count", [1, 31, 1024, 1025, 5003])
def test_update_of_each_dtype(backend, dtype, count):
    old, new, push = step(count, dtype)
    moves = assert_same_update(backend, [old], [new], [push])
    if count > 1000:
        pushed, unmoved = moves[0, row_layout.PUSHED], moves[0, row_layout.UNMOVED]
        assert count > pushed > unmoved > 0


@each("push", DTYPES, ids=str)
@each("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_update_with_pushes_of_each_dtype(backend, dtype, push):
    assert_same_update(backend, *([x] for x in step(3000, dtype, push)))


@each("dtype", FLOATING, ids=str)
def test_update_of_every_pair_of_special_values(backend, dtype):
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    old, new, push = (x.flatten() for x in torch.meshgrid(special, special, special, indexing="ij"))
    assert_same_update(backend, [old.contiguous()], [new.contiguous()], [push.contiguous()])
    for place in range(0, len(old), 11 if backend == "numba" else 301):  # each in a block of its own, of its own kind
        assert_same_update(backend, [old[place : place + 1]], [new[place : place + 1]], [push[place : place + 1]])


def test_a_nan_is_the_same_as_another_nan(backend):
    old = torch.tensor([0x7FC0_0000, 0x7F80_0001, -1, 0x7F80_0000], dtype=torch.int32).view(torch.float32)
    new = torch.tensor([0x7FC0_0001, -2, -1, 0x7F80_0000], dtype=torch.int32).view(torch.float32)
    moves = assert_same_update(backend, [old], [new], [torch.ones(4)])
    assert moves[0, :2].tolist() == [4, 4]


def test_update_counts_what_a_reader_expects(backend):
    old = torch.tensor([1.0, 2.0, 3.0, 0.0, 2.0])
    new = torch.tensor([1.0, 2.5, 3.0, -0.0, 4.0])
    push = torch.tensor([0.0, 1.0, 1.0, math.nan, 0.0])
    bank, moves = updated(backend, [old], [new], [push], [0])
    assert moves[0, : row_layout.OLD_SUMSQ].tolist() == [3, 2]
    assert float(moves.view(torch.float64)[0, row_layout.OLD_SUMSQ]) == 18.0
    assert bank[0, : row_layout.POSITIVE].tolist() == [5, 3, 0, 0, 0]
    assert float(bank.view(torch.float64)[0, row_layout.SUM]) == 2.5


def test_update_without_a_push_counts_no_moves(backend):
    old, new, push = step(2000, torch.float32)
    moves = assert_same_update(backend, [old, old], [new, new], [push[:0], push])
    assert moves[0, :2].tolist() == [0, 0] and moves[1, 0] > 0
    assert float(moves.view(torch.float64)[0, 2]) > 0


def test_update_of_any_strides(backend):
    old, new, push = (x.reshape(6, 7, 10) for x in step(420, torch.float32))
    for change in (
        lambda x: x.transpose(0, 2),
        lambda x: x[::2],
        lambda x: x[:, 1:3],
        lambda x: x[..., 5],
        lambda x: x[1, 2, 3],
        lambda x: x[:, :0],
        lambda x: x.flatten()[3:],
    ):
        assert_same_update(backend, [change(old)], [change(new)], [change(push)])
    contiguous = [x.contiguous() for x in (old, new, push)]
    assert_same_update(backend, [old.transpose(0, 2).contiguous()], [new.transpose(0, 2)], [push.transpose(0, 2)])
    assert_same_update(backend, [old.transpose(0, 2)], [new.transpose(0, 2)], [push.transpose(0, 2).contiguous()])
    images = [x.reshape(2, 5, 6, 7) for x in contiguous]
    last = [x.to(memory_format=torch.channels_last) for x in images]
    assert_same_update(backend, [last[0]], [last[1]], [last[2]])
    assert_same_update(backend, [last[0]], [last[1]], [images[2]])
    assert_same_update(backend, [images[0]], [last[1]], [last[2][:0]])


def test_update_of_a_tensor_with_gaps_beyond_a_piece():
    old, new, push = (x.reshape(400, 500) for x in step(200_000, torch.float32))
    assert_same_update("numba", [old[:, ::2]], [new[:, ::2]], [push[:, ::2]])
    assert_same_update("numba", [old.bfloat16().t()], [new.bfloat16().t()], [push.t().contiguous()])


def test_update_of_many_tensors_and_rows_that_repeat(backend):
    sizes = (0, 1, 5, 63, 64, 65, 1000, 3, 2049)
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    steps = [step(size, kinds[i % 3], kinds[i % 2]) for i, size in enumerate(sizes)]
    old, new, push = (list(column) for column in zip(*steps, strict=True))
    push[6] = push[6][:0]
    assert_same_update(backend, old, new, push, rows=[9, 1, 2, 3, 8, 4, 5, 6, 7])
    assert_same_update(backend, old, new, push, rows=[0, 1, 0, 2, 2, 2, 4, 0, 1])


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_update_on_threads(threads, dtype):
    steps = [step(size, dtype, torch.bfloat16 if size == 7000 else dtype) for size in (20, 100_003, 50, 7000, 30_000)]
    old, new, push = (list(column) for column in zip(*steps, strict=True))
    push[2] = push[2][:0]
    assert_same_update("numba", old, new, push)


@pytest.fixture
def one_thread_of_torch():
    """Torch's own threads, on which the reference runs, do not flush where the one that is set to does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread_of_torch")
@each("flush", [False, True])
@each("special", SPECIAL)
def test_update_of_many_values_among_which_one_is_special(special, flush, threads):
    """Long tensors are swept; what leaves the sweep's window is counted in another way, and the sweep goes on."""
    old, new, push = step(60_000, torch.float32)
    at = torch.tensor([20_011, 40_000])
    old[at], new[at], push[at] = torch.tensor([special, 0.5]), torch.tensor([1.0, special]), 1.0
    old[50_000:50_600], new[50_000:50_600] = special, special
    old[30_000:31_000], new[30_000:31_000] = 1e-38, 1.1e-38  # the difference is subnormal: flushed, it is zero
    torch.set_flush_denormal(flush)
    try:
        assert_same_update("numba", [old], [new], [push])
    finally:
        torch.set_flush_denormal(False)


def test_update_refuses_what_does_not_belong_together():
    x, bank, moves = torch.ones(3), kernels.new_bank(2), kernels.new_moves(2)
    wrong = [([x[:2]], [x], [x]), ([x.double()], [x], [x]), ([x], [x], [x[:2]]), ([x.reshape(1, 3)], [x], [x])]
    for old, new, push in wrong:
        with pytest.raises(ArgumentError, match="update_: expected old and new values of one dtype and shape"):
            kernels.update_into(old, new, push, bank, [0], moves)
    with pytest.raises(ArgumentError, match=r"expected rows from 0 to 1; got rows=\[2\]"):
        kernels.update_into([x], [x], [x], bank, [2], moves)
    with pytest.raises(ArgumentError, match="expected an int64 matrix .* got torch.float32"):
        kernels.update_into([x], [x], [x], bank, [1], moves.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measuring_one_tensor_is_measuring_a_list_of_one(backend, dtype):
    x = some_values(5000, dtype)
    for shaped in (x, x[:100], x[7], x[:0], x.reshape(50, 100).t(), x[::3], x[:1].expand(9), x[1:]):
        one, listed = kernels.new_bank(3).fill_(4), kernels.new_bank(3).fill_(4)
        with kernels.use(backend):
            kernels.measure_one(shaped, one, 1)
            kernels.measure_into([shaped], listed, [1], accumulate=False)
        torch.testing.assert_close(one, listed, rtol=0, atol=0)


def test_measuring_one_tensor_with_the_reference_and_on_threads(threads):
    for x in (torch.randn(300_000), torch.randn(3000)):
        one, listed = kernels.new_bank(2, 16).fill_(4), kernels.new_bank(2).fill_(4)
        kernels.measure_one(x, one, 1)
        with kernels.use("torch"):
            kernels.measure_one(x, listed, 1)
        assert torch.equal(one[1, : row_layout.SUM], listed[1, : row_layout.SUM])
        assert torch.equal(one[1, row_layout.HISTOGRAM : row_layout.NARROW], listed[1, row_layout.HISTOGRAM :])
        assert bool((one[0] == 4).all()) and not bool(one[1, row_layout.NARROW :].any())


def test_measuring_one_tensor_refuses_a_row_that_is_not_there():
    bank = kernels.new_bank(2)
    for row in (-1, 2):
        with pytest.raises(ArgumentError, match=f"expected rows from 0 to 1; got rows=\\[{row}\\]"):
            kernels.measure_one(torch.ones(3), bank, row)


def test_measuring_into_a_part_of_a_bank():
    whole = kernels.new_bank(6)
    for bank in (whole[2:4], whole[::2]):
        kernels.measure_one(torch.ones(3), bank, 1)
        assert int(bank[1, row_layout.COUNT]) == 3
    assert whole[:, row_layout.COUNT].tolist() == [0, 0, 3, 3, 0, 0]


@each("name", ["numba", "torch"])
@each("count", [0, 1, 40])
def test_merged_rows_are_the_row_of_all(name, count):
    tensors = [some_values(50, torch.float32) for _ in range(count)]
    groups = np.array([i * 7 % 5 for i in range(count)], np.int64)
    rows, expected = kernels.new_bank(count), kernels.new_bank(6)
    kernels.measure_into([torch.ones(9)], expected, [2])
    target = expected.numpy().copy()
    kernels.measure_into(tensors, rows, range(count))
    kernels.measure_into(tensors, expected, groups.tolist())
    with kernels.use(name):
        kernels.merge_rows(target, groups, rows.numpy())
    found = torch.from_numpy(target)
    assert_same_rows(found, expected)


def test_merging_rows_refuses():
    target, rows = np.zeros((3, 289), np.int64), np.zeros((2, 289), np.int64)
    for groups in ([0, 3], [-1, 0]):
        with pytest.raises(ArgumentError, match="merge_rows: expected groups from 0 to 2"):
            kernels.merge_rows(target, np.array(groups), rows)
    with pytest.raises(ArgumentError, match="merge_rows: expected int64 rows, one for each of 3 groups"):
        kernels.merge_rows(target, np.array([0, 1, 2]), rows)
    with pytest.raises(ArgumentError, match="target in one piece"):
        kernels.merge_rows(target[::2], np.array([0, 1]), rows)
