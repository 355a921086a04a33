"""Accumulators: the rules for CPUs against what the kernels do, those for CUDA against torch's switches."""

import pytest
import torch

from plimsoll.receipts.recording.operations import Arithmetic, Switches, product_arithmetic, sum_accumulator
from tests.support.cases import each
from tests.support.receipts.ones import COUNT, PRODUCTS, SUMS, ones

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
STUCK = {FP16: 2048.0, BF16: 256.0}
NAMES = {FP16: "fp16", BF16: "bf16"}


@each("dtype", [FP16, BF16], ids=NAMES.get)
@each("base", PRODUCTS)
def test_products_on_a_cpu_are_added_up_in_fp32(dtype: torch.dtype, base: str):
    result = PRODUCTS[base](ones(dtype)).flatten()[0].item()
    assert result >= COUNT
    assert product_arithmetic(base, dtype, CPU, COUNT, Switches()).accumulate == "fp32"


@each("dtype", [FP16, BF16], ids=NAMES.get)
@each("base", SUMS)
def test_sums_on_a_cpu(dtype: torch.dtype, base: str):
    result = SUMS[base](ones(dtype)).flatten()[0].item()
    said = sum_accumulator(base, dtype, CPU)
    assert result == (STUCK[dtype] if said == NAMES[dtype] else COUNT)
    assert said in ("fp32", NAMES[dtype])


def test_fp32_products_that_onednn_may_round(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    exact = a @ b
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        said = product_arithmetic("mm", FP32, CPU, 64**3, Switches.now())
        rounded = not torch.equal(a @ b, exact)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert not rounded or said.multiplied == "bf16"
    assert product_arithmetic("mm", FP32, CPU, 64**3, Switches()) == Arithmetic(None, "fp32")


@each(
    "base, dtype, switches, expected",
    [
        ("mm", FP32, Switches(), Arithmetic(None, "fp32")),
        ("mm", FP32, Switches(cuda_matmul="tf32"), Arithmetic("tf32", "fp32")),
        ("convolution", FP32, Switches(cuda_matmul="tf32"), Arithmetic(None, "fp32")),
        ("convolution_backward", FP32, Switches(cuda_convolution="tf32"), Arithmetic("tf32", "fp32")),
        ("mm", BF16, Switches(), Arithmetic(None, "fp32")),
        ("mm", BF16, Switches(bf16_reduction=True), Arithmetic(None, "fp32", "bf16")),
        ("mm", FP16, Switches(bf16_reduction=True), Arithmetic(None, "fp32")),
        ("addmm", FP16, Switches(fp16_reduction=True), Arithmetic(None, "fp32", "fp16")),
        ("addmm", FP16, Switches(fp16_reduction=True, fp16_accumulation=True), Arithmetic(None, "fp16")),
        ("addmm", BF16, Switches(fp16_accumulation=True), Arithmetic(None, "fp32")),
        ("convolution", FP16, Switches(fp16_accumulation=True), Arithmetic(None, "fp32")),
        ("mm", torch.float64, Switches(cuda_matmul="tf32"), Arithmetic(None, "fp64")),
        ("_scaled_mm", torch.float8_e4m3fn, Switches(), Arithmetic(None, "fp32")),
        ("_int_mm", torch.int8, Switches(), Arithmetic(None, "int32")),
    ],
    ids=str,
)
def test_cuda_follows_torchs_switches(base: str, dtype: torch.dtype, switches: Switches, expected: Arithmetic):
    if torch.cuda.is_available() and expected.multiplied == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        expected = expected._replace(multiplied=None)
    assert product_arithmetic(base, dtype, CUDA, 1 << 20, switches) == expected


def test_what_is_not_known_is_not_said():
    assert product_arithmetic("mm", BF16, torch.device("meta"), 1, Switches()) == Arithmetic()
    assert product_arithmetic("_scaled_mm", torch.float8_e4m3fn, CUDA, 1, Switches(), fast=True) == Arithmetic()
    assert sum_accumulator("sum", BF16, torch.device("meta")) is None
    assert sum_accumulator("logcumsumexp", BF16, CPU) is None


def test_the_switches_are_those_of_torch(monkeypatch: pytest.MonkeyPatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, matmul.allow_fp16_accumulation, matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.fp32_precision, matmul.allow_fp16_accumulation = "tf32", True
        matmul.allow_bf16_reduced_precision_reduction = False
        # Only processors that multiply in FP16 let it be set; the name must be there in any case.
        monkeypatch.setattr(torch._C, "_get_cpu_allow_fp16_reduced_precision_reduction", lambda: True)
        now = Switches.now()
        assert (now.cuda_matmul, now.fp16_accumulation, now.bf16_reduction) == ("tf32", True, False)
        assert now.cpu_fp16_reduction
        assert now.fp16_reduction == bool(matmul.allow_fp16_reduced_precision_reduction)
    finally:
        matmul.fp32_precision, matmul.allow_fp16_accumulation = before[:2]
        matmul.allow_bf16_reduced_precision_reduction = before[2]
