"""The Triton backend in Triton's interpreter, against the reference: bit for bit, but for sums."""

import os
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the package triton is not installed")

from plimsoll import kernels, row_layout
from plimsoll.formats import (
    E8M0,
    FP16,
    MXFP4,
    MXFP6_E2M3,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    BlockFormat,
    Format,
    get_element,
)
from plimsoll.kernels import torch_backend, triton_backend
from plimsoll.kernels.operators.cast_spec import (
    NEAREST_EVEN,
    ROUNDINGS,
    SCALE_RULES,
    STOCHASTIC,
    BlockSpec,
    CastArguments,
    CastSpec,
)
from plimsoll.kernels.triton_backend import measuring
from plimsoll.kernels.triton_backend.measuring import Tables
from tests.support.cases import each
from tests.support.spectra import assert_same_rows

if not measuring.interpreted():
    pytest.skip("TRITON_INTERPRET was not set when triton was imported", allow_module_level=True)

WIDE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BYTE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
DTYPES = WIDE_DTYPES + BYTE_DTYPES
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORMATS = (
    "fp16", "bf16", "e4m3", "e5m2", "e4m3fnuz", "e2m1", "e3m2", "e5m0", "e8m0", "e8m5", "e9m4", "tf32", "fp32", "fp64",
)  # fmt: skip


def edge_values(dtype: torch.dtype) -> Tensor:
    """Specials, zeros, subnormals, extremes, one step around powers of two, and random values; all codes of a byte."""
    integer = INTEGERS[dtype.itemsize]
    if dtype.itemsize == 1:
        return torch.arange(256).to(integer).view(dtype)
    info = torch.finfo(dtype)
    step = 9 if dtype == torch.float64 else 1
    lowest = round(torch.log2(torch.tensor(info.tiny, dtype=torch.float64)).item())
    exponents = torch.arange(lowest, -lowest, step, dtype=torch.float64)
    powers = torch.pow(2.0, exponents).to(dtype)
    normal = int(torch.tensor(info.tiny, dtype=dtype).view(integer))
    subnormals = torch.tensor([1, 2, 3, 5, normal // 9, normal // 5, normal // 3, normal // 2, normal - 1])
    bits = powers[powers.isfinite()].view(integer)
    around = torch.cat([bits - 1, bits, bits + 1]).view(dtype)
    others = torch.tensor([0.0, info.max, info.tiny, float("inf"), float("nan")], dtype=torch.float64).to(dtype)
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(200, generator=generator, dtype=torch.float64)
    values = torch.cat([around, subnormals.to(integer).view(dtype), others, noise.to(dtype), (noise**7).to(dtype)])
    return torch.cat([values, -values])


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    integer = INTEGERS[found.element_size()]
    same = found.view(integer) == expected.view(integer)
    if found.is_floating_point():  # the payload of a NaN means nothing
        same |= found.isnan() & expected.isnan()
    wrong = (~same).flatten().nonzero().flatten()[:5]
    assert same.all(), f"at {wrong.tolist()}: {found.flatten()[wrong]} for {expected.flatten()[wrong]}"


def check_measure(tensors: list[Tensor], rows: list[int], block: int, accumulate: bool = False) -> None:
    found = torch.zeros(max(rows) + 2, row_layout.width(block), dtype=torch.int64)
    torch_backend.measure([torch.tensor([1.5, -3.0, 0.0])] * len(found), found, range(len(found)), True, block)
    expected = found.clone()
    triton_backend.measure(tensors, found, rows, accumulate, block)
    torch_backend.measure(tensors, expected, rows, accumulate, block)
    assert_same_rows(found, expected)


@each("block", [0, 16, 32])
@each("dtype", DTYPES, ids=str)
def test_measure_edge_values(dtype: torch.dtype, block: int) -> None:
    values = edge_values(dtype)
    if dtype == torch.float64:  # so that no sum of squares overflows
        values = values[(values.abs() < 2.0**500) | ~values.isfinite()]
    check_measure([values], [1], block)


def test_measure_counts_each_bfloat16_pattern() -> None:
    check_measure([torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)], [0], 0)


@pytest.mark.parametrize("block", [0, 32])
def test_measure_list_with_repeated_rows(block: int) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors: list[Tensor] = [torch.tensor(3.0), torch.empty(0), torch.tensor(0.0), torch.empty(0, 4), torch.zeros(70)]
    for i in range(44):
        length = int(torch.randint(1, 200, (), generator=generator))
        dtype = torch.float32 if i % 3 else DTYPES[i % len(DTYPES)]
        tensors.append((torch.randn(length, generator=generator) * 2.0 ** (i - 20)).to(dtype))
    rows = [i * 7 % 11 for i in range(len(tensors))]
    check_measure(tensors, rows, block, accumulate=True)
    check_measure(tensors[:9], rows[:9], block, accumulate=False)


@each("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_measure_moves_its_window_from_tile_to_tile(dtype: torch.dtype) -> None:
    # Tiles of one program whose values lie in other binades each: near, far, wide (over 31 and over 63 binades), zero.
    generator = torch.Generator().manual_seed(6)
    tile = torch.randn(4096, generator=generator, dtype=torch.float64)
    shifts = [0, 3, -60, 60, 0]
    wide = tile * 2.0 ** torch.randint(-18, 18, (4096,), generator=generator)
    wider = tile * 2.0 ** torch.randint(-50, 50, (4096,), generator=generator)
    parts = [tile * 2.0**shift for shift in shifts] + [wide, torch.zeros(4096), wider, tile]
    check_measure([torch.cat(parts).to(dtype)[: 9 * 4096 - 17]], [0], 0)


@each("span", [28, 29, 30, 31, 32, 61, 62, 63, 64])
def test_measure_at_the_edges_of_a_window(span: int) -> None:
    # A tile of `span` binades and zeros, then tiles that each reach one binade further, until the window has moved.
    for direction in (1, -1):
        exponents = direction * torch.arange(-20, span - 19, dtype=torch.float32)
        first = torch.zeros(4096)
        first[7 : 7 + len(exponents)] = 2.0**exponents
        steps = [torch.full((4096,), 2.0 ** (direction * (span - 20 + k))) for k in (1, 2, 3)]
        check_measure([torch.cat([first, *steps])[None].expand(4, -1)], [0], 0)


@each("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_measure_tiles_of_subnormals(dtype: torch.dtype) -> None:
    bits = torch.arange(1, 120).to(INTEGERS[dtype.itemsize])
    check_measure([bits.view(dtype), (bits + (1 << 7)).view(dtype)], [0, 1], 0)


@each("block", [0, 32])
@each("dtype", [torch.float32, torch.float16, torch.float8_e5m2], ids=str)
def test_measure_unaligned_and_not_contiguous(dtype: torch.dtype, block: int) -> None:
    values = torch.randn(4500, generator=torch.Generator().manual_seed(7)).to(dtype)
    matrix = torch.randn(40, 35, generator=torch.Generator().manual_seed(7)).to(dtype)
    check_measure([values[1:], values[3:4400], matrix.T], [0, 1, 2], block)


@each("block", [16, 32])
@each("shape", [(7, 5), (3, 2, 33), (70, 32), (1, 50), (200, 16)], ids=str)
def test_measure_ragged_rows(shape: tuple[int, ...], block: int) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-90, 30, shape, generator=generator)
    x.flatten()[3] = float("nan")
    x[-1] = 0.0
    check_measure([x], [0], block)


def test_measure_launches_once_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for name in ("measure_tensor", "measure_table"):
        kernel = getattr(measuring, name)
        monkeypatch.setattr(measuring, name, _Counted(kernel, launches, name))
    bank = torch.zeros(9, row_layout.NARROW, dtype=torch.int64)
    triton_backend.measure([torch.ones(3), torch.ones(5000), torch.ones(0)], bank, [1, 4, 7], True, 0)
    assert launches == ["measure_table"]
    triton_backend.measure([torch.ones(5000)], bank, [1], True, 0)
    assert launches == ["measure_table", "measure_tensor"]


class _Counted:
    def __init__(self, kernel: object, launches: list[str], name: str) -> None:
        self._kernel, self._launches, self._name = kernel, launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self._launches.append(self._name)
        return self._kernel[grid]  # type: ignore[index]


def test_values_in_another_order_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts do not depend on the order. Blocks do, and what has gaps or shares memory is copied."""
    jobs: list[measuring._Job] = []
    monkeypatch.setattr(measuring, "_launch", lambda listed, *_: jobs.extend(listed))
    x = torch.ones(6, 32)
    for values, block, stays in (
        (x.t(), 0, True),
        (x.t(), 16, False),
        (x[:, ::2], 0, False),
        (x[0].expand(6, 32), 0, False),
    ):
        jobs.clear()
        triton_backend.measure([values], kernels.new_bank(1, block), [0], False, block)
        assert (jobs[0].address == x.data_ptr()) is stays and jobs[0].length == values.numel()


def test_tables_are_kept_by_content_and_bounded() -> None:
    tables, cpu = Tables(most=2), torch.device("cpu")
    first = tables.find((1,), cpu, lambda: torch.tensor([1]).numpy())
    assert first is tables.find((1,), cpu, lambda: pytest.fail("made again"))
    for key in (2, 1, 3):  # 1 is used again before 3 comes, so 2 goes
        tables.find((key,), cpu, lambda: torch.tensor([2]).numpy())
    assert len(tables) == 2
    assert first is tables.find((1,), cpu, lambda: pytest.fail("made again"))


def saturations(fmt: Format) -> set[bool]:
    return {True} | ({False} if fmt.has_inf or fmt.has_nan else set())


def check_cast(
    x: Tensor,
    spec: CastSpec,
    out_dtype: torch.dtype | None = None,
    scale: float = 1.0,
    scale_tensor: Tensor | None = None,
    seed: int = 5,
    key: Tensor | None = None,
) -> None:
    found, expected = (torch.empty(x.shape, dtype=out_dtype or x.dtype) for _ in range(2))
    arguments = CastArguments(spec, scale, scale_tensor, seed, key)
    triton_backend.cast(x, found, arguments)
    torch_backend.cast(x, expected, arguments)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("rounding", range(len(ROUNDINGS)), ids=ROUNDINGS)
@each("name", FORMATS)
def test_cast_edge_values(name: str, rounding: int) -> None:
    fmt = get_element(name, "test")
    for saturate in saturations(fmt):
        check_cast(edge_values(torch.float32), CastSpec.of(fmt, rounding, saturate))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        check_cast(edge_values(dtype), CastSpec.of(fmt, rounding, fmt.saturates(None)))


@pytest.mark.parametrize("bias", [1, 140])
def test_cast_formats_that_float32_cannot_hold(bias: int) -> None:
    fmt = Format(name="shifted", exponent_bits=8, mantissa_bits=3, bias=bias)
    check_cast(edge_values(torch.float32), CastSpec.of(fmt, NEAREST_EVEN, False))


def test_cast_each_bfloat16_pattern_to_e4m3() -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    check_cast(x, CastSpec.of(get_element("e4m3", "test"), NEAREST_EVEN, True))


@each("dtype", BYTE_DTYPES, ids=str)
def test_cast_from_and_to_bytes(dtype: torch.dtype) -> None:
    spec = CastSpec.of(get_element("e3m2", "test"), NEAREST_EVEN, True)
    check_cast(edge_values(dtype), spec, torch.float32)
    check_cast(edge_values(torch.float32), CastSpec.of(FP16, NEAREST_EVEN, False), dtype)


@each("out_dtype", WIDE_DTYPES, ids=str)
@each("name", ["e4m3", "tf32", "e9m4", "e8m0"])
def test_cast_with_scale_into_other_dtypes(name: str, out_dtype: torch.dtype) -> None:
    fmt = get_element(name, "test")
    spec = CastSpec.of(fmt, NEAREST_EVEN, fmt.saturates(None))
    for dtype in (torch.float32, torch.float64):
        x = edge_values(dtype)
        check_cast(x, spec, out_dtype)
        check_cast(x, spec, out_dtype, scale=0.7)
        check_cast(x, spec, out_dtype, scale_tensor=torch.tensor(2.0**-20, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cast_noise_is_the_one_defined(dtype: torch.dtype) -> None:
    # More than one program, a part of a group at the end, and a key whose halves both matter.
    x = torch.rand(9001, generator=torch.Generator().manual_seed(9)).to(dtype)
    spec = CastSpec.of(get_element("e4m3", "test"), STOCHASTIC, True)
    check_cast(x, spec, seed=-3)
    check_cast(x, spec, key=torch.tensor(0x1234_5678_9ABC_DEF0))


def test_cast_empty_scalar_and_not_contiguous() -> None:
    spec = CastSpec.of(get_element("e4m3", "test"), STOCHASTIC, True)
    for x in (torch.empty(0), torch.tensor(1.07), torch.randn(9, 4).T):
        check_cast(x, spec)
    x = torch.randn(9, 4)
    found, expected = torch.zeros(4, 9).T, torch.zeros(4, 9).T
    triton_backend.cast(x, found, CastArguments(spec))
    torch_backend.cast(x, expected, CastArguments(spec))
    assert_same_bits(found.contiguous(), expected.contiguous())


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e4m3fnuz", "e8m0", "e5m5", "fp16"])
@each("shape", [(3, 7), (1, 9), (2, 8), (3, 1500)], ids=str)
def test_pack(name: str, shape: tuple[int, int]) -> None:
    fmt = get_element(name, "test")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(10))
    x[0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    width = (shape[1] + 1) // 2 if fmt.bits == 4 else shape[1]
    dtypes = (torch.uint8,) if fmt.bits <= 8 else (torch.uint16, torch.int16)
    for dtype, rounding, scale in product(dtypes, (NEAREST_EVEN, STOCHASTIC), (1.0, 0.3)):
        found, expected = (torch.zeros(shape[0], width, dtype=dtype) for _ in range(2))
        arguments = CastArguments(CastSpec.of(fmt, rounding, fmt.saturates(None)), scale, seed=3)
        triton_backend.pack(x, found, arguments)
        torch_backend.pack(x, expected, arguments)
        assert_same_bits(found, expected)


def blocks_to_try(rows: int, n: int, dtype: torch.dtype) -> Tensor:
    """Rows of many sizes, with a block of zeros, poisoned blocks, subnormals and maxima just below a power of two."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    x = (x * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)).to(dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, 1e-40, 2 - 2**-7, -1.0]).to(dtype)
    if n > 48:
        x[1, :32] = 0.0
        x[1, 48:] = 1e-39
        x[2, 40], x[0, 33] = float("nan"), float("-inf")
    if rows > 3:  # maxima at a power of two, and at the largest elements times one
        x[3], x[3, :3] = 0.25, torch.tensor([1.0, 0.3, -0.7])
        for row, largest in enumerate((1.75, 7.5 / 4, 1.5), start=4):
            x[row] = x[row].clamp(-1, 1)
            x[row, 5] = largest
    return x


def check_blocks(
    x: Tensor,
    spec: BlockSpec,
    scale: float = 1.0,
    key: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    whole: float = 0.01,
) -> None:
    tensor_scale = torch.tensor(whole) if spec.tensor_scale else None
    arguments = CastArguments(spec, scale, seed=7, key=key, tensor_scale=tensor_scale)
    found, expected = (torch.zeros(x.shape, dtype=out_dtype or x.dtype) for _ in range(2))
    triton_backend.block_cast(x, found, arguments)
    torch_backend.block_cast(x, expected, arguments)
    assert_same_bits(found, expected)

    rows, n = x.shape
    width = (n + 1) // 2 if spec.element.format.bits == 4 else n
    codes = [torch.zeros(rows, width, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(rows, -(-n // spec.block), dtype=torch.uint8) for _ in range(2)]
    triton_backend.block_pack(x, codes[0], scales[0], arguments)
    torch_backend.block_pack(x, codes[1], scales[1], arguments)
    assert_same_bits(*codes)
    assert_same_bits(*scales)


@each("rule", range(len(SCALE_RULES)), ids=SCALE_RULES)
@each("fmt", [MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP4, NVFP4], ids=lambda fmt: fmt.name)
def test_blocks(fmt: BlockFormat, rule: int) -> None:
    for n in (64, 33, 50):
        check_blocks(blocks_to_try(7, n, torch.float32), BlockSpec.of(fmt, NEAREST_EVEN, rule))


@each("dtype", WIDE_DTYPES, ids=str)
@each("fmt", [MXFP8_E4M3, NVFP4], ids=lambda fmt: fmt.name)
def test_blocks_stochastic_scaled_any_dtype(fmt: BlockFormat, dtype: torch.dtype) -> None:
    spec = BlockSpec.of(fmt, STOCHASTIC, 0)
    for n in (96, 35):
        x = blocks_to_try(30, n, dtype)
        check_blocks(x, spec, key=torch.tensor(2**40 + 7))
        check_blocks(x, spec, scale=3.7, out_dtype=torch.float16)


@each("whole", [1e6, 0.0, float("nan"), float("inf")])
def test_blocks_beside_any_tensor_scale(whole: float) -> None:
    check_blocks(blocks_to_try(3, 64, torch.float32), BlockSpec.of(NVFP4, NEAREST_EVEN, 0), whole=whole)


def test_blocks_of_odd_length() -> None:
    fmt = BlockFormat(name="odd", element=get_element("e2m1", "test"), block=11, scale=E8M0)
    check_blocks(blocks_to_try(7, 51, torch.float32), BlockSpec.of(fmt, STOCHASTIC, 0))


def test_describe_says_where_kernels_run() -> None:
    assert triton_backend.describe().endswith("interpreter")
