"""Every kind of tensor is measured as what it holds, or refused with the reason and the remedy."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plimsoll import kernels
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING
from plimsoll.spectrum import Source, Spectrum, measure
from tests.support import processes
from tests.support.cases import each
from tests.support.spectra import same

VALUES = [[0.0, 1.0, -2.0], [0.5, 448.0, -0.25]]
RANK = processes.SUPPORT / "spectrum" / "rank.py"


def plain() -> torch.Tensor:
    return torch.tensor(VALUES)


def measured_as(x: torch.Tensor) -> Spectrum:
    return measure(x.double())


@each("dtype", [*FLOATING, *EIGHT_BIT])
@each("kind", ["2-d", "0-d", "empty", "special", "subnormal"])
def test_every_dtype(dtype: torch.dtype, kind: str) -> None:
    smallest = torch.finfo(dtype).tiny / 4 if dtype != torch.float64 else 2.0**-140
    x = {
        "2-d": plain(),
        "0-d": torch.tensor(-3.0),
        "empty": torch.empty(0, 3),
        "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0]),
        "subnormal": torch.tensor([smallest, -smallest], dtype=torch.float64),
    }[kind].to(dtype)
    s = measure(x)
    assert same(s, measured_as(x)) and s.count == x.numel()
    assert s.source == Source(dtype)


class Plain(torch.Tensor):
    """A subclass with data of its own."""


class Stubborn(torch.Tensor):
    """A subclass that answers every function with an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(func)


class Hollow(torch.Tensor):
    """A subclass that wraps others."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(func)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return plain()


KINDS = {
    "requires grad": lambda: plain().requires_grad_(),
    "in a graph": lambda: plain().requires_grad_() * 1,
    "Parameter": lambda: torch.nn.Parameter(plain()),
    "Buffer": lambda: torch.nn.Buffer(plain()),
    "inference": inference,
    "transposed": lambda: plain().t(),
    "strided": lambda: plain().repeat(1, 2)[:, ::2],
    "expanded": lambda: torch.tensor([1.0, 0.0, -2.0])[None].expand(4, 3),
    "expanded scalar": lambda: torch.tensor(1.5).expand(1000),
    "negated view": lambda: torch._neg_view(plain()),
    "imaginary part of a conjugate": lambda: torch.view_as_complex(torch.randn(5, 2)).conj().imag,
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "subclass": lambda: plain().as_subclass(Plain),
    "stubborn subclass": lambda: plain().as_subclass(Stubborn),
}


@each("kind", KINDS)
def test_every_kind_that_can_be_measured(kind: str) -> None:
    x = KINDS[kind]()
    with torch._C.DisableTorchFunctionSubclass():
        expected = torch.tensor(x.detach().resolve_neg().tolist(), dtype=torch.float64)
    assert same(measure(x), measure(expected))


def test_measuring_under_inference_mode_and_without_default_settings() -> None:
    with torch.inference_mode():
        assert measure(plain()) == measure(plain())
    with torch.device("meta"):
        x = torch.tensor(VALUES, device="cpu")
        assert measure(x).count == 6


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.quantize_per_tensor is on its way out; such tensors still come in
        return torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8)


def sparse_csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a beta
        return plain().to_sparse_csr()


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def strided_nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def wrapper() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Hollow, (3,), dtype=torch.float32)


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


REFUSED = {
    "int": (
        lambda: torch.arange(3),
        r"got a tensor of dtype torch.int64 \(torch.int64, shape \(3,\)\). Use x.double",
    ),
    "bool": (lambda: torch.ones(2, dtype=torch.bool), r"torch.bool, shape \(2,\)\). Use x.double\(\)"),
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), r"a complex tensor .* Use torch.view_as_real"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), r"a complex tensor .*x.resolve_conj\(\)"),
    "sparse": (lambda: plain().to_sparse(), r"a sparse tensor .* Use x.coalesce\(\).values\(\), the stored values"),
    "csr": (sparse_csr, r"layout torch.sparse_csr .* Use x.values\(\), the stored values, or x.to_dense\(\)"),
    "mkldnn": (lambda: plain().to_mkldnn(), r"layout torch._mkldnn .* Use x.to_dense\(\)"),
    "quantized": (quantized, r"a quantized tensor .* Use x.dequantize\(\)"),
    "jagged": (
        jagged,
        r"a nested tensor \(torch.float32\). Use x.values\(\) if it is jagged, else each of x.unbind",
    ),
    "nested": (strided_nested, r"a nested tensor .* each of x.unbind\(\)"),
    "meta": (
        lambda: torch.empty(3, device="meta"),
        r"one without data, on the meta device .* Measure it after it is mat",
    ),
    "fake": (fake, r"one without data, a FakeTensor .* Measure it after it is materialized"),
    "wrapper": (wrapper, r"a Hollow, which wraps others and has no data itself .*x.dequantize\(\) if it has one"),
    "masked": (masked, r"a MaskedTensor, which wraps others"),
    "lazy": (
        lambda: torch.nn.LazyLinear(3).weight,
        r"a UninitializedParameter \(torch.float32\), which .* Run the module",
    ),
    "e8m0": (lambda: torch.ones(2).to(torch.float8_e8m0fnu), r"a tensor of scales, .* Use x.double\(\)"),
    "fp4": (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), r"packed codes, two values a byte"),
    "numpy": (lambda: np.ones(3), r"got numpy.ndarray. Write torch.from_numpy\(x\)"),
    "None": (lambda: None, r"got NoneType. A parameter that took no part in the backward has no gradient"),
    "module": (lambda: torch.nn.Linear(1, 1), r"Linear. Write dict\(module.named_parameters\(\)\)"),
    "float": (lambda: 1.0, r"got float. Write torch.tensor\(x, dtype=torch.float64\)"),
    "generator": (lambda: (x for x in [plain()]), r"got generator. Write list\(x\)"),
    "text": (lambda: "x", r"got str. Give the tensor itself"),
}


@each("kind", REFUSED)
def test_every_kind_that_is_refused_says_why_and_where(kind: str) -> None:
    make, message = REFUSED[kind]
    x = make()
    with pytest.raises(UnsupportedTensorError, match="measure: expected a.*" + message):
        measure(x)
    with pytest.raises(UnsupportedTensorError, match=r"measure: .* at index 1"):
        measure([plain(), x])
    with pytest.raises(UnsupportedTensorError, match=r"measure: .* under 'a\.weight'"):
        measure({"a.weight": x})


def test_a_tensor_inside_a_transform_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"a tensor inside a torch.func transform .* Return the tensor"):
        torch.vmap(lambda x: (measure(x), x)[1])(plain())


def test_one_or_many() -> None:
    x, y = plain(), torch.ones(3, dtype=torch.float16)
    assert measure([x, y]) == [measure(x), measure(y)] == measure((x, y))
    assert measure({"x": x, 3: y}) == {"x": measure(x), 3: measure(y)}
    assert list(measure({"b": x, "a": y})) == ["b", "a"]
    assert measure([]) == [] and measure({}) == {} and measure(()) == []


def test_many_tensors_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    launch = kernels.measure_into
    monkeypatch.setattr(kernels, "measure_into", lambda *a, **k: (calls.append(len(a[0])), launch(*a, **k)))
    measure([plain()] * 50 + [torch.ones(3, dtype=torch.float16)])
    assert calls == [51]


def test_sources_for_one_or_for_each() -> None:
    x, fp16 = plain(), Source("fp16", 8.0)
    assert measure(x, source=fp16).source == fp16
    assert [s.source for s in measure([x, x], source=fp16)] == [fp16, fp16]
    assert [s.source for s in measure([x, x], source=[None, fp16])] == [Source("fp32"), fp16]
    found = measure({"a": x, "b": x}, source={"b": fp16})
    assert (found["a"].source, found["b"].source) == (Source("fp32"), fp16)
    # The tensor's own dtype is a format that its values pass through too.
    assert measure(x.half(), source=Source("fp32")).source == Source("fp16")


@each(
    ("x", "source", "message"),
    [
        ([0, 0], [None], "expected one source for each of 2 tensors; got 1 sources. Pass None where"),
        ([0], "fp16", r"expected source to be a Source or None, .* got source='fp16'. Write Source\("),
        ([0], ["fp16"], ".* got source='fp16'"),
        ({"a": 0}, {"b": None}, "expected sources for tensors that are measured; got sources for 'b'"),
    ],
)
def test_sources_that_fit_nothing(x: object, source: object, message: str) -> None:
    tensors = {k: plain() for k in x} if isinstance(x, dict) else [plain() for _ in x]  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="measure: " + message):
        measure(tensors, source=source)  # type: ignore[call-overload]


@each("block", [0, 1, -16, 24, 16.0, True, "16"])
def test_a_block_is_a_power_of_two(block: object) -> None:
    with pytest.raises(
        ArgumentError, match="measure: expected block to be None or a power of two of 2 or more; got block="
    ):
        measure(plain(), block=block)  # type: ignore[call-overload]


def test_blocks_run_along_the_last_axis() -> None:
    x = torch.tensor([[1.0] * 16 + [8.0] * 4, [0.0] * 20])
    blocks = measure(x, block=16).blocks
    assert blocks is not None
    assert (blocks.block, blocks.blocks, blocks.zero_blocks) == (16, 4, 2)
    assert blocks.maxima[149] == 1 and blocks.maxima[152] == 1 and blocks.depths[0] == 20


def test_sharded_tensors_add_up_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: a process group is process-wide state."""
    monkeypatch.setenv("PLIMSOLL_BACKEND", "torch")
    processes.ranks(RANK, [(tmp_path / "store", rank) for rank in range(2)])
