"""Specifications that a certificate cites, and the one that governs each format."""

from dataclasses import dataclass

from plimsoll.formats import BF16, BLOCKS, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP16, FP32, FP64, BlockFormat, Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """A text that says what an implementation must do."""

    name: str  # how a row cites it
    title: str  # its full title, with the place where it is found


IEEE_754 = Specification(name="IEEE 754-2019", title="IEEE Standard for Floating-Point Arithmetic, 2019")
OFP8 = Specification(name="OFP8 1.0", title="OCP 8-bit Floating Point Specification 1.0, 2023")
OCP_MX = Specification(name="OCP MX 1.0", title="OCP Microscaling Formats (MX) Specification 1.0, 2023")
FNUZ = Specification(
    name="FNUZ", title="Noune et al., 8-bit Numerical Formats for Deep Neural Networks, arXiv:2206.02915"
)
NVFP4_RECIPE = Specification(
    name="NVFP4", title="NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149"
)
FP32_SUMS = Specification(name="FP32 sums", title="Micikevicius et al., Mixed Precision Training, arXiv:1710.03740")
ERROR_BOUND = Specification(
    name="error bound", title="Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002"
)
STOCHASTIC = Specification(
    name="stochastic rounding", title="Croci et al., Stochastic rounding, Royal Society Open Science 9, 2022"
)
BYTE_ORDER = Specification(
    name="4-bit layout", title="PyTorch's torch.float4_e2m1fn_x2, ONNX's FLOAT4E2M1 and Triton's dot_scaled"
)
TENSORS = Specification(name="tensor operation", title="Every operation of PyTorch on tensors keeps to it")

SPECIFICATIONS = (
    IEEE_754, OFP8, OCP_MX, FNUZ, NVFP4_RECIPE, FP32_SUMS, ERROR_BOUND, STOCHASTIC, BYTE_ORDER, TENSORS,
)  # fmt: skip

_GOVERNED: dict[Specification, tuple[Format, ...]] = {
    IEEE_754: (FP16, BF16, FP32, FP64),
    OFP8: (E4M3, E5M2),
    OCP_MX: (E3M2, E2M3, E2M1, E8M0),
}


def governing(fmt: Format | BlockFormat) -> Specification:
    """Return the specification that governs conversions to a format."""
    if isinstance(fmt, BlockFormat):
        return OCP_MX if fmt in BLOCKS and not fmt.scale.signed else NVFP4_RECIPE
    for specification, formats in _GOVERNED.items():
        if fmt in formats:
            return specification
    # BF16 and a generic `eXmY` have none of their own. They are held to IEEE 754's rules.
    return FNUZ if fmt.specials == "fnuz" else IEEE_754


def allowed_saturation(fmt: Format) -> tuple[bool, ...]:
    """Return the allowed values of `saturate` by the specification, the usual first."""
    # IEEE 754 (7.4) knows overflow alone, the formats of OCP MX without Inf and NaN saturation alone. OFP8 (5.2, table
    # 3) and the FNUZ formats have both.
    if not (fmt.has_inf or fmt.has_nan):
        return (True,)
    return (False,) if governing(fmt) is IEEE_754 else (False, True)
