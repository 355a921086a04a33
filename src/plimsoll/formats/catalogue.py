"""Catalogue of formats, and `get`, which finds one by name, dtype or `eXmY`.

Sources: IEEE 754-2019 (FP16, FP32, FP64); OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling
Formats 1.0 (E3M2, E2M3, E2M1, E8M0 and the MX blocks); Noune et al. 2022, arXiv:2206.02915 (the FNUZ pair);
NVIDIA's NVFP4 recipe, arXiv:2509.25149; NVFP4 without the tensor's scale is the default of torchao's NVFP4.
"""

import re
from typing import Any

from plimsoll import checks
from plimsoll.errors import FormatError
from plimsoll.formats.records import BlockFormat, Format

# The first compute capability whose matrix units take the format: NVIDIA's CUDA C++ programming guide, "Compute
# Capabilities", and the Volta, Ampere, Ada/Hopper and Blackwell architecture papers.
_VOLTA, _AMPERE, _ADA, _BLACKWELL = (7, 0), (8, 0), (8, 9), (10, 0)


def _ieee(name: str, exponent_bits: int, mantissa_bits: int, **facts: Any) -> Format:
    # No bias can be computed for a width that `Format` rejects, so any will do.
    bias = (1 << (exponent_bits - 1)) - 1 if 0 < exponent_bits < 64 else 0
    return Format(name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, bias=bias, **facts)


FP64 = _ieee("fp64", 11, 52, torch_dtype="float64")
FP32 = _ieee("fp32", 8, 23, torch_dtype="float32")
TF32 = _ieee("tf32", 8, 10, cuda_capability=_AMPERE)
FP16 = _ieee(
    "fp16",
    5,
    10,
    torch_dtype="float16",
    in_report=True,
    cuda_capability=_VOLTA,
    cpu_flags=("avx512_fp16", "amx_fp16", "asimdhp"),
)
BF16 = _ieee(
    "bf16",
    8,
    7,
    torch_dtype="bfloat16",
    in_report=True,
    cuda_capability=_AMPERE,
    cpu_flags=("avx512_bf16", "amx_bf16", "bf16"),
)
E5M2 = _ieee("e5m2", 5, 2, torch_dtype="float8_e5m2", in_report=True, cuda_capability=_ADA)
E4M3 = Format(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    specials="fn",
    torch_dtype="float8_e4m3fn",
    gradient_format="e5m2",
    in_report=True,
    cuda_capability=_ADA,
)
E5M2FNUZ = Format(
    name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, specials="fnuz", torch_dtype="float8_e5m2fnuz"
)
E4M3FNUZ = Format(
    name="e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    specials="fnuz",
    torch_dtype="float8_e4m3fnuz",
    gradient_format="e5m2fnuz",
)
E3M2 = Format(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3, specials="none")
E2M3 = Format(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1, specials="none")
E2M1 = Format(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, specials="none")
E8M0 = Format(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    specials="fn",
    signed=False,
    torch_dtype="float8_e8m0fnu",
)


def _mx(name: str, element: Format, **facts: Any) -> BlockFormat:
    return BlockFormat(name=name, element=element, block=32, scale=E8M0, cuda_capability=_BLACKWELL, **facts)


def _nv(name: str, **facts: Any) -> BlockFormat:
    return BlockFormat(name=name, element=E2M1, block=16, scale=E4M3, cuda_capability=_BLACKWELL, **facts)


MXFP8_E4M3 = _mx("mxfp8_e4m3", E4M3, in_report=True)
MXFP8_E5M2 = _mx("mxfp8_e5m2", E5M2)
MXFP6_E3M2 = _mx("mxfp6_e3m2", E3M2)
MXFP6_E2M3 = _mx("mxfp6_e2m3", E2M3)
MXFP4 = _mx("mxfp4", E2M1, in_report=True)
NVFP4 = _nv("nvfp4", tensor_scale=True, in_report=True)
NVFP4_SINGLE = _nv("nvfp4_single")

ELEMENTS: tuple[Format, ...] = (FP64, FP32, TF32, FP16, BF16, E5M2, E4M3, E5M2FNUZ, E4M3FNUZ, E3M2, E2M3, E2M1, E8M0)
BLOCKS: tuple[BlockFormat, ...] = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4, NVFP4_SINGLE)

# Other names of a format: its torch dtype, everyday words, ml_dtypes' names, and the fields of the wider formats.
ALIASES: dict[str, Format | BlockFormat] = {
    **{fmt.torch_dtype: fmt for fmt in ELEMENTS if fmt.torch_dtype is not None},
    **dict.fromkeys(("double", "e11m52"), FP64),
    **dict.fromkeys(("float", "e8m23"), FP32),
    **dict.fromkeys(("tensorfloat32", "e8m10"), TF32),
    **dict.fromkeys(("half", "e5m10"), FP16),
    "e8m7": BF16,
    "e4m3fn": E4M3,
    "float6_e3m2fn": E3M2,
    "float6_e2m3fn": E2M3,
    "float4_e2m1fn": E2M1,
}

# Names of a width, which several formats have. A message names the formats of a family.
FAMILIES: dict[str, tuple[Format | BlockFormat, ...]] = {
    **dict.fromkeys(("fp8", "float8"), (E4M3, E5M2)),
    **dict.fromkeys(("fp6", "float6"), (E3M2, E2M3)),
    **dict.fromkeys(("fp4", "float4"), (E2M1,)),
    "mxfp8": (MXFP8_E4M3, MXFP8_E5M2),
    "mxfp6": (MXFP6_E3M2, MXFP6_E2M3),
}

# Targets of `plan`, with the pairs of formats (forward, backward) that it tries in turn: those with more digits first.
TARGETS: dict[str, tuple[tuple[Format | BlockFormat, Format | BlockFormat], ...]] = {
    "fp16": ((FP16, FP16),),
    "bf16": ((BF16, BF16),),
    "fp8": ((E4M3, E5M2),),
    "mxfp8": ((MXFP8_E4M3, MXFP8_E4M3), (MXFP8_E4M3, MXFP8_E5M2)),
    "mxfp6": tuple((forward, b) for forward in (MXFP6_E2M3, MXFP6_E3M2) for b in (MXFP6_E2M3, MXFP6_E3M2)),
    "mxfp4": ((MXFP4, MXFP4),),
    "nvfp4": ((NVFP4, NVFP4),),
    "nvfp4_single": ((NVFP4_SINGLE, NVFP4_SINGLE),),
}
CHEAPEST = ("mxfp4", "nvfp4", "mxfp6", "fp8", "mxfp8")  # the targets that "cheapest" tries, by bits per value
# Formats that torch computes in as whole operations, narrowest first, and those of them that have FP32's range.
NATIVE: tuple[Format, ...] = (FP16, BF16, TF32, FP32)
WIDE = tuple(fmt for fmt in NATIVE if fmt.exponent_bits >= FP32.exponent_bits)

_BY_NAME: dict[str, Format | BlockFormat] = {fmt.name: fmt for fmt in (*ELEMENTS, *BLOCKS)} | ALIASES
_PATTERN = re.compile(r"e(\d{1,9})m(\d{1,9})")


def get(name: object) -> Format | BlockFormat:
    """Return the format of a name.

    Args:
        name: A name or alias of the catalogue in upper or lower case, any ``eXmY``, a torch dtype, or a format, which
            is returned itself. An ``eXmY`` that the catalogue does not list is IEEE-like: bias ``2**(X-1) - 1``, the
            top exponent for Inf and NaN.

    Raises:
        FormatError: The name means nothing (the message has the nearest names), or such an ``eXmY`` cannot exist.

    >>> get("E4M3").max, get("e5m7").bits
    (448.0, 13)
    """
    if isinstance(name, (Format, BlockFormat)):
        return name
    text = str(name).lower()
    key = text.removeprefix("torch.")
    if isinstance(name, str) or text.startswith("torch."):
        known = _BY_NAME.get(key)
        if known is not None:
            return known
        match = _PATTERN.fullmatch(key)
        if match is not None:
            key = f"e{int(match[1])}m{int(match[2])}"  # "e05m2" is e5m2
            return _BY_NAME.get(key) or _generic(key, int(match[1]), int(match[2]))
    raise FormatError(_unknown(name, key))


def get_element(name: object, operation: str) -> Format:
    """Return the element format of a name.

    Args:
        name: As for `get`.
        operation: What the user called, for the message.

    Raises:
        FormatError: There is no such format, or it is a block format.
    """
    fmt = get(name)
    if isinstance(fmt, BlockFormat):
        raise FormatError(
            f"{operation}: expected an element format; got the block format {fmt.name}. "
            f"Its elements are {fmt.element.name}."
        )
    return fmt


def _generic(key: str, exponent_bits: int, mantissa_bits: int) -> Format:
    try:
        return _ieee(key, exponent_bits, mantissa_bits)
    except FormatError as error:
        reason = str(error).removeprefix("Format: ").split("; got")[0]
        raise FormatError(f"formats.get: {reason}; got {key!r}.") from None


def _unknown(name: object, key: str) -> str:
    return (
        f"formats.get: expected a format's name, a Format or a floating torch dtype; got {name!r}. "
        f"{_hint(key)}`plimsoll formats` lists them all, and any eXmY (as e5m7) is one too."
    )


def _hint(key: str) -> str:
    """Return a sentence with the formats that the name may mean."""
    family = FAMILIES.get(key)
    if family is not None:
        return f"{key} is a family of formats: name {' or '.join(fmt.name for fmt in family)}. "
    nearest = checks.nearest(key, _BY_NAME)
    return f"Nearest: {', '.join(nearest)}. " if nearest else ""
