"""Sound implementations: no deviation is invented, and what they do is inferred."""

import gfloat
import gfloat.formats
import ml_dtypes
import pytest
import torch

import plimsoll as pl
from plimsoll import kernels
from plimsoll.formats import BLOCKS, ELEMENTS, Format
from tests.support.cases import each
from tests.support.certification.blocks import MXFP4, MXFP8, NVFP4, packed
from tests.support.certification.casts import TableCast, at_random
from tests.support.certification.code_faults import mx_values, nvfp4_values
from tests.support.certification.reductions import Summation, kahan

# Triton's interpreter takes minutes for this many values. Its own tests hold it against the others.
BACKENDS = [status.name for status in kernels.report() if status.available and status.name != "triton"]
_NO_LIMIT = 1e6


def conforms(function, fmt, **arguments) -> pl.Certificate:
    """Assert that no row of the certificate deviates or was refused; return it."""
    found = pl.certify(function, fmt, seconds=_NO_LIMIT, **arguments)
    assert found.conforms, str(found)
    assert not [row.requirement for row in found.rows if row.status == "refuses"], str(found)
    return found


@each("fmt", [fmt for fmt in ELEMENTS if fmt.bits <= 8], ids=lambda fmt: fmt.name)
def test_our_casts(fmt: Format) -> None:
    for backend in BACKENDS if fmt.name in ("e4m3", "e2m1", "e8m0") else BACKENDS[:1]:
        with kernels.use(backend):
            found = conforms(lambda x: pl.cast(x, fmt), fmt)
            assert found.inferred.rounding == "nearest_even" and found.inferred.saturate is (not fmt.has_inf)


def test_our_16_bit_casts() -> None:
    found = conforms(lambda x: pl.cast(x.float(), "fp16"), "fp16")
    assert found.inferred.saturate is False and found.inferred.subnormal_inputs == "kept"


@pytest.mark.parametrize("backend", BACKENDS)
@each("rounding", ["nearest_away", "toward_zero", "up", "down"])
def test_our_other_roundings(backend: str, rounding: str) -> None:
    with kernels.use(backend):
        found = conforms(lambda x: pl.cast(x, "e5m2", rounding=rounding), "e5m2", rounding=rounding)
        assert found.inferred.rounding == rounding


@pytest.mark.parametrize(("backend", "fmt"), [(BACKENDS[0], "bf16"), (BACKENDS[0], "nvfp4"), (BACKENDS[-1], "e4m3")])
def test_our_stochastic_rounding(backend: str, fmt: str) -> None:
    with kernels.use(backend):
        found = conforms(lambda x: pl.cast(x.float(), fmt, rounding="stochastic"), fmt)
        assert found.inferred.rounding == "stochastic"


@each("fmt", BLOCKS, ids=lambda fmt: fmt.name)
def test_our_blocks(fmt: pl.BlockFormat) -> None:
    for backend in BACKENDS if fmt.name in ("mxfp4", "nvfp4") else BACKENDS[:1]:
        with kernels.use(backend):
            found = conforms(lambda x: pl.pack(x, fmt), fmt, kind="pack")
            assert found.inferred.nan == "its whole block becomes nan"


@each("fmt", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_our_blocks_as_values(fmt: str) -> None:
    conforms(lambda x: pl.cast(x, fmt), fmt)


@each("rule", ["ceil", "rceil", "even"])
def test_our_scale_rules(rule: str) -> None:
    values = conforms(lambda x: pl.cast(x, "mxfp8_e4m3", scale_rule=rule), "mxfp8_e4m3", scale_rule=rule)
    codes = conforms(lambda x: pl.pack(x, "mxfp4", scale_rule=rule), "mxfp4", kind="pack", scale_rule=rule)
    assert values.inferred.scale_rule == codes.inferred.scale_rule == rule


@each("fmt", ["e4m3", "e5m2", "e2m1", "bf16", "mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_our_packs_and_unpacks(fmt: str) -> None:
    conforms(pl.unpack, fmt, kind="unpack")
    if "mx" not in fmt and fmt not in ("nvfp4", "bf16", "e2m1"):
        conforms(lambda x: pl.pack(x, fmt), fmt, kind="pack")


def test_a_pack_that_refuses_nan_conforms() -> None:
    """E2M1 has no code for NaN, and OCP MX leaves open what a conversion does with one."""
    found = pl.certify(lambda x: pl.pack(x, "e2m1"), "e2m1", kind="pack")
    assert found.conforms and found.inferred.nan == "an error"


TORCH = {
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz", torch.float16: "fp16", torch.bfloat16: "bf16",
}  # fmt: skip


@each("dtype", TORCH, ids=str)
def test_torch(dtype: torch.dtype) -> None:
    found = conforms(dtype, TORCH[dtype])
    assert found.function == str(dtype) and found.inferred.rounding == "nearest_even"


ML_DTYPES = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz", "float6_e3m2fn": "e3m2",
    "float6_e2m3fn": "e2m3", "float4_e2m1fn": "e2m1", "float8_e8m0fnu": "e8m0", "bfloat16": "bf16",
    "float8_e3m4": "e3m4",
}  # fmt: skip


@each("name", ML_DTYPES)
def test_ml_dtypes(name: str) -> None:
    found = conforms(getattr(ml_dtypes, name), ML_DTYPES[name])
    assert found.function == f"ml_dtypes.{name}" and found.versions["ml_dtypes"] == ml_dtypes.__version__


@each(("name", "saturate"), [("e4m3", True), ("e5m2", False)])
def test_gfloat(name: str, saturate: bool) -> None:
    info = getattr(gfloat.formats, f"format_info_ocp_{name}")
    found = conforms(lambda x: gfloat.round_ndarray(info, x.double().numpy(), sat=saturate), name)
    assert found.inferred.saturate is saturate


def test_independent_casts() -> None:
    conforms(TableCast(), "e4m3")
    conforms(TableCast(name="e5m2", overflow=57344.0, infinities=57344.0), "e5m2")  # OFP8's saturating mode
    conforms(TableCast(goes_up=at_random(24)), "e4m3")


@each("cast", ["MXFP4", "MXFP8", "NVFP4"])
def test_independent_blocks(cast: str) -> None:
    made, fmt = {"MXFP4": (MXFP4, "mxfp4"), "MXFP8": (MXFP8, "mxfp8_e4m3"), "NVFP4": (NVFP4, "nvfp4")}[cast]
    conforms(made, fmt)
    order = -1 if cast == "MXFP4" else 1  # (scales, codes) is understood too
    conforms(lambda x: packed(made, x)[::order], fmt, kind="pack")


def test_independent_codes() -> None:
    assert conforms(mx_values, "mxfp8_e4m3", kind="unpack").inferred.takes == "codes (uint8), scales (uint8)"
    swapped = conforms(lambda scales, codes: mx_values(codes, scales), "mxfp8_e4m3", kind="unpack")
    assert swapped.inferred.takes == "scales (uint8), codes (uint8)"
    conforms(nvfp4_values, "nvfp4", kind="unpack")
    conforms(lambda codes: codes.view(torch.float8_e5m2).float(), "e5m2", kind="unpack")


@each("fmt", ["fp32", "fp16", "fp64"])
def test_torch_products_and_sums(fmt: str) -> None:
    product = conforms(torch.matmul, fmt, kind="matmul")
    assert product.inferred.accumulate in ("fp32", "fp64") and product.function == "torch.matmul"
    conforms(torch.sum, fmt, kind="sum")


def test_independent_sums() -> None:
    found = conforms(Summation(), "fp32", kind="sum")
    assert found.inferred.order == "64 terms one after another" and found.inferred.accumulate == "fp32"
    compensated = pl.certify(Summation(order=kahan), "bf16", kind="sum", seconds=_NO_LIMIT)
    assert compensated.inferred.compensated is True
    assert [row.requirement for row in compensated.deviations] == ["special-values"]  # Inf - Inf in the correction
