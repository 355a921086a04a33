"""Measuring on every backend against the reference: exact in counts, blocks and extremes, 1e-12 in sums."""

import contextlib
import functools
import math
import os
import threading

import pytest
import torch

from plimsoll import kernels, row_layout
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING
from plimsoll.kernels.numba_backend.measuring import launch
from tests.support.cases import each
from tests.support.spectra import assert_same_rows

DTYPES = (*FLOATING, *EIGHT_BIT)
FAST = [status.name for status in kernels.report() if status.available and status.name != "torch"]
TOLERANCE = {"numba": 1e-12, "triton": 1e-6}


@pytest.fixture(params=FAST)
def backend(request):
    return request.param


@pytest.fixture
def threads(monkeypatch):
    """Three threads, and shares so small that these tests' tensors are cut between them."""
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads.SMALLEST_SHARE", 1 << 10)
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads._FINE_SHARE", 1 << 12)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)


def rows_of(name: str, tensors: list[torch.Tensor], block: int = 0, rows: list[int] | None = None) -> torch.Tensor:
    rows = list(range(len(tensors))) if rows is None else rows
    bank = kernels.new_bank(max(rows, default=-1) + 1, block)
    with kernels.use(name):
        kernels.measure_into(tensors, bank, rows, block=block)
    return bank


def assert_agrees(name: str, tensors: list[torch.Tensor], block: int = 0, rows: list[int] | None = None) -> None:
    expected, found = rows_of("torch", tensors, block, rows), rows_of(name, tensors, block, rows)
    assert_same_rows(found, expected, TOLERANCE[name])


def wide_values(count: int) -> torch.Tensor:
    """Float64 values over hundreds of binades, with zeros, both infinities, NaN and -0 among them."""
    values = torch.randn(count, dtype=torch.float64) * torch.exp(20 * torch.randn(count, dtype=torch.float64))
    values[::7] = 0
    values[5], values[9], values[11], values[count // 2] = math.nan, -math.inf, -0.0, math.inf
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each("count", [100, 4096, 10_007])
def test_any_values(backend, dtype, count):
    assert_agrees(backend, [wide_values(count).to(dtype)])
    assert_agrees(backend, [torch.randn(count).to(dtype)])


def powers(low: int, high: int, count: int) -> torch.Tensor:
    """Values of random signs whose binades are all those from low to high, both included."""
    exponents = torch.randint(low, high + 1, (count,))
    exponents[:2] = torch.tensor([low, high])
    values = torch.ldexp(1 + torch.rand(count, dtype=torch.float64), exponents) * (torch.randint(2, (count,)) * 2 - 1)
    return values.to(torch.float32)


def with_each(x: torch.Tensor, places: range, value: float) -> torch.Tensor:
    return x.index_fill(0, torch.tensor(places), value)


LONG = 60_000
PLACES = torch.arange(LONG)
SWEPT = {  # float32 tensors long enough for the CPU's sweep, each of which asks something else of it
    "normal": lambda x: x,
    "one_sign": lambda x: -x.abs(),
    "half_zero": lambda x: x * (torch.rand(LONG) < 0.5),
    "zero_stretches": lambda x: x * (PLACES % 9000 < 5000),
    "window_moves": lambda x: x * torch.where(PLACES < 19_000, 1.0, torch.where(PLACES < 40_000, 2.0**-60, 2.0**40)),
    "outliers": lambda x: with_each(with_each(x, range(7000, LONG, 20_000), 1e30), range(12_345, LONG, 9999), -1e-30),
    "subnormals": lambda x: with_each(x, range(5000, LONG, 9001), -1e-40),
    "nan": lambda x: with_each(x, range(5000, LONG, 9000), math.nan),
    "infinite": lambda x: with_each(with_each(x, range(5000, LONG, 19_000), -math.inf), range(9000, LONG, 20_000), 9e9),
    "all_tiny": lambda _: powers(-126, -110, LONG),
    "all_huge": lambda _: powers(95, 115, LONG),
    "a_window_wide": lambda _: powers(-27, 4, LONG),
    "one_binade_more": lambda _: powers(-28, 4, LONG),
    "very_wide": lambda _: powers(-120, 60, LONG),
    "few_binades": lambda _: powers(0, 3, LONG),
}


@each("name", SWEPT)
def test_long_float32_on_the_cpu(name):
    x = SWEPT[name](torch.randn(LONG))
    for length in (LONG, 16_383, 16_384, 16_384 + 255, 4096 + 64 * 256 + 1):
        assert_agrees("numba", [x[:length], x[length:]], rows=[1, 0])
    assert_agrees("numba", [x[1:], x[3:], x.view(-1, 4).t(), x[::2]])


def test_windows_that_touch_on_the_cpu():
    for top in (-95, -94, -63, 0, 1, 31, 60):
        for low in (top - 31, top - 32, top - 33):
            if low >= -126:
                first = powers(max(top - 20, -126), top, 9000)
                assert_agrees("numba", [torch.cat([first, powers(low, low, 9000)])])


def test_more_values_than_the_planes_of_a_sweep_hold():
    """Lanes that are all one binade but for the block that starts the sweep fill the planes first."""
    assert_agrees("numba", [torch.cat([torch.randn(8192), torch.ones(2_200_000), torch.randn(100_000)])])


@each("dtype", DTYPES, ids=str)
def test_every_code(backend, dtype):
    if dtype.itemsize == 1:
        x = torch.arange(256, dtype=torch.uint8).view(dtype)
    elif dtype.itemsize == 2:
        x = (
            torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
            .to(torch.int16)
            .view(dtype)[:: 16 if backend == "triton" else 1]
        )
    else:
        integers = torch.int32 if dtype == torch.float32 else torch.int64
        x = torch.randint(torch.iinfo(integers).min, torch.iinfo(integers).max, (20_000,), dtype=integers).view(dtype)
        if dtype == torch.float64:
            x = x.where(x.abs() < 1e150, 1e-310)  # sums and squares of more would be infinite in float64 itself
    assert_agrees(backend, [x])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each("block", [16, 32])
def test_blocks(backend, dtype, block):
    x = wide_values(41 * 30).to(dtype)
    for shaped in (x, x.reshape(30, 41), x.reshape(41, 30).t(), x[3], x[:0], x[:1], torch.zeros(70).to(dtype)):
        assert_agrees(backend, [shaped], block)


@each("dtype", DTYPES, ids=str)
def test_a_block_longer_than_a_row_is_the_row(backend, dtype):
    x = wide_values(2 * 1030).to(dtype).reshape(2, 1030)
    assert_agrees(backend, [x, x[:, :3]], 1024)
    found, expected = (rows_of(backend, [x, x[:, :3]], block) for block in (2**40, 2048))
    assert torch.equal(found, expected)
    assert found[:, row_layout.BLOCKS].tolist() == [2, 2]


@each(
    "name",
    [
        "empty",
        "scalar",
        "all_nan",
        "all_inf",
        "all_zero",
        "negative_zero",
        "subnormal",
        "one_tiny",
        "negative",
        "positive",
    ],
)
def test_one_kind_of_value(backend, name):
    x = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(-2.5),
        "all_nan": torch.full((4097,), math.nan),
        "all_inf": torch.tensor([math.inf, -math.inf, math.inf]).repeat(50),
        "all_zero": torch.zeros(5000),
        "negative_zero": torch.full((77,), -0.0),
        "subnormal": torch.tensor([2.0**-149, -(2.0**-127), 1.5 * 2.0**-140]).repeat(99),
        "one_tiny": torch.cat([torch.ones(4000), torch.tensor([1e-42])]),
        "negative": -torch.rand(500) - 1,
        "positive": torch.rand(500) + 1,
    }[name]
    assert_agrees(backend, [x])
    assert_agrees(backend, [x.to(torch.bfloat16), x.to(torch.float64), x.to(torch.float16)])


def test_any_strides(backend):
    x = torch.randn(6, 7, 8)
    views = [
        x[::2],
        x.transpose(0, 2),
        x[:, 1:3],
        x[..., 5],
        x.flip(1),
        x[:1].expand(5, 7, 8),
        x[0, :, :1].expand(7, 9),
    ]
    for block in (0, 16):
        assert_agrees(backend, views, block)


def test_many_tensors_and_rows_that_repeat(backend):
    tensors = [torch.randn(size) for size in (0, 1, 5, 63, 64, 65, 1000, 3, 4097)]
    assert_agrees(backend, tensors)
    assert_agrees(backend, tensors, rows=[0, 1, 0, 2, 2, 2, 4, 0, 1])


def test_accumulating_adds_and_overwriting_does_not(backend):
    x, y = torch.randn(1000), torch.randn(500) * 100
    bank = kernels.new_bank(2)
    with kernels.use(backend):
        kernels.measure_into([x], bank, [1])
        kernels.measure_into([y], bank, [1])
        assert int(bank[1, row_layout.COUNT]) == 1500 and int(bank[0].abs().sum()) == 0
        kernels.measure_into([x], bank, [1], accumulate=False)
    torch.testing.assert_close(bank[1:], rows_of(backend, [x]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2], ids=str
)
def test_threads_cut_tensors_anywhere(threads, dtype):
    tensors = [wide_values(size).to(dtype) for size in (20, 100_003, 50, 7000, 30_000)]
    assert_agrees("numba", tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_threads_that_are_the_first_to_measure_a_dtype_share_its_table(threads, dtype, monkeypatch):
    monkeypatch.setattr(launch, "_values", {})
    monkeypatch.setattr(launch, "entry", functools.cache(launch.entry.__wrapped__))
    decode, waiting = launch.from_codes, threading.Barrier(3)

    def slow(*arguments):  # all three ask before one has an answer
        with contextlib.suppress(threading.BrokenBarrierError):
            waiting.wait(1.0)
        return decode(*arguments)

    monkeypatch.setattr(launch, "from_codes", slow)
    x = wide_values(100_003).to(dtype)
    rows_of("numba", [x])
    monkeypatch.setattr(launch, "from_codes", decode)
    for _ in range(5):
        filled = [torch.full((256,), math.pi, dtype=torch.float64) for _ in range(50)]  # where freed tables were
        assert_agrees("numba", [x])
        del filled
    (table,) = launch._values.values()
    assert launch.entry(dtype)[1] == table.ctypes.data


def test_threads_do_not_race_for_a_row(threads):
    x = torch.randn(70)
    for _ in range(10):
        bank = rows_of("numba", [x] * 5000, rows=[0] * 5000)
        assert int(bank[0, row_layout.COUNT]) == 5000 * x.numel() == int(bank[0, row_layout.HISTOGRAM :].sum())


def test_a_repeated_value_is_read_once():
    count = (1 << 33) + 5  # far beyond 32 bits of index, and of time if each were read
    bank = kernels.new_bank(1)
    kernels.measure_into([torch.tensor([-3.0]).expand(count)], bank, [0])
    assert int(bank[0, row_layout.COUNT]) == count
    assert int(bank[0, row_layout.HISTOGRAM + 1 - row_layout.LOWEST_BINADE]) == count
    assert float(bank.view(torch.float64)[0, row_layout.SUM]) == -3.0 * count


def test_several_threads_at_once(threads):
    x = torch.randn(300_000)
    expected = rows_of("numba", [x])
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(rows_of("numba", [x]) for _ in range(5))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 20
    for row in found:
        torch.testing.assert_close(row[:, : row_layout.SUM], expected[:, : row_layout.SUM], rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_after_fork(threads):
    x = torch.randn(300_000)
    expected = rows_of("numba", [x])  # the parent's pool has threads now
    child = os.fork()
    if child == 0:
        try:
            equal = torch.equal(rows_of("numba", [x])[:, : row_layout.SUM], expected[:, : row_layout.SUM])
            os._exit(0 if equal else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(rows_of("numba", [x])[:, : row_layout.SUM], expected[:, : row_layout.SUM])


class _Measured(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return rows_of("numba", [torch.full((200_000,), float(index + 1))])[0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_in_workers_of_a_data_loader(threads):
    rows_of("numba", [torch.randn(300_000)])
    loader = torch.utils.data.DataLoader(_Measured(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert [float(row.view(torch.float64)[row_layout.SUM]) for row in loader] == [200_000.0 * i for i in (1, 2, 3, 4)]
