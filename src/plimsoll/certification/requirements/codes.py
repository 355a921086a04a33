"""Requirements of an unpack, and the one on two 4-bit codes in a byte, which packs have too."""

from dataclasses import replace

import numpy as np

from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.certification.codes.convention import ordinary_codes
from plimsoll.certification.probing.arrays import same
from plimsoll.certification.registry import requirement
from plimsoll.certification.specifications import BYTE_ORDER, FNUZ, IEEE_754, NVFP4_RECIPE, OCP_MX, OFP8, TENSORS
from plimsoll.certification.trial import Subject, Trial
from plimsoll.formats import BlockFormat


def _block(subject: Subject) -> bool:
    return isinstance(subject.fmt, BlockFormat)


def _tensor_scale(subject: Subject) -> bool:
    return isinstance(subject.fmt, BlockFormat) and subject.fmt.tensor_scale


def _four_bits(subject: Subject) -> bool:
    return subject.element.bits == 4


@requirement(
    "decoded",
    "Every finite code has its value, under every scale: the product of element and scale.",
    kinds=("unpack",),
    sections={IEEE_754: "3.4", OFP8: "5.1", OCP_MX: "5.2", FNUZ: "", NVFP4_RECIPE: ""},
)
def decoded(trial: Trial) -> Outcome:
    """Try all codes, and all scales, whose products are normal in the results' dtype."""
    found = trial.decoded
    zero = found.elements == 0
    return found.compare(found.finite & ~zero & (np.abs(found.exact) >= found.smallest_normal))


@requirement(
    "decoded-subnormals",
    "Products that are subnormal in the results' dtype are not flushed to zero.",
    kinds=("unpack",),
    sections={IEEE_754: "3.4", OFP8: "5.1", OCP_MX: "5.2", FNUZ: "", NVFP4_RECIPE: ""},
)
def decoded_subnormals(trial: Trial) -> Outcome:
    """Try codes under the smallest scales."""
    found = trial.decoded
    return found.compare(found.finite & (found.exact != 0) & (np.abs(found.exact) < found.smallest_normal))


@requirement(
    "decoded-zeros",
    "The codes of +0 and -0 give zeros of their sign.",
    kinds=("unpack",),
    sections={IEEE_754: "3.4", OFP8: "5.1", OCP_MX: "5.3", FNUZ: "", NVFP4_RECIPE: ""},
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
    found = trial.decoded
    return found.compare(~np.isfinite(found.elements) & np.isfinite(found.scales))


@requirement(
    "nan-scale",
    "Under a scale that is NaN every value of the block is NaN.",
    kinds=("unpack",),
    sections={OCP_MX: "5.2", NVFP4_RECIPE: ""},
    applies=_block,
)
def nan_scale(trial: Trial) -> Outcome:
    """Try all codes under the scale's code of NaN."""
    return trial.decoded.compare(np.isnan(trial.decoded.scales))


@requirement(
    "tensor-scale-applied",
    "Values are multiplied by the tensor's scale, within FP32's rounding.",
    kinds=("unpack",),
    sections={NVFP4_RECIPE: ""},
    applies=_tensor_scale,
)
def tensor_scale_applied(trial: Trial) -> Outcome:
    """Try ordinary codes under scales that are no powers of two."""
    for scale in (0.75, 3.1e-5):
        given = replace(ordinary_codes(trial.subject.fmt), tensor_scale=float(np.float32(scale)))
        result, exact = trial.unpack(given), given.values(trial.subject.fmt)
        wrong = np.argwhere(~np.isclose(result.values, exact, rtol=2.0**-7 if result.dtype == "bfloat16" else 2.0**-20))
        if len(wrong):
            row, column = wrong[0]
            example = Counterexample(
                input=int(given.codes[row, column]), expected=float(exact[row, column]),
                got=float(result.values[row, column]), note=f"its code, under the tensor scale {scale:g}",
            )  # fmt: skip
            return Outcome(tried=exact.size, wrong=len(wrong), counterexample=example)
    return Outcome(tried=2 * ordinary_codes(trial.subject.fmt).codes.size)


@requirement(
    "half-order",
    "Of two 4-bit codes in a byte the first is in the low half.",
    kinds=("pack", "unpack"),
    general=(BYTE_ORDER, ""),
    applies=_four_bits,
)
def half_order(trial: Trial) -> Outcome:
    """Look at the order that gives the values back."""
    first = trial.unpack.form.first if trial.subject.kind == "unpack" else trial.convention.first
    if first == "high":
        example = Counterexample(
            input="two codes", expected="the first in the low half of the byte", got="in the high half"
        )
        return Outcome(tried=1, wrong=1, counterexample=example)
    return Outcome(tried=1)


@requirement(
    "repeatable",
    "Two calls with the same codes give the same values.",
    kinds=("unpack",),
    general=(TENSORS, "determinism"),
)
def repeatable(trial: Trial) -> Outcome:
    """Call twice."""
    given = ordinary_codes(trial.subject.fmt)
    first, second = (trial.unpack(given).values for _ in range(2))
    moved = np.argwhere(~same(first, second))
    if not len(moved):
        return Outcome(tried=first.size)
    row, column = moved[0]
    example = Counterexample(
        input=int(given.codes[row, column]), expected=float(first[row, column]), got=float(second[row, column]),
        note="its code, in a second call",
    )  # fmt: skip
    return Outcome(tried=first.size, wrong=len(moved), counterexample=example)
