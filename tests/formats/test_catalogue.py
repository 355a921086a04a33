"""The catalogue against the tables of the specifications, and the ways to name a format."""

import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from plimsoll import formats
from plimsoll.errors import FormatError
from plimsoll.formats import ALIASES, BLOCKS, E4M3, ELEMENTS, FP16, BlockFormat, Format, get, get_element
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS

# Copied by hand. IEEE 754-2019 table 3.5; OCP FP8 1.0 table 1; OCP MX 1.0 tables 3 to 7; arXiv:2206.02915 table 1.
# name: bits, exponent bits, mantissa bits, bias, max, smallest normal, smallest subnormal, epsilon, Inf, NaN, binades
TABLE = {
    "fp64": (64, 11, 52, 1023, 1.7976931348623157e308, 2.0**-1022, 5e-324, 2.0**-52, True, True, 2098),
    "fp32": (32, 8, 23, 127, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23, True, True, 277),
    "tf32": (19, 8, 10, 127, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136, 2.0**-10, True, True, 264),
    "fp16": (16, 5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, True, True, 40),
    "bf16": (16, 8, 7, 127, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, True, True, 261),
    "e5m2": (8, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, 0.25, True, True, 32),
    "e4m3": (8, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, 0.125, False, True, 18),
    "e5m2fnuz": (8, 5, 2, 16, 57344.0, 2.0**-15, 2.0**-17, 0.25, False, True, 33),
    "e4m3fnuz": (8, 4, 3, 8, 240.0, 2.0**-7, 2.0**-10, 0.125, False, True, 18),
    "e3m2": (6, 3, 2, 3, 28.0, 0.25, 0.0625, 0.25, False, False, 9),
    "e2m3": (6, 2, 3, 1, 7.5, 1.0, 0.125, 0.125, False, False, 6),
    "e2m1": (4, 2, 1, 1, 6.0, 1.0, 0.5, 0.5, False, False, 4),
    "e8m0": (8, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, 1.0, False, True, 255),
}
# name: element, block, scale, tensor scale, bits a value (OCP MX 1.0 table 2; arXiv:2509.25149)
BLOCK_TABLE = {
    "mxfp8_e4m3": ("e4m3", 32, "e8m0", False, 8.25),
    "mxfp8_e5m2": ("e5m2", 32, "e8m0", False, 8.25),
    "mxfp6_e3m2": ("e3m2", 32, "e8m0", False, 6.25),
    "mxfp6_e2m3": ("e2m3", 32, "e8m0", False, 6.25),
    "mxfp4": ("e2m1", 32, "e8m0", False, 4.25),
    "nvfp4": ("e2m1", 16, "e4m3", True, 4.5),
    "nvfp4_single": ("e2m1", 16, "e4m3", False, 4.5),
}


def test_the_catalogue_is_the_table():
    assert [fmt.name for fmt in ELEMENTS] == list(TABLE)
    assert [fmt.name for fmt in BLOCKS] == list(BLOCK_TABLE)


@each("name", TABLE)
def test_elements_are_as_specified(name):
    fmt = get_element(name, "test")
    found = (
        fmt.bits, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.max, fmt.smallest_normal, fmt.smallest_subnormal,
        fmt.epsilon, fmt.has_inf, fmt.has_nan, fmt.binades,
    )  # fmt: skip
    assert found == TABLE[name]
    assert fmt.max_exponent == math.floor(math.log2(fmt.max)) if name != "fp64" else 1023
    assert fmt.min_exponent == math.log2(fmt.smallest_normal)
    assert fmt.has_negative_zero == (name not in ("e5m2fnuz", "e4m3fnuz", "e8m0"))
    assert fmt.has_subnormals == (name != "e8m0")
    assert fmt.saturates(None) is not fmt.has_inf


@each("name", BLOCK_TABLE)
def test_blocks_are_as_specified(name):
    fmt = get(name)
    assert isinstance(fmt, BlockFormat)
    assert (fmt.element.name, fmt.block, fmt.scale.name, fmt.tensor_scale, fmt.bits) == BLOCK_TABLE[name]


@each(
    ("dtype", "name"),
    [
        (torch.float64, "fp64"), (torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16"),
        (torch.float8_e5m2, "e5m2"), (torch.float8_e4m3fn, "e4m3"), (torch.float8_e8m0fnu, "e8m0"),
        (torch.float8_e5m2fnuz, "e5m2fnuz"), (torch.float8_e4m3fnuz, "e4m3fnuz"),
    ],
)  # fmt: skip
def test_torch_dtypes_are_names(dtype, name):
    fmt = get(dtype)
    assert fmt is get(name)
    assert fmt is get(str(dtype))
    info = torch.finfo(dtype)
    assert (fmt.bits, fmt.max, fmt.smallest_normal) == (info.bits, info.max, info.smallest_normal)
    # torch.finfo says 0.125 for e5m2fnuz, which has two mantissa bits.
    assert fmt.epsilon == info.eps or name == "e5m2fnuz"


@each("name", ["float16", "float32", "float64"])
def test_numpys_own_formats_agree(name):
    fmt, info = get_element(name, "test"), np.finfo(name)
    assert (fmt.max, fmt.smallest_normal, fmt.epsilon) == (info.max, info.smallest_normal, info.eps)
    assert fmt.smallest_subnormal == info.smallest_subnormal


@each("name", [*TABLE, *BLOCK_TABLE, *ALIASES])
def test_case_does_not_matter_and_formats_are_their_own_names(name):
    fmt = get(name)
    assert get(name.upper()) is get(name.title()) is get(fmt) is fmt


@each(
    ("name", "same_as"),
    [
        ("half", "fp16"), ("float", "fp32"), ("double", "fp64"), ("bfloat16", "bf16"), ("tensorfloat32", "tf32"),
        ("e5m10", "fp16"), ("e8m7", "bf16"), ("e8m10", "tf32"), ("e8m23", "fp32"), ("e11m52", "fp64"),
        ("e4m3fn", "e4m3"), ("float8_e4m3fn", "e4m3"), ("float4_e2m1fn", "e2m1"),
        ("e05m010", "fp16"), ("E04M3", "e4m3"),
    ],
)  # fmt: skip
def test_aliases(name, same_as):
    assert get(name) is get(same_as)


@each(
    ("name", "bits", "bias", "largest", "smallest"),
    [
        ("e8m5", 14, 127, (2 - 2.0**-5) * 2.0**127, 2.0**-131),
        ("e5m7", 13, 15, (2 - 2.0**-7) * 2.0**15, 2.0**-21),
        ("e3m4", 8, 3, 15.5, 2.0**-6),
        ("e4m2", 7, 7, 224.0, 2.0**-8),
        ("e6m9", 16, 31, (2 - 2.0**-9) * 2.0**31, 2.0**-39),
        ("e2m0", 3, 1, 2.0, 1.0),
        ("e11m0", 12, 1023, 2.0**1023, 2.0**-1022),
        ("e2m52", 55, 1, 4 - 2.0**-51, 2.0**-52),
    ],
)
def test_any_other_exmy_is_ieee_like(name, bits, bias, largest, smallest):
    fmt = get_element(name, "test")
    assert (fmt.name, fmt.bits, fmt.bias, fmt.specials, fmt.signed) == (name, bits, bias, "ieee", True)
    assert (fmt.max, fmt.smallest_subnormal) == (largest, smallest)
    assert fmt == get(name)


def test_e2m3_is_the_ocp_format_and_e3m4_is_ml_dtypes_own():
    assert get("e2m3") is formats.E2M3
    info = ml_dtypes.finfo(ml_dtypes.float8_e3m4)
    fmt = get_element("e3m4", "test")
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )


@each(
    ("name", "message"),
    [
        (
            "fp61",
            r"formats\.get: expected a format's name.*; got 'fp61'\. Nearest: fp64, fp16, .*`plimsoll formats` lists",
        ),
        ("fp8", r"got 'fp8'\. fp8 is a family of formats: name e4m3 or e5m2\."),
        ("FP8", r"got 'FP8'\. fp8 is a family of formats: name e4m3 or e5m2\."),
        ("float8", r"name e4m3 or e5m2\."),
        ("mxfp8", r"name mxfp8_e4m3 or mxfp8_e5m2\."),
        ("mxfp6", r"name mxfp6_e3m2 or mxfp6_e2m3\."),
        ("fp6", r"name e3m2 or e2m3\."),
        ("fp4", r"name e2m1\."),
        ("mxpf4", r"got 'mxpf4'\. Nearest: mxfp4"),
        ("nvpf4", r"Nearest: nvfp4"),
        ("bfloat61", r"Nearest: bfloat16"),
        ("", r"got ''\. `plimsoll formats`"),
        ("zzzzzz", r"got 'zzzzzz'\. `plimsoll formats`"),
        (None, "expected a format's name, a Format or a floating torch dtype; got None"),
        (8, "got 8"),
        (torch.int8, r"got torch\.int8"),
        (np.float16, "got <class 'numpy.float16'>"),
        ("e0m7", r"expected at least one exponent bit: .* evenly spaced integers.*; got 'e0m7'"),
        ("e1m6", r"expected two exponent bits or more: .*; got 'e1m6'"),
        ("e12m3", r"expected at most 11 exponent and 52 mantissa bits, float64's own; got 'e12m3'"),
        ("e5m53", r"expected at most 11 exponent and 52 mantissa bits"),
        ("e99999m1", r"expected at most 11 exponent"),
        (f"e{'9' * 5000}m1", r"expected a format's name"),
        ("e-1m3", r"expected a format's name"),
        ("e5m", r"expected a format's name"),
        (" e4m3", r"Nearest: e4m3"),
    ],
)
def test_names_that_mean_nothing_are_refused_with_the_reason(name, message):
    with pytest.raises(FormatError, match=message):
        get(name)


def test_where_an_element_is_needed_a_block_format_is_refused():
    with pytest.raises(
        FormatError, match=r"some_call: expected an element format; got the block format mxfp4\. .*e2m1"
    ):
        get_element("mxfp4", "some_call")
    assert get_element(torch.float16, "some_call") is FP16


@each(
    ("fields", "reason"),
    [
        ({"mantissa_bits": 3.0}, "integers as exponent_bits, mantissa_bits and bias"),
        ({"exponent_bits": 0}, "at least one exponent bit"),
        ({"exponent_bits": -1}, "field widths of zero or more"),
        ({"mantissa_bits": -1}, "field widths of zero or more"),
        ({"exponent_bits": 1}, "two exponent bits or more"),
        ({"specials": "posit"}, "specials to be one of ieee, fn, fnuz, none"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "specials": "fn"}, "room for a number besides zero and NaN"),
        ({"signed": False}, "a format without sign to be a pure exponent"),
        ({"signed": False, "mantissa_bits": 0, "specials": "fnuz"}, "a format without sign to be a pure exponent"),
        ({"bias": 1100}, "a bias that keeps every value inside float64's range"),
        ({"bias": -1100}, "a bias that keeps every value inside float64's range"),
        ({"bias": -(10**9)}, "a bias that keeps every value inside float64's range"),
        ({"exponent_bits": 11, "bias": 0}, "a bias that keeps every value inside float64's range"),
    ],
)
def test_impossible_fields_are_refused_with_the_reason(fields, reason):
    possible = {"name": "x", "exponent_bits": 5, "mantissa_bits": 3, "bias": 15}
    with pytest.raises(FormatError, match=f"Format: expected {reason}"):
        Format(**(possible | fields))


def test_a_format_may_reach_the_ends_of_float64_and_no_further():
    def fmt(bias):
        return Format(name="x", exponent_bits=4, mantissa_bits=3, bias=bias, specials="none")

    assert (fmt(15 - 1023).max_exponent, fmt(1023).min_exponent) == (1023, -1022)
    for bias in (15 - 1024, 1024):
        with pytest.raises(FormatError, match="inside float64's range"):
            fmt(bias)


@each(
    ("fields", "reason"),
    [
        ({"block": 0}, "a block of at least one value"),
        ({"block": 16.0}, "a block of at least one value"),
        ({"element": "e2m1"}, "element and scale to be formats, as of plimsoll.formats.get"),
        ({"element": formats.TF32}, "elements of at most 16 bits and a scale of at most 8"),
        ({"scale": formats.FP16}, "elements of at most 16 bits and a scale of at most 8"),
        ({"element": formats.E8M0}, "signed elements"),
        ({"tensor_scale": True}, r"a scale with a mantissa \(as E4M3\) under an FP32 tensor scale"),
    ],
)
def test_impossible_blocks_are_refused_with_the_reason(fields, reason):
    possible = {"name": "x", "element": E4M3, "block": 32, "scale": formats.E8M0}
    with pytest.raises(FormatError, match=f"BlockFormat: expected {reason}"):
        BlockFormat(**(possible | fields))


def test_this_room_imports_no_torch():
    check = "import sys, plimsoll.formats as f; f.E4M3.encode(1.0); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=HANG_SECONDS)


def test_naming_a_format_does_not_import_numpy():
    check = "import sys, plimsoll.formats as f; f.get('e5m7').max; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=HANG_SECONDS)
