"""`cast` as users call it: carriers, out, strides, scales, graphs and batches. The rounding itself: tests/kernels."""

import math
import subprocess
import sys

import pytest
import torch

from plimsoll import cast, kernels, pack, unpack
from plimsoll.errors import ArgumentError, FormatError, UnsupportedTensorError
from plimsoll.formats import BLOCKS, E4M3, Format
from tests.support import processes
from tests.support.cases import each

BACKENDS = [status.name for status in kernels.report() if status.available]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EIGHT_BIT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
EVERY_KIND = ["e4m3", "fp16", "e5m7", "mxfp8_e4m3", "mxfp4", "nvfp4"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with kernels.use(request.param):
        yield request.param


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.double().signbit() & ~found.isnan(), expected.double().signbit() & ~expected.isnan())


def test_names_formats_and_dtypes_mean_the_same(backend):
    x = torch.randn(100)
    for fmt in ("e4m3", "E4M3", E4M3, torch.float8_e4m3fn):
        assert_same(cast(x, fmt), x.to(torch.float8_e4m3fn).float())
    own = Format(name="mine", exponent_bits=4, mantissa_bits=3, bias=7, specials="ieee")
    assert float(cast(torch.tensor(240.0), own)) == 240.0 and math.isinf(float(cast(torch.tensor(260.0), own)))


@pytest.mark.parametrize("dtype", FLOATS + EIGHT_BIT, ids=str)
@each("fmt", EVERY_KIND)
def test_a_value_is_cast_from_its_own_dtype(backend, dtype, fmt):
    x = torch.randn(3, 40).to(dtype)
    found = cast(x, fmt)
    assert found.dtype == dtype
    assert_same(
        found,
        cast(cast(x.double(), fmt), dtype, dtype=dtype) if dtype in EIGHT_BIT else cast(x.double(), fmt).to(dtype),
    )


def test_another_carrier_rounds_once_more(backend):
    x = torch.tensor([1 + 2**-9 + 2**-20, 65519.9, 2.0**-140, -1e39], dtype=torch.float64)
    assert cast(x, "fp32", dtype=torch.bfloat16).tolist() == x.float().bfloat16().tolist()
    # fp16's 65504 is no bfloat16: the next one is 65536.
    assert float(cast(torch.tensor(65504.0), "fp16", dtype=torch.bfloat16)) == 65536.0
    assert float(cast(torch.tensor(1 + 2.0**-10), "fp16", dtype=torch.float64)) == 1 + 2.0**-10
    # A double goes to bfloat16 in one rounding: through float32 this tie would go down.
    tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert float(cast(tie, "fp64", dtype=torch.bfloat16)) == 1 + 2.0**-7


@each("fmt", EVERY_KIND)
@each("dtype", FLOATS, ids=str)
def test_out_is_written_and_returned(backend, fmt, dtype):
    x = torch.randn(5, 33).to(dtype)
    expected = cast(x, fmt)
    out = torch.full_like(x, math.nan)
    assert cast(x, fmt, out=out) is out
    assert_same(out, expected)
    strided = torch.full((33, 5), math.nan, dtype=dtype).t()
    assert cast(x, fmt, out=strided) is strided
    assert_same(strided, expected)
    assert cast(x, fmt, out=x) is x
    assert_same(x, expected)


@each("fmt", EVERY_KIND)
def test_out_may_be_another_view_of_x(backend, fmt):
    x = torch.linspace(1.0, 2.0, 64 * 64).view(64, 64)
    expected = cast(x, fmt)
    assert_same(cast(x, fmt, out=x.t()), expected)
    memory = torch.linspace(1.0, 2.0, 5000)
    expected = cast(memory[:-1], fmt)
    assert_same(cast(memory[:-1], fmt, out=memory[1:]), expected)


@each("fmt", EVERY_KIND)
def test_a_result_in_out_is_a_change_that_autograd_sees(fmt):
    x = torch.randn(32, requires_grad=True) * 2
    y = x.square().sum()
    with torch.no_grad():
        cast(x, fmt, out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("rounding", ["nearest_even", "stochastic"])
@each("fmt", EVERY_KIND)
def test_strides_change_nothing(backend, fmt, rounding):
    generator = {"generator": 3} if rounding == "stochastic" else {}
    x = torch.randn(6, 7, 40)
    for view in (x.transpose(0, 1), x.permute(2, 0, 1), x[::2], x[..., ::3], x[:1].expand(3, 7, 40), x[0, 0, 0], x[:0]):
        assert_same(
            cast(view, fmt, rounding=rounding, **generator), cast(view.clone(), fmt, rounding=rounding, **generator)
        )


def test_large_tensors_in_pieces_and_threads(monkeypatch):
    monkeypatch.setattr("plimsoll.kernels.numba_backend.threads.SMALLEST_SHARE", 1 << 12)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    x = torch.randn(3, 100_001)
    for view in (x, x[:, ::2], x.t()):
        for arguments in ({}, {"rounding": "stochastic", "generator": 9}):
            with kernels.use("torch"):
                expected = cast(view, "e4m3", **arguments)
            with kernels.use("numba"):
                assert_same(cast(view, "e4m3", **arguments), expected)
    for matrix in (x, x[0, :96_000], x[:, :2048], x[:1, :99_968]):
        for arguments in ({}, {"rounding": "stochastic", "generator": 9}):
            with kernels.use("torch"):
                expected = cast(matrix, "mxfp4", **arguments)
            with kernels.use("numba"):
                assert_same(cast(matrix, "mxfp4", **arguments), expected)
                assert_same(unpack(pack(matrix, "mxfp4", **arguments)), expected)


@each("fmt", BLOCKS, ids=lambda fmt: fmt.name)
def test_blocks_along_any_axis(backend, fmt):
    x = torch.randn(5, 35, 6) * torch.exp2(torch.randint(-20, 20, (5, 35, 6)).float())
    for axis in (0, 1, -2):
        assert_same(cast(x, fmt, axis=axis), cast(x.movedim(axis, -1), fmt).movedim(-1, axis))
    flat = x.reshape(-1)[:64]
    if not fmt.tensor_scale:
        halves = [cast(part, fmt) for part in flat.split(32)]
        assert_same(cast(flat, fmt), torch.cat(halves))


def test_a_nan_or_inf_takes_its_block_and_no_other(backend):
    x = torch.randn(4, 64)
    x[1, 5], x[2, 40] = math.nan, math.inf
    for fmt in ("mxfp8_e4m3", "nvfp4"):
        found = cast(x, fmt)
        assert found[1, :16].isnan().all() and found[2, 32:48].isnan().all()
        assert found[0].isfinite().all() and found[3].isfinite().all() and found[1, 32:].isfinite().all()


def test_a_scale_multiplies_before_and_divides_after(backend):
    x = torch.randn(1000) * 1e-4
    for scale in (1024.0, 3.7, 2.0**-3, torch.tensor(3.7), torch.tensor([1024.0])):
        number = float(scale)
        exact = cast(x.double() * number, "e4m3") / number
        assert_same(cast(x, "e4m3", scale=scale), exact.float())
    # 2**-130 times 2**130 is 1, though 2**-130 * 2**127 would be all that fits below the range's end.
    assert float(cast(torch.tensor(2.0**-130), "e4m3", scale=2.0**130)) == 2.0**-130
    assert_same(cast(x, "mxfp4", scale=3.7), (cast(x.double() * 3.7, "mxfp4") / 3.7).float())
    assert_same(cast(x, "nvfp4", scale=1024.0), cast(x, "nvfp4"))


def test_flushing_subnormals_does_not_change_a_cast():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush mode")
    try:
        tiny = torch.tensor([2**10 + 2**9 + 1, 3], dtype=torch.int32).view(torch.float32)
        assert cast(tiny, "bf16").view(torch.int32).tolist() == [0, 0]
        found = cast(torch.full((1,), 3 << 15, dtype=torch.int32).view(torch.float32), "bf16")
    finally:
        torch.set_flush_denormal(False)
    assert found.view(torch.int32).tolist() == [1 << 17]


def test_a_result_carries_no_gradient():
    weight = torch.nn.Parameter(torch.randn(8))
    assert not cast(weight, "e4m3").requires_grad
    with torch.inference_mode():
        x = torch.randn(40)
        assert_same(cast(x, "mxfp4"), cast(x.clone(), "mxfp4"))
    assert cast(torch.randn(3, 5, device="meta"), "nvfp4").shape == (3, 5)


@pytest.mark.parametrize("fmt", EVERY_KIND)
def test_compiled_equals_eager(fmt):
    def everything(x, key):
        return (
            cast(x, fmt),
            cast(x, fmt, rounding="stochastic", generator=key),
            cast(x, fmt, rounding="up", scale=4.0)
            if fmt in ("e4m3", "mxfp4")
            else cast(x, fmt, rounding="toward_zero"),
            cast(cast(x, "bf16"), torch.float32),  # a round trip that a compiler might remove
        )

    x, key = torch.randn(4, 50), torch.tensor(11)
    compiled = torch.compile(everything, fullgraph=True)(x, key)
    for found, expected in zip(compiled, everything(x, key), strict=True):
        assert_same(found, expected)
    assert not torch.equal(compiled[3], x)


@each("fmt", EVERY_KIND)
@each("dim", [0, 1])
def test_vmap_equals_a_loop(fmt, dim):
    batch = torch.randn(3, 4, 40)
    found = torch.func.vmap(lambda x: cast(x, fmt), in_dims=dim)(batch)
    assert_same(found, torch.stack([cast(example, fmt) for example in batch.unbind(dim)]))


def test_vmap_refuses_a_scale_for_each_example():
    with pytest.raises(UnsupportedTensorError, match="cast: expected one scale and one key for the whole batch"):
        torch.func.vmap(lambda x, s: cast(x, "e4m3", scale=s))(torch.randn(3, 4), torch.ones(3))
    with pytest.raises(UnsupportedTensorError, match="cast: expected one scale and one key for the whole batch"):
        torch.func.vmap(lambda s: cast(torch.ones(4), "nvfp4", scale=s))(torch.ones(3))


@each("fmt", EVERY_KIND)
@each("key", [3, torch.tensor(3)])
def test_vmap_draws_other_noise_for_each_example(fmt, key):
    x = torch.linspace(1.0, 2.0, 64)
    found = torch.func.vmap(lambda x: cast(x, fmt, rounding="stochastic", generator=key))(torch.stack([x, x]))
    assert_same(found[0], cast(x, fmt, rounding="stochastic", generator=key))
    assert not torch.equal(found[0], found[1])


BAD_ARGUMENTS = {
    "format": ({"fmt": "e4n3"}, FormatError, r"expected a format's name.*got 'e4n3'.*Nearest: e4m3"),
    "rounding": (
        {"rounding": "nearest"},
        ArgumentError,
        "expected rounding to be 'nearest_even', .*; got rounding='nearest'",
    ),
    "scale rule": (
        {"fmt": "mxfp4", "scale_rule": "up"},
        ArgumentError,
        "scale_rule to be 'floor', 'ceil', 'rceil' or 'even'",
    ),
    "rule without blocks": ({"scale_rule": "ceil"}, ArgumentError, "scale_rule and axis with a block format only"),
    "axis without blocks": ({"axis": 0}, ArgumentError, "scale_rule and axis with a block format only; got .*axis=0"),
    "axis": (
        {"fmt": "mxfp4", "axis": 2},
        ArgumentError,
        r"expected axis to be one of -2 to 1; got 2 for shape \(2, 3\)",
    ),
    "axis of no integer": ({"fmt": "mxfp4", "axis": 1.0}, ArgumentError, r"axis to be an integer; got axis=1\.0"),
    "saturate of no bool": ({"saturate": "no"}, ArgumentError, "expected True, False or None; got saturate='no'"),
    "saturate of blocks": ({"fmt": "mxfp4", "saturate": 0}, ArgumentError, "True or None for mxfp4.*got saturate=0"),
    "out of no tensor": ({"out": [0.0]}, ArgumentError, "cast: expected out to be a tensor; got list"),
    "saturate": ({"fmt": "e2m1", "saturate": False}, ArgumentError, "neither Inf nor NaN to overflow to"),
    "block saturate": ({"fmt": "mxfp4", "saturate": False}, ArgumentError, "whose elements always saturate"),
    "scale": ({"scale": 0.0}, ArgumentError, "scale to be a number above 0; got scale=0.0"),
    "scale kind": ({"scale": "2"}, ArgumentError, "scale to be a number above 0; got scale='2'"),
    "scale shape": ({"scale": torch.ones(3)}, ArgumentError, r"floating tensor of one value; got .*shape \(3,\)"),
    "generator unused": ({"generator": 3}, ArgumentError, "generator with rounding='stochastic' only; got generator=3"),
    "generator": (
        {"rounding": "stochastic", "generator": 0.5},
        ArgumentError,
        r"int or an int64 key tensor; got 0.5 \(float\)",
    ),
    "key": (
        {"rounding": "stochastic", "generator": torch.ones(1)},
        ArgumentError,
        "key tensor to be one int64; got torch.float32",
    ),
    "dtype": ({"dtype": torch.int8}, ArgumentError, "dtype to be a floating torch dtype .*; got torch.int8"),
    "out shape": ({"out": torch.empty(3, 2)}, ArgumentError, r"out to be of x's shape \(2, 3\)"),
    "out dtype": (
        {"out": torch.empty(2, 3), "dtype": torch.float16},
        ArgumentError,
        "out to be of the dtype torch.float16",
    ),
    "out grad": (
        {"out": torch.empty(2, 3, requires_grad=True)},
        ArgumentError,
        "out to be a tensor that needs no gradient",
    ),
    "out expanded": ({"out": torch.empty(1, 3).expand(2, 3)}, ArgumentError, "a tensor with memory for each value"),
}


@each("name", BAD_ARGUMENTS)
def test_bad_arguments_say_what_was_expected(name):
    arguments, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        cast(torch.zeros(2, 3), **({"fmt": "e4m3"} | arguments))


BAD_TENSORS = {
    "int": (lambda: torch.arange(3), r"dtype torch.int64.*Use x.double"),
    "bool": (lambda: torch.ones(2, dtype=torch.bool), "dtype torch.bool"),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), "view_as_real"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"coalesce\(\).values\(\)"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"x.values\(\)",
    ),
    "number": (lambda: 3.0, "torch tensor; got float"),
}


@each("name", BAD_TENSORS)
def test_other_tensors_are_refused_with_a_remedy(name):
    make, message = BAD_TENSORS[name]
    with pytest.raises(UnsupportedTensorError, match="cast: expected a .*" + message):
        cast(make(), "e4m3")


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
import plimsoll
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = torch.randn(8, 64)
for placement in (Shard(0), Replicate()):
    for fmt in ("e4m3", "mxfp4"):
        found = plimsoll.cast(DTensor.from_local(x, mesh, [placement]), fmt)
        assert found.placements == (placement,) and torch.equal(found.to_local(), plimsoll.cast(x, fmt))
leaf = DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()
plimsoll.fake_quantize(leaf, forward="e4m3", backward="e5m2").sum().backward()
assert torch.equal(leaf.grad.to_local(), torch.ones(8, 64))
for placement, fmt in ((Partial(), "e4m3"), (Shard(1), "mxfp4"), (Shard(0), "nvfp4")):
    try:
        plimsoll.cast(DTensor.from_local(x, mesh, [placement]), fmt)
    except plimsoll.UnsupportedTensorError as error:
        print(error)
dist.destroy_process_group()
"""


def test_a_dtensor_is_cast_locally_where_that_is_the_same():
    done = processes.python("-W", "ignore", "-c", SHARDED)
    assert done.returncode == 0, done.stderr
    refused = processes.without_gloo(done.stdout).splitlines()
    assert len(refused) == 3
    assert "redistribute" in refused[0] and "axis that is not sharded" in refused[1] and "tensor scale" in refused[2]


MEMORY = """
import torch, plimsoll
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
x = torch.randn(1 << 25).to(getattr(torch, "{dtype}"))
out = torch.zeros_like(x)
for few in (x[:200_000], x[:400_000].view(2, -1)[:, 1::2]):  # compiled code is loaded
    plimsoll.measure(few); plimsoll.cast(few, "{fmt}")
before = peak()
plimsoll.measure(x); plimsoll.measure(x.view(2, -1)[:, 1::2])
measured = peak() - before
plimsoll.cast(x, "{fmt}", out=out)
print(measured, peak() - before - measured)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("dtype", "fmt"), [("float32", "e4m3"), ("bfloat16", "mxfp4")])
def test_neither_measuring_nor_casting_allocates_what_grows(dtype, fmt):
    code = MEMORY.format(dtype=dtype, fmt=fmt)
    for _ in range(3):  # a process's peak has what its threads happen to take in it: what grows is in every one's
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        measured_kib, cast_kib = map(int, done.stdout.split())
        if measured_kib < 1024 and cast_kib < 2048:  # of 128 MiB and 64 MiB
            return
    pytest.fail(f"measuring took {measured_kib} KiB, casting {cast_kib}")
