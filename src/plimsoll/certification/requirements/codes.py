"""Requirements of an unpack, and on two 4-bit codes a byte, which packs share."""

from dataclasses import replace

import numpy as np

from plimsoll.certification.certificate import BYTE_ORDER, FNUZ, IEEE_754, NVFP4_RECIPE, OCP_MX, OFP8, TENSORS, Outcome
from plimsoll.certification.codes import ordinary_codes
from plimsoll.certification.probing.arrays import compared, deviation
from plimsoll.certification.registry import requirement
from plimsoll.certification.trial import Trial

_VALUES = {IEEE_754: "3.4", OFP8: "5.1", OCP_MX: "5.2", FNUZ: "", NVFP4_RECIPE: ""}


@requirement(
    "decoded",
    "Every finite code has its value, under every scale: the product of element and scale.",
    kinds=("unpack",),
    sections=_VALUES,
)
def decoded(trial: Trial) -> Outcome:
    """Try all codes, and all scales, whose products are normal in the results' dtype."""
    found = trial.decoded
    return found.compare(found.finite & (found.elements != 0) & (np.abs(found.exact) >= found.smallest_normal))


@requirement(
    "decoded-subnormals",
    "Products that are subnormal in the results' dtype are not flushed to zero.",
    kinds=("unpack",),
    sections=_VALUES,
)
def decoded_subnormals(trial: Trial) -> Outcome:
    """Try codes under the smallest scales."""
    found = trial.decoded
    return found.compare(found.finite & (found.exact != 0) & (np.abs(found.exact) < found.smallest_normal))


@requirement(
    "decoded-zeros",
    "The codes of +0 and -0 give zeros of their sign.",
    kinds=("unpack",),
    sections=_VALUES | {OCP_MX: "5.3"},
    applies=lambda subject: subject.element.signed,
)
def decoded_zeros(trial: Trial) -> Outcome:
    """Try the codes of zero under every scale."""
    return trial.decoded.compare(trial.decoded.finite & (trial.decoded.elements == 0))


@requirement(
    "decoded-nan",
    "Every code of NaN gives NaN, and the code of Inf an infinity.",
    kinds=("unpack",),
    sections={IEEE_754: "3.4", OFP8: "5.1", OCP_MX: "5.2", FNUZ: ""},
    applies=lambda subject: subject.element.has_nan,
)
def decoded_nan(trial: Trial) -> Outcome:
    """Try all codes that are no numbers, under every scale that is one."""
    return trial.decoded.compare(~np.isfinite(trial.decoded.elements) & np.isfinite(trial.decoded.scales))


@requirement(
    "nan-scale",
    "Under a scale that is NaN every value of the block is NaN.",
    kinds=("unpack",),
    sections={OCP_MX: "5.2", NVFP4_RECIPE: ""},
    applies=lambda subject: subject.blocks is not None,
)
def nan_scale(trial: Trial) -> Outcome:
    """Try all codes under the scale's code of NaN."""
    return trial.decoded.compare(np.isnan(trial.decoded.scales))


@requirement(
    "tensor-scale-applied",
    "Values are multiplied by the tensor's scale, within FP32's rounding.",
    kinds=("unpack",),
    sections={NVFP4_RECIPE: ""},
    applies=lambda subject: subject.blocks is not None and subject.blocks.tensor_scale,
)
def tensor_scale_applied(trial: Trial) -> Outcome:
    """Try ordinary codes under scales that are no powers of two."""
    outcome = Outcome(tried=0)
    for scale in (0.75, 3.1e-5):
        scaled_codes = replace(ordinary_codes(trial.subject.fmt), tensor_scale=float(np.float32(scale)))
        result, exact = trial.unpack(scaled_codes), scaled_codes.values(trial.subject.fmt)
        note, codes = f"its code, under the tensor scale {scale:g}", scaled_codes.codes
        close = np.isclose(result.values, exact, rtol=2.0**-7 if result.dtype == "bfloat16" else 2.0**-20)
        outcome += compared(result.values, exact, lambda at, c=codes, n=note: (int(c[at]), n), right=close)
    return outcome


@requirement(
    "half-order",
    "Of two 4-bit codes in a byte the first is in the low half.",
    kinds=("pack", "unpack"),
    general=(BYTE_ORDER, ""),
    applies=lambda subject: subject.element.bits == 4,
)
def half_order(trial: Trial) -> Outcome:
    """Look at the order that gives the values back."""
    first = trial.unpack.form.first if trial.subject.kind == "unpack" else trial.convention.first
    if first == "high":
        return deviation("two codes", "the first in the low half of the byte", "in the high half")
    return Outcome(tried=1)


@requirement(
    "repeatable",
    "Two calls with the same codes give the same values.",
    kinds=("unpack",),
    general=(TENSORS, "determinism"),
)
def repeatable(trial: Trial) -> Outcome:
    """Call twice."""
    codes = ordinary_codes(trial.subject.fmt)
    first, second = (trial.unpack(codes).values for _ in range(2))
    return compared(second, first, lambda at: (int(codes.codes[at]), "its code, in a second call"))
