"""`pack` to real codes and scales, and back."""

import math
import pickle

import numpy as np
import pytest
import torch

from plimsoll import cast, kernels, pack, unpack
from plimsoll.errors import ArgumentError, FormatError, UnsupportedTensorError
from plimsoll.formats import BLOCKS, ELEMENTS, get, get_element
from tests.support.cases import each

BACKENDS = [status.name for status in kernels.report() if status.available]
NARROW = [fmt for fmt in ELEMENTS if fmt.bits <= 16] + [get_element(name, "test") for name in ("e5m7", "e2m0", "e3m4")]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with kernels.use(request.param):
        yield request.param


@each("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_codes_are_the_formats_own(backend, fmt):
    x = torch.randn(3, 35).abs() if not fmt.signed else torch.randn(3, 35)
    packed = pack(x, fmt)
    assert packed.single_codes().dtype == (torch.uint8 if fmt.bits <= 8 else torch.uint16)
    np.testing.assert_array_equal(packed.single_codes().numpy(), fmt.encode(x.numpy()))
    np.testing.assert_array_equal(fmt.decode(packed.single_codes().numpy()), cast(x, fmt).double().numpy())
    assert torch.equal(unpack(packed), cast(x, fmt))
    assert packed.scales is None and packed.tensor_scale is None


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
@each("shape", [(3, 70), (64,), (), (2, 3, 16), (1, 1), (0, 5), (5, 0)])
def test_blocks_come_back_as_cast_makes_them(backend, fmt, shape):
    x = torch.randn(shape)
    for rule in ("floor", "ceil", "rceil", "even"):
        assert torch.equal(unpack(pack(x, fmt, scale_rule=rule)), cast(x, fmt, scale_rule=rule))


def test_four_bits_take_four_bits(backend):
    packed = pack(torch.tensor([[0.5, -1.0, 6.0], [0.0, 1.5, -0.5]]), "e2m1")
    assert packed.codes.tolist() == [[0xA1, 0x07], [0x30, 0x09]]
    assert packed.single_codes().tolist() == [[1, 10, 7], [0, 3, 9]]
    large = pack(torch.randn(128, 256), "mxfp4")
    assert large.codes.shape == (128, 128) and large.scales.shape == (128, 8)
    assert 8 * large.nbytes == 128 * 256 * get("mxfp4").bits


def test_the_parts_rebuild_the_values(backend):
    x = torch.randn(4, 64) * 1e-3
    packed = pack(x, "nvfp4")
    elements = get("e2m1").decode(packed.single_codes().numpy()).reshape(4, 4, 16)
    scales = get("e4m3").decode(packed.scales.numpy())[..., None]
    rebuilt = (elements * scales * float(packed.tensor_scale)).reshape(4, 64)
    np.testing.assert_array_equal(rebuilt.astype(np.float32), cast(x, "nvfp4").numpy())
    expected_scale = np.float32(float(x.abs().max()) / 2688)
    assert np.float32(packed.tensor_scale) == expected_scale


def test_every_argument_comes_back(backend):
    x = torch.randn(40, 3, dtype=torch.float64)
    for fmt, arguments in (
        ("mxfp8_e4m3", {"axis": 0}),
        ("e4m3", {"scale": 3.7}),
        ("nvfp4", {"axis": -2, "scale": 0.3}),
    ):
        packed = pack(x, fmt, **arguments)
        assert torch.equal(unpack(packed), cast(x, fmt, **arguments))
        assert unpack(packed, dtype=torch.bfloat16).dtype == torch.bfloat16
        copy = pickle.loads(pickle.dumps(packed))
        assert torch.equal(unpack(copy), unpack(packed)) and (copy.axis, copy.scale) == (packed.axis, packed.scale)


def test_a_block_with_nan_keeps_it_as_its_scale(backend):
    x = torch.ones(64)
    x[3] = math.nan
    packed = pack(x, "mxfp8_e4m3")
    assert packed.scales.tolist() == [255, 119] and packed.codes[:32].tolist() == [0] * 32
    assert unpack(packed)[:32].isnan().all() and torch.equal(unpack(packed)[32:], x[32:])


def test_compiled_equals_eager():
    def parts(x):
        packed = pack(x, "mxfp4")
        return packed.codes, packed.scales, unpack(packed)

    x = torch.randn(4, 70)
    for found, expected in zip(torch.compile(parts, fullgraph=True)(x), parts(x), strict=True):
        assert torch.equal(found, expected)


def test_refusals():
    with pytest.raises(
        ArgumentError, match="pack: expected no NaN for e2m1, which has no code for it; got 2 in torch.fl"
    ):
        pack(torch.tensor([1.0, math.nan, math.nan]), "e2m1")
    with pytest.raises(
        ArgumentError, match=r"pack: expected an element format of at most 16 bits; got tf32 \(19 bits\)"
    ):
        pack(torch.ones(2), "tf32")
    with pytest.raises(UnsupportedTensorError, match="pack: expected a tensor of plain floating values"):
        pack(torch.ones(2, dtype=torch.int32), "e4m3")
    with pytest.raises(ArgumentError, match="unpack: expected dtype to be a floating torch dtype.*got torch.int32"):
        unpack(pack(torch.ones(2), "e4m3"), dtype=torch.int32)
    with pytest.raises(FormatError, match="got 'e4'"):
        pack(torch.ones(2), "e4")


@each("fmt", [fmt.name for fmt in (*ELEMENTS, *BLOCKS) if fmt.bits <= 16] + ["e3m0", "e2m0", "e5m7"])
@each("shape", [(), (0,), (1,), (3,), (0, 4), (4, 0), (2, 0, 3), (2, 3, 5)])
def test_scalars_and_empty_tensors_keep_their_shape(fmt: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) + 1
    packed = pack(x, fmt)
    assert packed.single_codes().shape == shape
    assert packed.nbytes > 0 or not x.numel() or fmt == "nvfp4"
    assert unpack(packed).shape == shape and torch.equal(unpack(packed), cast(x, fmt))


def test_a_scalar_is_one_code() -> None:
    assert pack(torch.tensor(1.0), "e4m3").single_codes().item() == 0x38
    assert pack(torch.tensor(-6.0), "e2m1").single_codes().item() == 0b1111
    packed = pack(torch.tensor(-6.0), "mxfp4")
    assert packed.codes.shape == () and packed.scales.tolist() == [127] and packed.nbytes == 2


@each("fmt", ["e2m1", "e3m2", "e2m3", "e3m0", "e4m3", "fp16", "mxfp4", "nvfp4"])
def test_a_tensor_without_values_has_codes_without_values(fmt: str) -> None:
    packed, real = pack(torch.empty(4, 33, device="meta"), fmt), pack(torch.ones(4, 33), fmt)
    assert packed.codes.is_meta and packed.codes.shape == real.codes.shape and packed.codes.dtype == real.codes.dtype
    assert unpack(packed).is_meta and unpack(packed).shape == (4, 33)
