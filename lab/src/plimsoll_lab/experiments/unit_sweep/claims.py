"""The claims of the sweep: what was published of 2,092 trainings, of as many as were trained here."""

from collections.abc import Mapping

from plimsoll_lab.claim import Claim, claims as claims_of
from plimsoll_lab.experiments.unit_sweep.analysis import Scores, mean, share
from plimsoll_lab.experiments.unit_sweep.grid import FP16, FP32, STATIC, UNIT_FP16, UNIT_FP32, Way

TRAILS = 1.05  # of FP32's bits: from here on a training has not come to what it should
_WITHIN = 1.01
_MOST = 0.9  # of the designs: the source says "in almost all cases"
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[Way, Mapping[str, float]]


def claims(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """What the experiment says; `numbers`: of the watched trainings. Bounds on a mean are those it keeps with 95 %."""
    return (*_of_fp16(found, numbers), *_of_remedies(found, numbers), *_of_quality(found))


def _of_fp16(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    pairs = found.pairs(FP16, FP32)
    return claims_of(
        f"""
        fp16-fails | fp16_fails | at least {TRAILS} of FP32's bits, in the mean
            | FP16 with no loss scale, each at its best learning rate: fails, or trails FP32
        fp16-fails-widely | fp16_fails_widely | at least {_MOST} of the designs
            | FP16 with no loss scale: so it does in most designs
        fp16-underflow | fp16_underflow | at least 0.5 of gradients
            | FP16 with no loss scale: most gradients of activations are zero
        fp16-told | fp16_told | at least 1 alarms | FP16 with no loss scale: an alarm tells of the underflow
        """,
        fp16_fails=mean(pairs).low,
        fp16_fails_widely=share(pairs, at_least=TRAILS),
        fp16_underflow=numbers[FP16]["lost_after"],
        fp16_told=numbers[FP16]["underflow_alarms"],
    )


def _of_remedies(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """At the learning rate that is best in FP32: nothing but the precision is changed."""
    static, unit = found.pairs_at_same(STATIC, FP32), found.pairs_at_same(UNIT_FP16, UNIT_FP32)
    return claims_of(
        f"""
        static-repairs | static_repairs | at most {_WITHIN} of FP32's bits, in the mean
            | FP16 with a loss scale of 2,048: as FP32, at the same learning rate
        static-repairs-widely | static_repairs_widely | at least {_MOST} of the designs
            | FP16 with a loss scale of 2,048: so it is in most designs
        unit-repairs | unit_repairs | at most {_WITHIN} of its bits, in the mean
            | unit-scaled FP16: as unit-scaled FP32, at the same learning rate
        unit-repairs-widely | unit_repairs_widely | at least {_MOST} of the designs
            | unit-scaled FP16: so it is in most designs
        unit-nothing-lost | unit_nothing_lost | at most {_SOUND} of gradients
            | unit-scaled FP16: nearly no gradient is lost
        """,
        static_repairs=mean(static).high,
        static_repairs_widely=share(static, at_most=_WITHIN),
        unit_repairs=mean(unit).high,
        unit_repairs_widely=share(unit, at_most=_WITHIN),
        unit_nothing_lost=numbers[UNIT_FP16]["lost_after"],
    )


def _of_quality(found: Scores) -> tuple[Claim, ...]:
    """Unit-scaled against unscaled, each at its best learning rate."""
    pairs = found.pairs(UNIT_FP32, FP32)
    return claims_of(
        f"""
        unit-as-good | unit_as_good | at most {_WITHIN} of FP32's bits, in the mean
            | unit-scaled FP32: as good as FP32, or better, each at its best learning rate
        unit-as-good-widely | unit_as_good_widely | at least {_MOST} of the designs
            | unit-scaled FP32: so it is in most designs
        unit-fp16-as-good | unit_fp16_as_good | at most {_WITHIN} of FP32's bits, in the mean
            | unit-scaled FP16: as good as plain FP32, or better
        """,
        unit_as_good=mean(pairs).high,
        unit_as_good_widely=share(pairs, at_most=_WITHIN),
        unit_fp16_as_good=mean(found.pairs(UNIT_FP16, FP32)).high,
    )
