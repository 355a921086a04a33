"""The formats that have a name, and `get`, which finds one by name, dtype or `eXmY` pattern.

Sources: IEEE 754-2019 (FP16, FP32, FP64); OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling
Formats 1.0 (E3M2, E2M3, E2M1, E8M0 and the MX blocks); Noune et al. 2022, arXiv:2206.02915 (the FNUZ pair);
NVIDIA's NVFP4 recipe, arXiv:2509.25149; NVFP4 without the tensor's scale is the default of torchao's NVFP4.
"""

import difflib
import re

from plimsoll.errors import FormatError
from plimsoll.formats.block_format import BlockFormat
from plimsoll.formats.element_format import Format


def _ieee(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    bias = (1 << (exponent_bits - 1)) - 1 if 0 < exponent_bits < 64 else 0  # of a width that `Format` refuses: any
    return Format(name=name, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, bias=bias)


FP64 = _ieee("fp64", 11, 52)
FP32 = _ieee("fp32", 8, 23)
TF32 = _ieee("tf32", 8, 10)
FP16 = _ieee("fp16", 5, 10)
BF16 = _ieee("bf16", 8, 7)
E5M2 = _ieee("e5m2", 5, 2)
E4M3 = Format(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn")
E5M2FNUZ = Format(name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, specials="fnuz")
E4M3FNUZ = Format(name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, specials="fnuz")
E3M2 = Format(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3, specials="none")
E2M3 = Format(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1, specials="none")
E2M1 = Format(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, specials="none")
E8M0 = Format(name="e8m0", exponent_bits=8, mantissa_bits=0, bias=127, specials="fn", signed=False)

MXFP8_E4M3 = BlockFormat(name="mxfp8_e4m3", element=E4M3, block=32, scale=E8M0)
MXFP8_E5M2 = BlockFormat(name="mxfp8_e5m2", element=E5M2, block=32, scale=E8M0)
MXFP6_E3M2 = BlockFormat(name="mxfp6_e3m2", element=E3M2, block=32, scale=E8M0)
MXFP6_E2M3 = BlockFormat(name="mxfp6_e2m3", element=E2M3, block=32, scale=E8M0)
MXFP4 = BlockFormat(name="mxfp4", element=E2M1, block=32, scale=E8M0)
NVFP4 = BlockFormat(name="nvfp4", element=E2M1, block=16, scale=E4M3, tensor_scale=True)
NVFP4_SINGLE = BlockFormat(name="nvfp4_single", element=E2M1, block=16, scale=E4M3)

ELEMENTS: tuple[Format, ...] = (
    FP64, FP32, TF32, FP16, BF16, E5M2, E4M3, E5M2FNUZ, E4M3FNUZ, E3M2, E2M3, E2M1, E8M0,
)  # fmt: skip
BLOCKS: tuple[BlockFormat, ...] = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4, NVFP4_SINGLE)

# Other names for the same thing: torch's dtypes, everyday words, and the fields of the wider formats.
ALIASES: dict[str, Format | BlockFormat] = {
    "float64": FP64, "double": FP64, "e11m52": FP64,
    "float32": FP32, "float": FP32, "e8m23": FP32,
    "tensorfloat32": TF32, "e8m10": TF32,
    "float16": FP16, "half": FP16, "e5m10": FP16,
    "bfloat16": BF16, "e8m7": BF16,
    "float8_e5m2": E5M2,
    "float8_e4m3fn": E4M3, "e4m3fn": E4M3,
    "float8_e5m2fnuz": E5M2FNUZ, "float8_e4m3fnuz": E4M3FNUZ,
    "float6_e3m2fn": E3M2, "float6_e2m3fn": E2M3, "float4_e2m1fn": E2M1,
    "float8_e8m0fnu": E8M0,
}  # fmt: skip

# Names of a width, which several formats have. Targets of `plan` may be named so; a format is one of these.
FAMILIES: dict[str, tuple[Format | BlockFormat, ...]] = {
    "fp8": (E4M3, E5M2), "float8": (E4M3, E5M2), "fp6": (E3M2, E2M3), "float6": (E3M2, E2M3), "fp4": (E2M1,),
    "float4": (E2M1,), "mxfp8": (MXFP8_E4M3, MXFP8_E5M2), "mxfp6": (MXFP6_E3M2, MXFP6_E2M3),
}  # fmt: skip

_BY_NAME: dict[str, Format | BlockFormat] = {fmt.name: fmt for fmt in (*ELEMENTS, *BLOCKS)} | ALIASES
_PATTERN = re.compile(r"e(\d{1,9})m(\d{1,9})")


def get(name: object) -> Format | BlockFormat:
    """The format of that name; a `Format`, a `BlockFormat` and a torch dtype are names too. Case does not matter.

    Any ``eXmY`` that the catalogue does not list is IEEE-like: bias ``2**(X-1) - 1``, the top exponent spent on Inf and
    NaN. Raises `FormatError`, with the nearest names, for a name that means nothing, and with the reason for an
    ``eXmY`` that cannot be.

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
    """The element format of that name; `FormatError` in the name of `operation` if it is a block format."""
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
    """The formats that the name may mean."""
    family = FAMILIES.get(key)
    if family is not None:
        return f"{key} is no format of its own: name {' or '.join(fmt.name for fmt in family)}. "
    nearest = difflib.get_close_matches(key, _BY_NAME, n=3, cutoff=0.5)
    return f"Nearest: {', '.join(nearest)}. " if nearest else ""
