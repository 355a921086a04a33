"""Unscaling on every backend: against a scalar reference, against torch's own operator, and against the reference.

One file, though long: the CPU's sweep and its fallbacks are tested by the same comparison as everything else.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import FLOATING
from tests.support.cases import each
from tests.support.spectra import assert_same_rows

BACKENDS = [status.name for status in kernels.report() if status.available]
FAST = [name for name in BACKENDS if name != "torch"]
TOLERANCE = {"numba": 1e-12, "triton": 1e-6}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALES = [1.0, 0.5, 2.0**-16, 1 / 3, 3.7, 65536.0, 2.0**100, 2.0**-149, 0.0, -1.0, math.inf, math.nan]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=FAST)
def fast(request):
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """One or three threads, and shares so small that these tests' tensors are cut between them."""
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads.SMALLEST_SHARE", 1 << 10)
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads._FINE_SHARE", 1 << 12)
    monkeypatch.setattr("torch.get_num_threads", lambda: request.param)


def unscaled(
    name: str, gradients: list[Tensor], scale: float, *, rows: list[int] | None = None, measured: bool = True
) -> tuple[list[Tensor], float, Tensor | None]:
    """What a backend makes of copies of the gradients (strides kept), of found_inf, and of a bank not empty before."""
    copies = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in gradients]
    found = torch.zeros(1)
    rows = list(range(len(gradients))) if rows is None else rows
    bank = kernels.new_bank(max(rows, default=0) + 2).fill_(3) if measured else None
    with kernels.use(name):
        kernels.unscale_into(copies, torch.tensor(scale), found, bank, rows if measured else ())
    return copies, float(found), bank


def assert_same_values(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    integer = INTEGERS[found.element_size()]
    same = found.contiguous().view(integer) == expected.contiguous().view(integer)
    same |= found.isnan() & expected.isnan()  # the payload of a NaN means nothing
    assert bool(same.all()), (found[~same][:5], expected[~same][:5])


def assert_agrees(name: str, gradients: list[Tensor], scale: float, rows: list[int] | None = None) -> None:
    """A fast backend does what the reference does, with a bank and without one."""
    expected, expected_found, expected_bank = unscaled("torch", gradients, scale, rows=rows)
    found, found_inf, bank = unscaled(name, gradients, scale, rows=rows)
    bare, bare_found_inf, _ = unscaled(name, gradients, scale, measured=False)
    assert found_inf == bare_found_inf == expected_found
    for one, other, wanted in zip(found, bare, expected, strict=True):
        assert_same_values(one, wanted)
        assert_same_values(other, wanted)
    assert_same_rows(bank, expected_bank, TOLERANCE[name])


def some_values(count: int, dtype: torch.dtype, *, finite: bool = True) -> Tensor:
    """Values over forty binades, with zeros, -0 and subnormals; also NaN and both infinities where asked for."""
    values = torch.randn(count, dtype=torch.float64) * torch.exp2(torch.randint(-30, 12, (count,)).double())
    values[::7], values[3::101] = 0, -0.0
    x = values.to(dtype)
    x[5::89] = torch.finfo(dtype).smallest_normal / 4
    if not finite:
        x[1::97], x[2::201], x[4::203] = math.nan, math.inf, -math.inf
    return x


def by_hand(x: Tensor, scale: float) -> Tensor:
    """One value after another, by numpy's scalars."""
    wide = np.float64 if x.dtype == torch.float64 else np.float32
    with np.errstate(all="ignore"):
        products = [wide(value) if scale == 1 else wide(value) * wide(np.float32(scale)) for value in x.tolist()]
    return torch.tensor(np.array(products, dtype=wide)).to(x.dtype)


@pytest.mark.parametrize("scale", SCALES)
@each("dtype", FLOATING, ids=str)
def test_values_and_found_inf_by_hand(backend, dtype, scale):
    x = some_values(300, dtype)
    expected = by_hand(x, scale)
    (found,), found_inf, _ = unscaled(backend, [x], scale)
    assert_same_values(found, expected)
    assert found_inf == float(not expected.isfinite().all())


@each("scale", [1.0, 0.5, 0.1, 7.0, 2.0**-140])
def test_float32_is_torchs_operator_bit_for_bit(backend, scale):
    bits = torch.randint(-(1 << 31), 1 << 31, (20_000,)).to(torch.int32)
    bits[:4] = torch.tensor([0, -(1 << 31), 0x7F80_0001, 0x7FC1_2345])
    x = bits.view(torch.float32)
    expected, flag = x.clone(), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([expected], flag, torch.tensor(scale))
    (found,), found_inf, _ = unscaled(backend, [x], scale)
    assert found_inf == float(flag) == 1
    if scale == 1:
        assert torch.equal(found.view(torch.int32), bits), "not even a NaN's payload changes"
    assert_same_values(found, expected)


@each("scale", [1.0, 0.3, 2.0**-10, 1024.0])
@each("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern(fast, dtype, scale):
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype)[:: 16 if fast == "triton" else 1]
    assert_agrees(fast, [x[x.isfinite()], x], scale)


@each("finite", [True, False])
@each("dtype", FLOATING, ids=str)
def test_backends_agree(fast, dtype, finite):
    sizes, scales = ((1, 100, 4096, 4097, 10_007), (1.0, 2.0**-12, 0.3, 900.0))
    if fast == "triton":  # interpreted, and slow
        sizes, scales = ((1, 4100), (0.3,))
    tensors = [some_values(count, dtype, finite=finite) for count in sizes]
    for scale in scales:
        assert_agrees(fast, tensors, scale)


EDGES = {  # of each dtype: a value, and the scale at which its product is first rounded to infinity
    torch.float16: (2.0**15, 65520 / 2.0**15),
    torch.bfloat16: (2.0**127, 2 - 2.0**-8),
    torch.float32: (2.0**127, 2.0),
    torch.float64: (2.0**1023, 2.0),
}


@each("dtype", FLOATING, ids=str)
def test_found_inf_at_the_edge_of_overflow(backend, dtype):
    value, edge = EDGES[dtype]
    below = float(np.nextafter(np.float32(edge), np.float32(0)))
    for sign in (1, -1):
        x = torch.tensor([0.5, sign * value, 0.25], dtype=torch.float64).to(dtype)
        assert unscaled(backend, [x], below)[1] == 0
        assert unscaled(backend, [x], edge)[1] == 1
        assert unscaled(backend, [x], edge, measured=False)[1] == 1
        assert unscaled(backend, [x * 0.5], edge)[1] == 0


def test_found_inf_is_raised_and_never_reset(backend):
    good, bad = torch.ones(5), torch.tensor([1.0, math.nan])
    with kernels.use(backend):
        for shape in ((), (1,), (1, 1)):
            found = torch.zeros(shape)
            kernels.unscale_into([good], torch.tensor([0.5]), found)
            assert found.item() == 0
            kernels.unscale_into([good, bad], torch.tensor([0.5]), found)
            assert found.item() == 1
            kernels.unscale_into([good], torch.tensor([0.5]), found)
            kernels.unscale_into([], torch.tensor([0.5]), found)
            assert found.item() == 1
        found = torch.full((1,), 2.0)
        kernels.unscale_into([good], torch.tensor(0.5), found)
        assert found.item() == 2


def test_one_bad_value_anywhere_is_found(fast):
    for dtype in FLOATING:
        for bad in (math.nan, math.inf, -math.inf):
            for place in (4096,) if fast == "triton" else (0, 31, 4095, 4096, 5000):
                x = torch.ones(5001).to(dtype)
                x[place] = bad
                for measured in (fast != "triton", False):
                    assert unscaled(fast, [x], 0.5, measured=measured)[1] == 1, (dtype, bad, place)


def test_any_strides(backend):
    x = some_values(6 * 7 * 8, torch.float32).reshape(6, 7, 8)
    for view in (x[::2], x.transpose(0, 2), x[:, 1:3], x[..., 5], x[0, 0, 0], x[:0], x.flatten()[3:], x[2:3, :, :1]):
        for dtype in (torch.bfloat16,) if backend == "triton" else FLOATING:
            whole = x.to(dtype)
            part = torch.as_strided(whole, view.shape, view.stride(), view.storage_offset())
            before, expected = whole.clone(), by_hand(part.flatten(), 0.3).reshape(part.shape)
            bank, found = kernels.new_bank(1), torch.zeros(1)
            measured = kernels.new_bank(1)
            with kernels.use(backend):
                kernels.measure_into([part], measured, [0])
                kernels.unscale_into([part], torch.tensor(0.3), found, bank, [0])
            assert_same_values(part, expected)
            assert_same_rows(bank, measured, 1e-12)
            torch.as_strided(before, view.shape, view.stride(), view.storage_offset()).copy_(expected)
            assert_same_values(whole, before)  # and nothing beside it changed


def test_large_strided_gradient(fast):
    whole = some_values(150_000, torch.bfloat16).reshape(300, 500)
    before = whole.clone()
    count = 20 if fast == "triton" else 300
    part, found = whole[:count, 1:400], torch.zeros(1)
    with kernels.use(fast):
        kernels.unscale_into([part], torch.tensor(0.3), found)
    with kernels.use("torch"):
        kernels.unscale_into([before[:count, 1:400]], torch.tensor(0.3), found)
    assert_same_values(whole, before)


def test_many_gradients_of_several_dtypes_and_rows_in_any_order(fast):
    sizes = (0, 1, 5, 63, 64, 65, 1000, 3, 2049, 0)
    gradients = [some_values(size, FLOATING[i % 4]) for i, size in enumerate(sizes)]
    assert_agrees(fast, gradients, 0.3, rows=[9, 1, 2, 3, 8, 4, 5, 6, 7, 0])
    assert_agrees(fast, gradients, 0.3, rows=[0, 1, 0, 2, 2, 2, 4, 0, 1, 3])


@each("dtype", FLOATING, ids=str)
def test_on_threads(threads, dtype):
    gradients = [some_values(size, dtype) for size in (20, 100_003, 50, 7000, 30_000)]
    assert_agrees("numba", gradients, 0.3)
    assert_agrees("numba", gradients, 0.3, rows=[0, 1, 0, 2, 2])
    gradients[1][77_000] = math.inf
    assert_agrees("numba", gradients, 0.3)


def powers(low: int, high: int, count: int) -> Tensor:
    """Values of random signs whose binades are all those from low to high, both included."""
    exponents = torch.randint(low, high + 1, (count,))
    exponents[:2] = torch.tensor([low, high])
    values = torch.ldexp(1 + torch.rand(count, dtype=torch.float64), exponents) * (torch.randint(2, (count,)) * 2 - 1)
    return values.to(torch.float32)


def at(x: Tensor, places: range, value: float) -> Tensor:
    return x.index_fill(0, torch.tensor(places), value)


COUNT = 40_000
PLACES = torch.arange(COUNT)
SWEPT = {  # gradients long enough for the CPU's sweep, each of which asks something else of it
    "normal": lambda x: x,
    "half_zero": lambda x: x * (torch.rand(COUNT) < 0.5),
    "zero_stretches": lambda x: x * (PLACES % 9000 < 5000),
    "window_moves": lambda x: x * torch.where(PLACES < 9000, 1.0, torch.where(PLACES < 20_000, 2.0**-60, 2.0**40)),
    "outliers": lambda x: at(at(x, range(7000, COUNT, 20_000), 1e30), range(12_345, COUNT, 9999), -1e-30),
    "subnormals": lambda x: at(x, range(3000, COUNT, 5001), -1e-40),
    "not_finite": lambda x: at(at(x, range(4000, COUNT, 9000), math.nan), range(13_001, COUNT, 20_000), -math.inf),
    "all_tiny": lambda _: at(powers(-126, -115, COUNT), range(100, COUNT, 300), 2.0**-149),
    "all_huge": lambda _: powers(100, 127, COUNT),
    "a_window_wide": lambda _: powers(-27, 4, COUNT),
    "one_binade_more": lambda _: powers(-28, 4, COUNT),
    "very_wide": lambda _: powers(-120, 120, COUNT),
}


@each("name", SWEPT)
def test_long_gradients_on_the_cpu(name):
    x = SWEPT[name](torch.randn(COUNT))
    for scale in (2.0**-11, 0.3, 1.0):
        for length in (COUNT, 8192, 8191 + 256, 16_384 + 17):
            assert_agrees("numba", [x[:length], x[length:]], scale)
    assert_agrees("numba", [x.to(torch.bfloat16), x.to(torch.float16)], 0.3)


def test_windows_that_touch_on_the_cpu():
    for top in (-95, -94, -63, 0, 1, 31, 127):
        for low in (top - 31, top - 32, top - 33):
            if low >= -126:
                assert_agrees("numba", [torch.cat([powers(top, top, 300), powers(low, low, 9000)])], 0.5)


def test_more_values_than_the_planes_of_a_sweep_hold():
    """Lanes that are all one binade fill the planes first."""
    x = torch.cat([torch.ones(2_200_000), torch.randn(100_000)])
    assert_agrees("numba", [x], 0.5)


@pytest.mark.skipif("numba" not in FAST, reason="numba is not installed")
def test_float16_by_integers_for_a_processor_without_its_conversions():
    from numba import njit

    from plimsoll.kernels.numba_backend import unscaling

    narrow, widen = unscaling.half_by_integers, unscaling.widen_half

    @njit
    def both(bits, halves, wide):
        for i in range(bits.size):
            halves[i] = narrow(bits[i])
            wide[i] = widen(np.uint32(halves[i]))

    x = torch.cat(
        [torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float(), powers(-30, 20, 5000)]
    )
    x = torch.cat([x, torch.nextafter(x, torch.tensor(math.inf)), (x + torch.nextafter(x, torch.tensor(9e9))) / 2])
    x = torch.cat([x, x * (1 + 2.0**-11), x * (1 + 2.0**-12)])
    halves, wide = np.zeros(len(x), np.uint16), np.zeros(len(x), np.uint32)
    both(x.numpy().view(np.uint32), halves, wide)
    found = torch.from_numpy(halves.view(np.int16)).view(torch.float16)
    assert_same_values(found, x.half())
    assert_same_values(torch.from_numpy(wide.view(np.int32)).view(torch.float32), found.float())


@pytest.mark.skipif("numba" not in FAST, reason="numba is not installed")
def test_the_sweep_for_a_processor_without_three_way_logic(monkeypatch):
    from numba import njit

    from plimsoll.kernels.numba_backend.measuring import sweep as _sweep

    def results(*, ternary: bool) -> list[np.ndarray]:
        monkeypatch.setattr(_sweep, "has_feature", lambda _: ternary)
        sweep = _sweep.sweep_and_multiply

        @njit
        def call(x, planes, extremes, moments):
            return sweep(
                x.ctypes.data, x.size // 256, 131, planes.ctypes.data, extremes.ctypes.data, moments.ctypes.data,
                np.float32(0.3),
            )  # fmt: skip

        arrays = [x.copy(), np.ones((_sweep.PLANES, _sweep.LANES), np.uint32), np.zeros(4, np.uint32)]
        arrays.append(np.zeros(_sweep.MOMENTS))
        assert call(*arrays) == 20
        return arrays

    x = (torch.randn(8192) * (torch.rand(8192) < 0.7)).numpy()
    x[256 * 20 + 5] = 1e9
    native = _sweep.has_feature("avx512f")
    for one, other in zip(results(ternary=False), results(ternary=native), strict=True):
        assert np.array_equal(one, other)


def test_autograd_notices_that_a_saved_gradient_changed():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    with torch.no_grad():
        kernels.unscale_into([y], torch.tensor(0.5), torch.zeros(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    with torch.inference_mode():
        kernels.unscale_into([torch.ones(3)], torch.tensor(0.5), torch.zeros(1))


def test_numbers_that_do_not_fit_are_refused():
    x, one, found = torch.ones(3), torch.ones(1), torch.zeros(1)
    for wrong in (one.double(), torch.ones(2), torch.ones(1, device="meta")):
        with pytest.raises(ArgumentError, match="expected one float32 number on cpu as inverse_scale; got torch.float"):
            kernels.unscale_into([x], wrong, found)
    with pytest.raises(ArgumentError, match="expected one float32 number on cpu as found_inf; got torch.int64"):
        kernels.unscale_into([x], one, found.long())


def test_gradients_that_do_not_fit_are_refused_before_any_is_changed():
    first, one = torch.ones(2), torch.ones(1) / 2
    wrong = {
        "expected floating gradients; got torch.int32 at index 1": torch.ones(2, dtype=torch.int32),
        "expected floating gradients; got torch.float8_e5m2 at index 1": torch.ones(2).to(torch.float8_e5m2),
        "got a tensor of layout torch.sparse_coo at index 1": torch.ones(2).to_sparse(),
        "on the device of found_inf, cpu; got one on meta at index 1": torch.ones(2, device="meta"),
        "an expanded tensor, whose values share memory at index 1": torch.ones(1).expand(2),
        "expected gradients that share no memory; got 2 of which only 1 differ": first,
    }
    for message, x in wrong.items():
        with pytest.raises((ArgumentError, UnsupportedTensorError), match=message):
            kernels.unscale_into([first, x], one, torch.zeros(1))
    assert first.tolist() == [1, 1]


def test_subclasses_are_refused_except_parameters():
    found = torch.zeros(1)
    kernels.unscale_into([torch.nn.Parameter(torch.ones(2), requires_grad=False)], torch.ones(1), found)

    class Odd(Tensor):
        pass

    with pytest.raises(UnsupportedTensorError, match="got one of type Odd at index 0 .* Use its local tensor"):
        kernels.unscale_into([torch.ones(2).as_subclass(Odd)], torch.ones(1), found)


def test_rows_that_do_not_fit_are_refused():
    x, one, found, bank = torch.ones(3), torch.ones(1), torch.zeros(1), kernels.new_bank(2)
    with pytest.raises(ArgumentError, match="a row of a bank on cpu for each of 1 gradients; got 0 rows"):
        kernels.unscale_into([x], one, found, bank)
    with pytest.raises(ArgumentError, match=r"expected a bank where rows are given; got rows=\[0\]"):
        kernels.unscale_into([x], one, found, None, [0])
    with pytest.raises(ArgumentError, match=r"expected rows from 0 to 1; got rows=\[2\]"):
        kernels.unscale_into([x], one, found, bank, [2])
    with pytest.raises(ArgumentError, match="for each of 1 gradients; got 1 rows of one on meta"):
        kernels.unscale_into([x], one, found, kernels.new_bank(2, device="meta"), [0])
